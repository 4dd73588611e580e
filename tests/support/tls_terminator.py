"""TLS in front of a plain server, with certificates of a certificate authority that nobody else trusts."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path

import trustme
from fault_proxy import FaultProxy

__all__ = ["PrivateCa", "TlsTerminator"]


class PrivateCa:
    """A certificate authority of its own.

    Args:
        folder: where its certificate is written, as `NAME.pem`.
    """

    def __init__(self, folder: Path, name: str = "private-ca") -> None:
        self._ca = trustme.CA(organization_name=name)
        self.bundle = folder / f"{name}.pem"
        """What a client has to trust, as a file."""
        self._ca.cert_pem.write_to_path(self.bundle)

    def server_context(self, names: Sequence[str]) -> ssl.SSLContext:
        """For a server with a certificate for these host names and addresses."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._ca.issue_cert(*names).configure_cert(context)
        return context


class TlsTerminator(FaultProxy):
    """Speaks TLS to clients and plain HTTP to the server; takes faults as any `FaultProxy`.

    Args:
        host, port: the server.
        ca: signs the certificate.
        names: that the certificate is for; loopback's by default.
    """

    def __init__(self, host: str, port: int, ca: PrivateCa, names: Sequence[str] = ("127.0.0.1", "localhost")) -> None:
        super().__init__(host, port, tls=ca.server_context(names))
