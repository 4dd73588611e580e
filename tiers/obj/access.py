"""boto3's part of the object tier: where a bucket answers, who we are, signatures, and the rare calls.

The bytes of chunks go another way (see `kvsluice.tiers.obj.wire`): a call of boto3 costs a millisecond of the
interpreter, and its bodies are copied. What it knows about endpoints, regions, credentials and signing is used as it
stands. It is imported when the first tier is made.
"""

from __future__ import annotations

import contextlib
import ipaddress
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal, cast
from urllib.parse import SplitResult, parse_qs, urlsplit

from kvsluice.tiers.errors import ConfigError
from kvsluice.tiers.obj.failures import ObjectFailure, RequestFailedError
from kvsluice.tiers.obj.pool import Target
from kvsluice.tiers.obj.s3_client import S3Client

if TYPE_CHECKING:
    from botocore.credentials import ReadOnlyCredentials

__all__ = ["Access", "AccessOptions", "Place", "endpoint_of", "fits_header", "signs_payload"]

_DEFAULT_REGION: Final = "us-east-1"
"""What S3-compatible servers take when nothing is configured; signatures need some region."""
_RENEW_EVERY_S: Final = 30.0
"""How often, at most, keys that the store refuses are looked for anew."""
_USER_AGENT: Final = "kvsluice"


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """What boto3 is told. Secrets do not show in its repr."""

    region: str | None = None
    access_key: str | None = field(default=None, repr=False)
    secret_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    ca_bundle: str | None = None
    addressing_style: Literal["auto", "path", "virtual"] = "auto"
    sign_payload: Literal["auto", "on", "off"] = "auto"
    connect_timeout_s: float = 2.0
    read_timeout_s: float = 5.0
    max_attempts: int = 3


@dataclass(frozen=True, slots=True)
class Place:
    """Where a bucket answers.

    Attributes:
        url: the endpoint as configured; None for AWS.
        base: scheme, host and path, to which an object's quoted key is added.
        path: what a request names before the key: of `base`, or all of it where a proxy is asked by plain http.
        host: the header's value.
        region: to sign for.
        signs_payload: whether a body's digest is part of the signature.
        proxy_headers: for every request, where a proxy is asked by plain http.
        target: where connections go.
    """

    url: str | None
    base: str
    path: str
    host: str
    region: str
    signs_payload: bool
    target: Target
    proxy_headers: Mapping[str, str] = field(default_factory=dict, repr=False)


def endpoint_of(endpoint_url: str | None) -> SplitResult | None:
    """The endpoint in parts, https unless it says otherwise; `None` for AWS.

    Raises:
        ConfigError: no host, another scheme, or credentials in the URL, which would reach logs.
    """
    if endpoint_url is None:
        return None
    try:
        parts = urlsplit(endpoint_url if "://" in endpoint_url else f"https://{endpoint_url}")
        port = parts.port
    except ValueError:
        # Python's own words repeat what it takes for the port or the host, which may be half of a password.
        raise ConfigError("endpoint_url is no URL: give https://HOST[:PORT] or http://HOST[:PORT]") from None
    if parts.username is not None or parts.password is not None:
        raise ConfigError("endpoint_url holds credentials: give them as access_key and secret_key")
    if parts.query or parts.fragment:
        raise ConfigError("endpoint_url has a query or a fragment, which an endpoint cannot have")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise ConfigError(f"endpoint_url is {endpoint_url!r}: give https://HOST[:PORT] or http://HOST[:PORT]")
    return parts


def signs_payload(endpoint: SplitResult | None) -> bool:
    """Whether payloads are signed by default: only where plain http would let others change them on their way."""
    if endpoint is None or endpoint.scheme != "http":
        return False
    host = endpoint.hostname or ""
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


class Access:
    """Credentials, signatures and clients of one bucket. Thread-safe.

    It has a session of its own, so that nothing of it is shared with the application's.

    Raises:
        ConfigError: boto3 is absent or refuses the configuration, or there are no credentials.
    """

    def __init__(self, bucket: str, options: AccessOptions, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.bucket = bucket
        self._options = options
        self._clock = clock
        self._lock = threading.Lock()
        self._renewing = threading.Lock()
        self.keys_number = 0
        """Grows when other keys are found; those that boto3 renews by itself are the same in this."""
        self._clients: dict[str | None, S3Client] = {}
        self._renewed_s = clock() - _RENEW_EVERY_S
        if (options.access_key is None) != (options.secret_key is None):
            raise ConfigError("access_key and secret_key go together: give both, or neither")
        for name in ("access_key", "secret_key", "session_token"):
            if not fits_header(getattr(options, name) or ""):
                raise ConfigError(f"{name} holds a character that no header can carry, such as a line break")
        try:
            self._new_session()
            from botocore.auth import S3SigV4Auth
            from botocore.awsrequest import AWSRequest
            from botocore.config import Config
        except ImportError as error:
            raise ConfigError(f"the obj tier needs boto3: pip install 'kvsluice[obj]' ({error})") from error
        self._request_class, self._signer_class = AWSRequest, S3SigV4Auth
        self._signed_body = Config(s3={"payload_signing_enabled": True})
        self._unsigned_body = Config(s3={"payload_signing_enabled": False})
        self._keys = self._find_keys()

    def place(self, endpoint_url: str | None) -> Place:
        """Where the bucket answers behind this endpoint.

        Raises:
            ConfigError: boto3 refuses the configuration.
        """
        # A presigned URL is boto3's word on style, host, path and region.
        with _refusals():
            signed = self.client(endpoint_url).generate_presigned_url(
                "get_object", {"Bucket": self.bucket, "Key": "k"}, 60
            )
        parts = urlsplit(signed)
        host = parts.hostname or ""
        path = parts.path[: -len("k")]
        base = f"{parts.scheme}://{parts.netloc}{path}"
        scope = parse_qs(parts.query)["X-Amz-Credential"][0].split("/")
        if ".s3express-" in host:
            raise ConfigError(f"bucket {self.bucket!r} is one of S3 Express: the obj tier speaks plain S3")
        proxy, proxy_headers = _proxy_for(base)
        is_tls = parts.scheme == "https"
        asks_proxy = proxy is not None and not is_tls
        sign = self._options.sign_payload
        return Place(
            url=endpoint_url,
            base=base,
            path=base if asks_proxy else path,
            host=parts.netloc,
            # From the end: a key may have slashes in it.
            region=scope[-3],
            signs_payload=signs_payload(parts) if sign == "auto" else sign == "on",
            proxy_headers=proxy_headers if asks_proxy else {},
            target=Target(
                host=host,
                port=parts.port or (443 if is_tls else 80),
                tls=self._tls() if is_tls else None,
                proxy=proxy,
                proxy_headers=proxy_headers,
            ),
        )

    def sign(
        self, place: Place, method: str, tail: str, headers: Mapping[str, str], body: memoryview | None
    ) -> dict[str, str]:
        """All headers of one request, signed now.

        Args:
            tail: what follows `place.base`, quoted.
            headers: to be signed and sent, by lower-case name.

        Raises:
            RequestFailedError: boto3 could not renew the credentials.
        """
        request = self._request_class(
            method=method,
            url=place.base + tail,
            headers={"host": place.host, **headers},
            data=body if place.signs_payload else None,
        )
        request.context["client_config"] = self._signed_body if place.signs_payload else self._unsigned_body
        self._signer_class(self._current_keys(), "s3", place.region).add_auth(request)
        # As they are: what `items` gives goes through the policies of e-mail first, one by one.
        signed = dict(request.headers.raw_items())
        signed["user-agent"] = _USER_AGENT
        if body is not None:
            signed["content-length"] = str(body.nbytes)
        signed.update(place.proxy_headers)
        return signed

    def renew(self, refused: int) -> bool:
        """The store refuses the keys: whether there are other ones, as after a rotation that boto3 does not follow.

        Args:
            refused: the `keys_number` that was signed with; another thread may have found newer ones since.
        """
        if self._options.access_key is not None:
            return False
        with self._renewing:
            if self.keys_number != refused:
                return True
            if self._clock() - self._renewed_s < _RENEW_EVERY_S:
                return False
            self._renewed_s = self._clock()
            return self._look_for_keys()

    def _look_for_keys(self) -> bool:
        try:
            old = self._current_keys()
            self._new_session()
            self._keys = self._find_keys()
            new = self._current_keys()
        except (ConfigError, RequestFailedError):
            return False
        with self._lock:
            # Those in use go on to their end.
            self._clients.clear()
        self.keys_number += new != old
        return new != old

    def client(self, endpoint_url: str | None) -> S3Client:
        """boto3's client of one endpoint, for listings, batches and multipart uploads.

        Raises:
            ConfigError: boto3 refuses the configuration.
        """
        with self._lock:
            client = self._clients.get(endpoint_url)
            if client is None:
                client = self._clients[endpoint_url] = self._make_client(endpoint_url)
            return client

    def close(self) -> None:
        """Close what clients were made. Idempotent."""
        with self._lock:
            clients = list(self._clients.values())
            self._clients.clear()
        for client in clients:
            client.close()

    def _new_session(self) -> None:
        import boto3.session
        import botocore.session

        self._core = botocore.session.get_session()
        self._session = boto3.session.Session(botocore_session=self._core)

    def _current_keys(self) -> ReadOnlyCredentials:
        """Asking for the keys is what makes boto3 fetch newer ones before these expire."""
        keys: ReadOnlyCredentials | None = None
        name = ""
        try:
            keys = self._keys()
        except Exception as error:  # noqa: BLE001 - boto3 runs helpers to get them, and passes on what these raise
            # Its words may hold what a helper printed: they end here.
            name = type(error).__name__
        if keys is None:
            raise RequestFailedError(ObjectFailure(None, name, "credentials"))
        if not fits_header(keys.access_key or "") or not fits_header(keys.token or ""):
            raise RequestFailedError(ObjectFailure(None, "one holds a line break or the like", "credentials"))
        return keys

    def _find_keys(self) -> Callable[[], ReadOnlyCredentials]:
        from botocore.credentials import ReadOnlyCredentials

        given = self._options
        if given.access_key is not None and given.secret_key is not None:
            keys = ReadOnlyCredentials(given.access_key, given.secret_key, given.session_token)
            return lambda: keys
        with _refusals():
            found = self._session.get_credentials()
        if found is None:
            raise ConfigError(
                "no credentials for the obj tier: give access_key and secret_key, or set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY, a profile, or a role, as for any program on boto3"
            )
        return found.get_frozen_credentials

    def _make_client(self, endpoint_url: str | None) -> S3Client:
        from botocore.config import Config

        options = self._options
        endpoint = endpoint_of(endpoint_url)
        style = options.addressing_style
        if endpoint is None and style == "auto" and "." not in self.bucket:
            # The same, but that boto3 presigns for the region's own endpoint: newer regions are not at the global one.
            # (A name with dots is no host that a certificate covers: that stays in the path.)
            style = "virtual"
        with _refusals():
            client = self._session.client(
                "s3",
                endpoint_url=endpoint.geturl() if endpoint is not None else None,
                region_name=options.region or self._session.region_name or _DEFAULT_REGION,
                aws_access_key_id=options.access_key,
                aws_secret_access_key=options.secret_key,
                aws_session_token=options.session_token,
                verify=options.ca_bundle,
                config=Config(
                    signature_version="s3v4",
                    s3={"addressing_style": style},
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                    connect_timeout=options.connect_timeout_s,
                    read_timeout=options.read_timeout_s,
                    retries={"mode": "standard", "total_max_attempts": options.max_attempts},
                ),
            )
        return cast("S3Client", client)

    def _tls(self) -> ssl.SSLContext:
        from botocore.httpsession import get_cert_path

        # The order is boto3's own: what is given, AWS_CA_BUNDLE or the profile's, its own list.
        bundle = self._options.ca_bundle or self._core.get_config_variable("ca_bundle") or get_cert_path(True)
        try:
            return ssl.create_default_context(cafile=str(bundle))
        except OSError as error:
            raise ConfigError(f"ca_bundle {str(bundle)!r} cannot be used: {error}") from error


def fits_header(text: str) -> bool:
    """Whether a header can carry it as it stands; the refusal of one that cannot would repeat it."""
    return text.isascii() and text.isprintable()


def _proxy_for(base: str) -> tuple[SplitResult | None, Mapping[str, str]]:
    """The environment's proxy for that URL, and the headers it wants."""
    from botocore.httpsession import ProxyConfiguration
    from botocore.utils import get_environ_proxies

    proxies: Mapping[str, str] = get_environ_proxies(base)
    found = proxies.get(urlsplit(base).scheme)
    if not found:
        return None, {}
    scheme, there, _ = found.partition("://")
    if there and scheme != "http":
        raise ConfigError(f"the proxy for {base} is of scheme {scheme!r}: the obj tier goes through http ones")
    known = ProxyConfiguration(proxies)
    url = known.proxy_url_for(base)
    try:
        proxy = urlsplit(url)
        usable = proxy.hostname and proxy.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigError(f"the proxy for {base} is no URL: give http://HOST[:PORT]")
    return proxy, known.proxy_headers_for(url)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    from botocore.exceptions import BotoCoreError

    try:
        yield
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"boto3 refuses the configuration of the obj tier: {error}") from error
