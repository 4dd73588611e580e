"""Whatever goes wrong, nobody gets to see a key: not in a log, an error, a repr, a figure or a thread's name."""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from urllib.parse import quote

import pytest
from engine_traffic import Engine, Paged, run_engines
from fault_proxy import FaultProxy
from faults import (
    Answer,
    DeclareLess,
    FlipByte,
    HangUp,
    LoseAnswer,
    Rate,
    ResetRequest,
    ResetResponse,
    ShortBody,
    StallBody,
    clock_skewed,
    error,
    slow_down,
)
from obj_calls import IMAGE, KEY, LENGTH, load, view
from rgw import Rgw
from tls_terminator import TlsTerminator

from kvsluice.connector import OffloadConfig, OffloadConnector
from kvsluice.tiers.errors import ConfigError, TierError
from kvsluice.tiers.obj import ObjectTier

pytestmark = pytest.mark.s3

MakeTier = Callable[..., ObjectTier]
Connect = Callable[..., OffloadConnector]

TOKEN = "session+token/that=nobody-may-see"


class Watch:
    """Collects whatever somebody could come to see, and looks for secrets in it."""

    def __init__(self, *secrets: str) -> None:
        self._secrets = [spelled for secret in secrets for spelled in (secret, quote(secret, safe=""))]
        self.errors = 0
        self.leaks: list[str] = []
        """What was seen and should not have been, each secret put out."""

    def see(self, *shown: object) -> None:
        for one in shown:
            for words in (str(one), repr(one)):
                for secret in self._secrets:
                    if secret in words:
                        self.leaks.append(words.replace(secret, "<here>"))

    def see_error(self, failure: BaseException) -> None:
        self.errors += 1
        # With all its causes, as an uncaught one would be printed.
        self.see("".join(traceback.format_exception(failure)))
        chain: list[BaseException] = [failure]
        while chain:
            one = chain.pop()
            self.see(one, one.args, vars(one))
            chain += [other for other in (one.__cause__, one.__context__) if other is not None]

    @contextlib.contextmanager
    def errors_of(self) -> Iterator[None]:
        try:
            yield
        except (TierError, ConfigError) as failure:
            self.see_error(failure)

    def see_tier(self, tier: ObjectTier) -> None:
        self.see(tier, tier.failure_counts(), tier.usage())
        parts = [tier._access, tier._requests, tier._endpoints, tier._uploads]  # noqa: SLF001 - an innermost repr may be logged
        self.see(*parts, tier._access._options)  # noqa: SLF001 - as above
        for endpoint in tier._endpoints.all:  # noqa: SLF001 - as above
            self.see(endpoint, endpoint.place, endpoint.place.target, endpoint.pool)
        self.see([thread.name for thread in threading.enumerate()])


def repeating(*words: str) -> Answer:
    """A refusal that says what it was sent, as some servers do."""
    body = f"<Error><Code>SignatureDoesNotMatch</Code><StringToSign>{' '.join(words)}</StringToSign></Error>"
    return Answer(403, body.encode(), {"x-amz-request-id": words[0], "Location": f"http://{words[0]}/"})


FAULTS = [
    ResetResponse(0),
    ResetResponse(1000),
    ResetRequest(0),
    ResetRequest(1000),
    LoseAnswer(),
    HangUp(),
    StallBody(100),
    ShortBody(100),
    DeclareLess(10),
    FlipByte(5),
    Rate(10_000.0),
    slow_down(),
    error(500, "InternalError"),
    error(403, "AccessDenied"),
    error(403, "InvalidAccessKeyId"),
    error(400, "ExpiredToken"),
    error(301, "PermanentRedirect", {"x-amz-bucket-region": "eu-west-3"}),
    error(404, "NoSuchBucket"),
    clock_skewed(7200.0),
    Answer(200, b"not xml at all", {"Content-Type": "text/plain"}),
    Answer(204),
]


def use(tier: ObjectTier, watch: Watch) -> None:
    """Everything that a tier can be asked for."""
    calls: list[Callable[[], object]] = [
        lambda: load(tier, KEY, LENGTH),
        lambda: tier.store(KEY[::-1], view(IMAGE), LENGTH),
        lambda: tier.held_prefix([KEY]),
        lambda: tier.delete(KEY[::-1]),
        lambda: list(tier.scan()),
        tier.clear,
    ]
    for call in calls:
        with watch.errors_of():
            call()
    watch.see_tier(tier)


def see_log(watch: Watch, caplog: pytest.LogCaptureFixture) -> None:
    for record in caplog.records:
        if record.name.startswith("kvsluice"):
            watch.see(record.getMessage(), record.args, record.exc_text)
            if record.exc_info and record.exc_info[1] is not None:
                watch.see_error(record.exc_info[1])


def test_under_every_fault_the_keys_are_nowhere_to_be_seen(
    rgw: Rgw, make_tier: MakeTier, proxy: FaultProxy, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="kvsluice")
    watch = Watch(rgw.access_key, rgw.secret_key, TOKEN)
    # This gateway looks at no token.
    tier = make_tier(
        proxy.endpoint_url, session_token=TOKEN, read_timeout_s=0.3, operation_timeout_s=1.0, max_attempts=2
    )
    for fault in [*FAULTS, repeating(rgw.access_key, TOKEN)]:
        proxy.inject(fault)
        use(tier, watch)
        proxy.clear()
    proxy.refuse()
    use(tier, watch)
    proxy.accept()
    proxy.stall()
    use(tier, watch)
    proxy.release()
    see_log(watch, caplog)
    assert watch.leaks == []
    assert watch.errors > 50
    assert any(record.name.startswith("kvsluice") for record in caplog.records)
    assert all(seen.headers.get("x-amz-security-token") == TOKEN for seen in proxy.requests)


@pytest.mark.parametrize(
    "wrong",
    [
        {"secret_key": "another+secret/key=of-nobody"},
        {"access_key": "AKANOTHERKEY", "secret_key": "another+secret/key=of-nobody", "session_token": TOKEN},
        {"ca_bundle": "/no/such/file"},
        {"region": "not a region"},
        {"bucket": "no-such-bucket"},
    ],
)
def test_what_is_refused_at_the_start_is_said_without_them(
    rgw: Rgw, bucket: str, tls: TlsTerminator, caplog: pytest.LogCaptureFixture, wrong: dict[str, str]
) -> None:
    caplog.set_level(logging.DEBUG, logger="kvsluice")
    given = {"endpoint_url": tls.endpoint_url if "ca_bundle" in wrong else rgw.endpoint_url, **rgw.credentials}
    config = {"type": "obj", "bucket": bucket, **given, **wrong}
    watch = Watch(rgw.access_key, rgw.secret_key, *(wrong[name] for name in wrong if name.endswith(("key", "token"))))
    options = OffloadConfig.from_dict({"staging_bytes": "16MiB", "tiers": [config]})
    watch.see(options, options.redacted(), options.tiers)
    with pytest.raises(ConfigError) as caught:
        OffloadConnector(options, Paged(num_chunks=2).layout).close()
    watch.see_error(caught.value)
    see_log(watch, caplog)
    assert watch.leaks == []


def test_a_connector_in_trouble_shows_none_of_them(
    rgw: Rgw, bucket: str, proxy: FaultProxy, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="kvsluice")
    watch = Watch(rgw.access_key, rgw.secret_key)
    paged = Paged()
    through = {"endpoint_url": proxy.endpoint_url, "read_timeout_s": 0.5, "operation_timeout_s": 1.0}
    connector = connect(rgw, bucket, paged.layout, through)
    engine = Engine(connector, paged)
    run_engines([engine], 0.5)
    for fault in (slow_down(), repeating(rgw.access_key, rgw.secret_key), FlipByte(50), ResetResponse(10)):
        proxy.inject(fault)
        run_engines([engine], 0.5)
        watch.see(connector.stats(), connector.reset(0.5))
        proxy.clear()
    engine.drain(20.0)
    watch.see(connector, connector.stats(), [thread.name for thread in threading.enumerate()])
    see_log(watch, caplog)
    assert watch.leaks == []
    assert engine.wrong == []
    assert any("kvsluice.tiers.obj" in record.name for record in caplog.records)
