"""What each kind of tier can be told, and the types of value that a configuration is made of.

The names that users need are exported by `kvsluice.connector.config`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Final, Literal, TypeAlias
from urllib.parse import unquote, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SecretStr,
    model_validator,
)

from kvsluice.tiers.backpressure.config import INHERIT, merge_backpressure
from kvsluice.tiers.obj.parts import MIN_PART_BYTES

__all__ = [
    "TIER_TYPES",
    "AnyTierConfig",
    "Count",
    "FsTierConfig",
    "Gate",
    "HostTierConfig",
    "Model",
    "ObjTierConfig",
    "Positive",
    "Seconds",
    "Secret",
    "Size",
    "Text",
    "TierConfig",
    "TriState",
    "check_ladder",
    "parse_size",
]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgtpe])(i?))?b?\s*", re.IGNORECASE | re.ASCII)
_EXPONENT: Final = {letter: power for power, letter in enumerate(("k", "m", "g", "t", "p", "e"), start=1)}


def parse_size(value: object) -> int:
    """Bytes of an integer or of a string such as "8GiB", "500 GB" or "1.5TiB"; always at least 1.

    `Ki`, `Mi`, ... count in 1024, `K`, `M`, ... in 1000, and the `B` may be left out. A fraction of
    a byte is cut off.

    Raises:
        ValueError: anything else. The message says what would do; it does not repeat the value.
    """
    num_bytes: int | None = None
    if isinstance(value, float) and value.is_integer():
        num_bytes = int(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        num_bytes = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        number, letter, binary = match.groups()
        scale = (1024 if binary else 1000) ** _EXPONENT[letter.lower()] if letter else 1
        num_bytes = int(Fraction(number) * scale)
    if num_bytes is None:
        raise ValueError('a size is an integer number of bytes or a string such as "8GiB"')
    if num_bytes <= 0:
        raise ValueError("a size must be at least 1 byte")
    return num_bytes


def _refuse_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("true and false are not numbers")
    return value


def _upper(value: object) -> object:
    # A wrong word stays as it is, so that the error shows what was written.
    return value.upper() if isinstance(value, str) and value.upper() in ("LOCAL", "REMOTE") else value


def _nonempty_secret(secret: SecretStr) -> SecretStr:
    if not secret.get_secret_value():
        raise ValueError("it is empty, as an unset variable would make it: leave the key out instead")
    return secret


Size = Annotated[int, BeforeValidator(parse_size)]
Count = Annotated[int, BeforeValidator(_refuse_bool), Field(ge=1)]
Seconds = Annotated[float, BeforeValidator(_refuse_bool), Field(gt=0, allow_inf_nan=False)]
SecondsOrOff = Annotated[float, BeforeValidator(_refuse_bool), Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, BeforeValidator(_refuse_bool), Field(gt=0, allow_inf_nan=False)]
Text = Annotated[str, Field(min_length=1)]
Secret = Annotated[SecretStr, AfterValidator(_nonempty_secret)]
Locality = Annotated[Literal["LOCAL", "REMOTE"], BeforeValidator(_upper)]
Gate: TypeAlias = dict[str, JsonValue] | None
TriState = Literal["auto", "on", "off"]


class Model(BaseModel):
    # hide_input_in_errors: pydantic's own messages would print a secret that stands in a wrong place.
    # protected_namespaces: older pydantic warns about a field called model_revision.
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, protected_namespaces=())


class TierConfig(Model):
    """What every kind of tier can be told."""

    name: str = Field(
        "",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$|^$",
        description='What errors, metrics and reports call the tier; unique. Default "": the type, with a number '
        'after it from the second of its kind on ("fs", "fs-2").',
    )
    backpressure: Gate | Literal["inherit"] = Field(
        "inherit",
        description="The tier's gate, merged field by field over the common one; null turns this tier's gate off. "
        'Default "inherit": the common one as it is.',
    )
    max_queue_chunks: Count = Field(
        1024,
        description="Stores that may be open on this tier, in chunks; more are skipped and counted. Default 1024: the "
        "burst of a prompt of 262,144 tokens fits, and a stall does not pile up.",
    )
    max_queue_s: Seconds = Field(
        5.0,
        description="Seconds a store may wait before it is shed, so that it holds its pinned slot no longer. "
        "Default 5.0: a chunk nobody got to in that time is holding up newer ones.",
    )

    def backpressure_for(self, common: Mapping[str, object] | None) -> dict[str, object] | None:
        """A new dict for `build_gate`: this tier's own keys over the `common` ones; `None` where it has no gate."""
        return merge_backpressure(common, INHERIT if self.backpressure == "inherit" else self.backpressure)


class HostTierConfig(TierConfig):
    """Pinned host memory: one region per node, from which the other tiers are filled."""

    type: Literal["host"] = Field("host", description='Always "host", the default.')
    capacity: Size = Field(
        description='Bytes, or "8GiB", per node and engine. No default: only the operator knows what memory is spare.'
    )


class IoTierConfig(TierConfig):
    """What every tier that does I/O can be told."""

    store_concurrency: Literal["adaptive", "fixed"] = Field(
        "adaptive",
        description='How many stores run at once on a rank: "fixed" is n_write_threads. Default "adaptive": within '
        "them the fewest that keep the device busy, and beside loads as many as the loads do not feel.",
    )
    load_bytes_per_s: Size | None = Field(
        None,
        description='Bytes, or "2GB", that come from this tier per second, on each rank, for the load gate to reckon '
        "with. Default None: measured, and so right when the tier gets slower or faster.",
    )


class FsTierConfig(IoTierConfig):
    """A folder on a filesystem, local or mounted."""

    type: Literal["fs"] = Field("fs", description='Always "fs", the default.')
    root_dir: Text = Field(description="Folder that the tier owns; made if missing. No default.")
    capacity: Size | None = Field(
        None,
        description='Bytes, or "500GiB", that all processes on this root may use together. Default None: a share of '
        "the filesystem's free space, so that an unset limit cannot fill a disk.",
    )
    direct_io: TriState = Field(
        "auto",
        description='O_DIRECT: "on" fails where it is not supported, "off" never uses it. Default "auto": probed '
        "once, so that chunks do not push the page cache out where that can be had.",
    )
    n_read_threads: Count = Field(
        4, description="Threads that serve loads. Default 4: a few large reads at once saturate one drive."
    )
    n_write_threads: Count = Field(
        4, description="Threads that serve stores. Default 4: as for loads; more would only delay loads on the drive."
    )
    locality: Locality | None = Field(
        None,
        description='"LOCAL" or "REMOTE" storage, in any case; picks the gate\'s marks. Default None: as local.',
    )


def _large_enough(part_bytes: int) -> int:
    if part_bytes < MIN_PART_BYTES:
        raise ValueError(f"S3 takes parts of at least {MIN_PART_BYTES} bytes (5MiB)")
    return part_bytes


def _without_login(url: str) -> tuple[str, tuple[str, str] | None]:
    """The URL without its `user:password@`, and these two; no message repeats the URL, which may hold a password."""
    try:
        parts = urlsplit(url if "://" in url else f"https://{url}")
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ValueError("endpoint_url is not a URL") from error
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError("endpoint_url must name a host, with http:// or https:// before it")
    if parts.query or parts.fragment:
        raise ValueError("endpoint_url has a query or a fragment, which an endpoint cannot have")
    user, at, address = parts.netloc.rpartition("@")
    name, _, password = user.partition(":")
    return parts._replace(netloc=address).geturl(), (unquote(name), unquote(password)) if at else None


class ObjTierConfig(IoTierConfig):
    """A bucket of an S3-compatible object store."""

    type: Literal["obj"] = Field("obj", description='Always "obj", the default.')
    bucket: Text = Field(description="Bucket, which must exist. No default.")
    endpoint_url: Text | Annotated[tuple[Text, ...], Field(min_length=1)] | None = Field(
        None,
        description="Where the store answers, or a list of such: requests are spread over them, and one that fails is "
        "left out; https unless it says http://. A user:password@ in it is moved to access_key and secret_key. Default "
        "None: AWS_ENDPOINT_URL_S3 of the environment, or AWS's own endpoint of the region.",
    )
    prefix: str = Field("", description='What every object name starts with. Default "": the bucket\'s root.')
    region: Text | None = Field(None, description="Region to sign for. Default None: what the environment says.")
    access_key: Secret | None = Field(
        None, description="Access key id, with secret_key. Default None: the environment's credential chain."
    )
    secret_key: Secret | None = Field(None, description="Secret access key. Default None: as for access_key.")
    session_token: Secret | None = Field(
        None, description="Token of temporary credentials. Default None: the keys are permanent ones."
    )
    ca_bundle: Text | None = Field(
        None, description="PEM file of the authorities to trust. Default None: the client's own list."
    )
    addressing_style: Literal["auto", "path", "virtual"] = Field(
        "auto", description='Bucket in the path or in the host name. Default "auto": what the client finds right.'
    )
    sign_payload: TriState = Field(
        "auto",
        description='Whether signatures cover the chunk\'s bytes too, which halves the rate of stores. Default "auto": '
        "only over http:// to another host; TLS and the chunk's own checksum do it elsewhere.",
    )
    server_side_encryption: Text | None = Field(
        None, description='"AES256", "aws:kms" or what else the store knows. Default None: as the bucket says.'
    )
    sse_kms_key_id: Text | None = Field(
        None, description='The key for "aws:kms". Default None: the store\'s own key for it.'
    )
    storage_class: Text | None = Field(
        None, description='Such as "STANDARD_IA"; one that is read at once. Default None: the bucket\'s own.'
    )
    parts: TriState = Field(
        "auto",
        description='Whether a large chunk moves in parallel parts where connections are to spare. Default "auto": '
        "where trials show it to be faster, and for stores only where the server puts a condition on their end.",
    )
    part_bytes: Annotated[Size, AfterValidator(_large_enough)] = Field(
        8 << 20,
        description='Bytes, or "8MiB", of the smallest part of a store; ranges of a load may be half of it. A chunk '
        "below twice that goes whole. Default 8388608 (8 MiB): measured, below that parts gain little even where "
        "each connection is limited.",
    )
    connect_timeout_s: Seconds = Field(
        2.0, description="Seconds for a connection to come up. Default 2.0: a store that takes longer is not there."
    )
    read_timeout_s: Seconds = Field(
        5.0,
        description="Seconds without a byte before a request is given up. Default 5.0: a store that is silent for "
        "longer is in trouble, and another attempt still fits in the deadline.",
    )
    operation_timeout_s: Seconds = Field(
        10.0,
        description="Seconds for one load, store, lookup or removal with all its attempts. Default 10.0: as a load's "
        "own deadline, after which nobody waits for it.",
    )
    max_attempts: Count = Field(
        3,
        description="Tries per request, the first one included; only what may pass is tried again, at another endpoint "
        "where there is one. Default 3: the gate and the breaker deal with what lasts longer.",
    )
    list_at_start_s: SecondsOrOff = Field(
        2.0,
        description="Seconds for which the bucket is listed at start, in the background, so that lookups know what is "
        "there without a request; 0 does not list. Default 2.0: some hundred thousand chunks, of a store that is near. "
        "Whatever was not listed by then is asked for when it is needed.",
    )
    n_read_threads: Count = Field(
        8, description="Connections that serve loads. Default 8: a request's round trip is most of a chunk's time."
    )
    n_write_threads: Count = Field(8, description="Connections that serve stores. Default 8: as for loads.")
    locality: Locality | None = Field(
        None, description='"LOCAL" or "REMOTE", in any case. Default None: an object store is treated as remote.'
    )

    @model_validator(mode="before")
    @classmethod
    def _split_endpoint(cls, values: object) -> object:
        if not isinstance(values, Mapping) or not (given := values.get("endpoint_url")):
            return values
        urls = [given] if isinstance(given, str) else given
        if not isinstance(urls, (list, tuple)) or not all(isinstance(url, str) and url for url in urls):
            return values
        plain = []
        logins = set()
        for url in urls:
            address, login = _without_login(url)
            plain.append(address)
            logins.add(login)
        if len(set(plain)) < len(plain):
            raise ValueError("endpoint_url names the same endpoint twice")
        split = {**values, "endpoint_url": plain[0] if isinstance(given, str) else tuple(plain)}
        logins.discard(None)
        if len(logins) > 1:
            raise ValueError("endpoint_url holds different credentials: give them as access_key and secret_key")
        for login in logins:
            if login is None:
                continue
            if values.get("access_key") or values.get("secret_key"):
                raise ValueError("endpoint_url holds credentials, and access_key or secret_key does too: keep the keys")
            split.update(access_key=login[0], secret_key=login[1])
        return split

    @model_validator(mode="after")
    def _pair_keys(self) -> ObjTierConfig:
        if (self.access_key is None) != (self.secret_key is None):
            given, missing = ("access_key", "secret_key") if self.access_key else ("secret_key", "access_key")
            raise ValueError(f"{given} is given without {missing}")
        if self.session_token is not None and self.access_key is None:
            raise ValueError("session_token is given without access_key and secret_key")
        return self


AnyTierConfig: TypeAlias = HostTierConfig | FsTierConfig | ObjTierConfig
TIER_TYPES: Final[dict[str, type[AnyTierConfig]]] = {
    "host": HostTierConfig,
    "fs": FsTierConfig,
    "obj": ObjTierConfig,
}


def check_ladder(tiers: tuple[AnyTierConfig, ...]) -> tuple[AnyTierConfig, ...]:
    """Check the order of the tiers and give those without a name one."""
    if not tiers:
        raise ValueError("there must be at least one tier")
    for index, tier in enumerate(tiers):
        if isinstance(tier, HostTierConfig) and index > 0:
            raise ValueError(f"tiers[{index}] is a host tier: there is at most one, and it comes first")
    taken: set[str] = set()
    for tier in tiers:
        if tier.name in taken:
            raise ValueError(f"two tiers are called {tier.name!r}")
        if tier.name:
            taken.add(tier.name)
    named: list[AnyTierConfig] = []
    for tier in tiers:
        name, number = tier.name or tier.type, 1
        while not tier.name and name in taken:
            number += 1
            name = f"{tier.type}-{number}"
        taken.add(name)
        named.append(tier.model_copy(update={"name": name}))
    return tuple(named)
