"""The object tier on a real Ceph RADOS Gateway: plain, through a proxy without faults, and over TLS."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from fault_proxy import FaultProxy
from obj_calls import IMAGE, KEY, load, served_again, view
from rgw import HOST, Rgw, free_port
from tls_terminator import PrivateCa, TlsTerminator

from kvsluice.tiers.check import check_tier
from kvsluice.tiers.errors import ChunkDamagedError, ChunkMissingError, ConfigError, TierUnavailableError
from kvsluice.tiers.obj import ObjectTier
from kvsluice.tiers.reasons import IO_ERROR, MISSING, OVERSIZE, SHORT

pytestmark = pytest.mark.s3

MakeTier = Callable[..., ObjectTier]


@pytest.fixture
def tier(make_tier: MakeTier) -> ObjectTier:
    return make_tier()


# ---- the interface ----------------------------------------------------------------------------------


def test_passes_the_conformance_suite(make_tier: MakeTier) -> None:
    assert check_tier(make_tier).persistent


def test_passes_the_conformance_suite_through_a_proxy(make_tier: MakeTier, proxy: FaultProxy) -> None:
    check_tier(lambda: make_tier(proxy.endpoint_url))
    assert proxy.count("PUT") > 100


def test_passes_the_conformance_suite_over_tls(make_tier: MakeTier, tls: TlsTerminator, ca: PrivateCa) -> None:
    check_tier(lambda: make_tier(tls.endpoint_url, ca_bundle=str(ca.bundle)))
    assert tls.count("PUT") > 100
    assert tls.failed_handshakes == 0


@pytest.mark.parametrize("num_bytes", [1, 4 << 20, (4 << 20) + 3, (32 << 20) - 1])
def test_an_image_comes_back_as_it_was(
    rgw: Rgw, bucket: str, make_tier: MakeTier, tier: ObjectTier, num_bytes: int
) -> None:
    image = (b"%d " % num_bytes * num_bytes)[:num_bytes]
    assert tier.store(KEY, view(image + b"more"), num_bytes) == num_bytes
    assert load(make_tier(), KEY, num_bytes) == image
    # And to others it is one plain object.
    assert rgw.client.get_object(Bucket=bucket, Key=tier.object_key(KEY))["Body"].read() == image


def test_of_sixteen_writers_one_wins_and_its_bytes_stay(make_tier: MakeTier) -> None:
    tiers = [make_tier(max_connections=16), make_tier(max_connections=16)]
    for number in range(8):
        key, gate = number.to_bytes(2, "big"), threading.Barrier(16)

        def write(
            writer: int, key: bytes = key, gate: threading.Barrier = gate, number: int = number
        ) -> tuple[int, int, bytes]:
            tier, num_bytes = tiers[writer % 2], 100_000
            image = bytes([writer, number]) * (num_bytes // 2)
            gate.wait(20.0)
            return writer, tier.store(key, view(image), num_bytes), load(tier, key, num_bytes)

        with ThreadPoolExecutor(16) as pool:
            results = list(pool.map(write, range(16)))
        winners = [writer for writer, stored, _ in results if stored]
        assert len(winners) == 1
        assert {seen for _, _, seen in results} == {bytes([winners[0], number]) * 50_000}
    assert [tier.failure_counts() for tier in tiers] == [{}, {}]


def test_a_second_store_sends_no_second_object(rgw: Rgw, bucket: str, tier: ObjectTier) -> None:
    tier.store(KEY, view(IMAGE), 100)
    before = rgw.client.head_object(Bucket=bucket, Key=tier.object_key(KEY))
    assert tier.store(KEY, view(IMAGE[::-1]), 100) == 0
    after = rgw.client.head_object(Bucket=bucket, Key=tier.object_key(KEY))
    assert (before["ETag"], before["LastModified"]) == (after["ETag"], after["LastModified"])


@pytest.mark.parametrize("num_held", [0, 1, 2, 7, 15, 16])
def test_a_held_prefix_is_found(tier: ObjectTier, num_held: int) -> None:
    keys = [bytes([index]) for index in range(16)]
    for key in keys[:num_held]:
        tier.store(key, view(IMAGE), 10)
    assert tier.held_prefix(keys) == num_held


def test_more_objects_than_a_page_are_listed_and_cleared(tier: ObjectTier) -> None:
    keys = {index.to_bytes(2, "big") for index in range(1005)}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: tier.store(key, view(IMAGE), 1), keys))
    assert set(tier.scan()) == keys
    assert tier.clear() == len(keys)
    assert list(tier.scan()) == []


def test_other_prefixes_and_namespaces_are_not_ours(make_tier: MakeTier) -> None:
    one, other, longer = make_tier(), make_tier(prefix="team-b"), make_tier(namespace="ab123")
    one.store(KEY, view(IMAGE), 10)
    assert other.held_prefix([KEY]) == longer.held_prefix([KEY]) == 0
    assert other.clear() == longer.clear() == 0
    assert one.clear() == 1


# ---- what is not as it was --------------------------------------------------------------------------


def test_an_object_that_somebody_deleted_is_a_miss(rgw: Rgw, bucket: str, tier: ObjectTier) -> None:
    tier.store(KEY, view(IMAGE), 10)
    rgw.client.delete_object(Bucket=bucket, Key=tier.object_key(KEY))
    with pytest.raises(ChunkMissingError) as caught:
        load(tier, KEY, 10)
    assert caught.value.reason == MISSING
    assert tier.held_prefix([KEY]) == 0
    assert tier.failure_counts() == {}


@pytest.mark.parametrize(("num_bytes", "reason"), [(0, SHORT), (99, SHORT), (101, OVERSIZE)])
def test_an_object_of_another_length_is_damaged(
    rgw: Rgw, bucket: str, tier: ObjectTier, num_bytes: int, reason: str
) -> None:
    rgw.client.put_object(Bucket=bucket, Key=tier.object_key(KEY), Body=IMAGE[:num_bytes])
    with pytest.raises(ChunkDamagedError) as caught:
        load(tier, KEY, 100)
    assert caught.value.reason == reason


def test_a_bucket_that_goes_away_is_no_miss_and_is_named(
    rgw: Rgw, bucket: str, make_tier: MakeTier, tier: ObjectTier
) -> None:
    tier.store(KEY, view(IMAGE), 10)
    rgw.client.delete_object(Bucket=bucket, Key=tier.object_key(KEY))
    rgw.client.delete_bucket(Bucket=bucket)
    for call in (lambda: load(tier, KEY, 10), lambda: tier.store(KEY, view(IMAGE), 10)):
        with pytest.raises(TierUnavailableError, match="NoSuchBucket") as caught:
            call()
        assert caught.value.reason == IO_ERROR
    assert tier.failure_counts() == {"404 NoSuchBucket": 2}
    assert tier.held_prefix([KEY]) == 0
    rgw.make_bucket(bucket)
    assert tier.store(KEY, view(IMAGE), 10) == 10


def test_a_gateway_that_dies_and_comes_back_empty(own_rgw: Rgw) -> None:
    bucket = own_rgw.make_bucket("bucket")
    tier = ObjectTier(
        bucket, endpoint_url=own_rgw.endpoint_url, max_attempts=2, connect_timeout_s=2.0, **own_rgw.credentials
    )
    assert tier.store(KEY, view(IMAGE), 10) == 10
    own_rgw.kill()
    for call in (
        lambda: load(tier, KEY, 10),
        lambda: tier.store(KEY, view(IMAGE), 10),
        lambda: tier.held_prefix([KEY]),
    ):
        with pytest.raises(TierUnavailableError):
            call()
    own_rgw.restart_empty()
    own_rgw.make_bucket(bucket)
    served_again(tier, within_s=4.5)
    with pytest.raises(ChunkMissingError):
        load(tier, KEY, 10)
    assert tier.store(KEY, view(IMAGE), 10) == 10
    assert load(tier, KEY, 10) == IMAGE[:10]
    tier.close()


# ---- what is refused at start -----------------------------------------------------------------------


def test_a_bucket_that_does_not_exist_is_refused(rgw: Rgw) -> None:
    with pytest.raises(ConfigError, match=r"'no-such-bucket' at .* does not exist"):
        ObjectTier("no-such-bucket", endpoint_url=rgw.endpoint_url, **rgw.credentials)


@pytest.mark.parametrize("wrong", ["access_key", "secret_key"])
def test_wrong_credentials_are_refused_and_not_shown(rgw: Rgw, bucket: str, wrong: str) -> None:
    credentials = {**rgw.credentials, wrong: "not-to-be-shown"}
    with pytest.raises(ConfigError, match="may not be used with these credentials") as caught:
        ObjectTier(bucket, endpoint_url=rgw.endpoint_url, **credentials)
    shown = f"{caught.value!r} {caught.value}"
    assert "not-to-be-shown" not in shown
    assert rgw.secret_key not in shown


def test_an_endpoint_that_nobody_answers_at_is_refused(make_tier: MakeTier) -> None:
    with pytest.raises(ConfigError, match="cannot be reached"):
        make_tier(f"http://{HOST}:{free_port()}", max_attempts=1)


def test_a_host_that_does_not_resolve_is_refused(make_tier: MakeTier) -> None:
    with pytest.raises(ConfigError, match="cannot be reached"):
        make_tier("http://nowhere.invalid:9000", max_attempts=1)


# ---- TLS ---------------------------------------------------------------------------------------------


def test_without_the_private_ca_it_is_refused(make_tier: MakeTier, tls: TlsTerminator) -> None:
    with pytest.raises(ConfigError, match=r"(?i)certificate|ssl"):
        make_tier(tls.endpoint_url, max_attempts=1)
    deadline_s = time.monotonic() + 10.0
    while not tls.failed_handshakes:  # counted a moment after the client went
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    assert tls.count() == 0


def test_another_ca_is_refused(make_tier: MakeTier, tls: TlsTerminator, tmp_path: Path) -> None:
    stranger = PrivateCa(tmp_path, "stranger")
    with pytest.raises(ConfigError, match=r"(?i)certificate|ssl"):
        make_tier(tls.endpoint_url, ca_bundle=str(stranger.bundle), max_attempts=1)
    assert tls.count() == 0


def test_a_certificate_for_another_host_is_refused(rgw: Rgw, make_tier: MakeTier, ca: PrivateCa) -> None:
    with TlsTerminator(HOST, rgw.port, ca, names=("s3.example",)) as other:
        with pytest.raises(ConfigError, match=r"(?i)certificate|ssl"):
            make_tier(other.endpoint_url, ca_bundle=str(ca.bundle), max_attempts=1)
        assert other.count() == 0


def test_tls_to_a_plain_server_and_plain_to_tls_are_refused(
    rgw: Rgw, make_tier: MakeTier, tls: TlsTerminator, ca: PrivateCa
) -> None:
    for url in (f"https://{HOST}:{rgw.port}", f"http://{HOST}:{tls.port}"):
        with pytest.raises(ConfigError, match="cannot be reached"):
            make_tier(url, ca_bundle=str(ca.bundle), max_attempts=1)


# ---- how it asks -------------------------------------------------------------------------------------


def test_the_bucket_may_stand_in_the_host_name(
    bucket: str, make_tier: MakeTier, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = socket.getaddrinfo

    def resolve_here(host: str | None, *rest: object, **more: object) -> object:
        return resolve(HOST if host is not None and str(host).endswith(".localhost") else host, *rest, **more)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_here)
    tier = make_tier(f"http://localhost:{proxy.port}", addressing_style="virtual")
    assert tier.store(KEY, view(IMAGE), 10) == 10
    assert load(tier, KEY, 10) == IMAGE[:10]
    put = next(seen for seen in proxy.requests if seen.method == "PUT")
    assert put.headers["host"] == f"{bucket}.localhost:{proxy.port}"
    assert put.path.startswith("/team-a/ab12/")


def test_the_bucket_stands_in_the_path_where_the_host_is_an_address(
    bucket: str, make_tier: MakeTier, proxy: FaultProxy
) -> None:
    make_tier(proxy.endpoint_url).store(KEY, view(IMAGE), 10)
    put = next(seen for seen in proxy.requests if seen.method == "PUT")
    assert put.path.startswith(f"/{bucket}/team-a/ab12/")
    assert put.headers["if-none-match"] == "*"


def test_connections_are_kept_and_used_again(make_tier: MakeTier, proxy: FaultProxy) -> None:
    tier = make_tier(proxy.endpoint_url, max_connections=2)
    numbers = count()
    for _ in range(20):
        key = next(numbers).to_bytes(2, "big")
        tier.store(key, view(IMAGE), len(IMAGE))
        load(tier, key, len(IMAGE))
        with pytest.raises(ChunkMissingError):
            load(tier, b"absent", len(IMAGE))
        tier.held_prefix([key, b"absent"])
    assert proxy.connections <= 2
