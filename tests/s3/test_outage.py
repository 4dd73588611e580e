"""The whole connector while its object store is in trouble: a long stall, a restart with nothing left, a full store."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from engine_traffic import SLOT_BYTES, Engine, Job, Paged, Phase, resident_bytes, run_engines
from obj_calls import BUSY_S
from rgw import Rgw

from kvsluice.connector import OffloadConnector
from kvsluice.tiers import reasons

pytestmark = pytest.mark.s3

Connect = Callable[..., OffloadConnector]

STALL_S = 50.0
SLOTS = 96
"""As `connect` gives them."""
LOAD_TIMEOUT_S = 10.0
"""The default deadline of a load, which these leave as it is."""
STORE_PATIENCE_S = 15.0
"""The most a store holds its slot by default: five seconds in the queue, ten at the store."""
BACK_WITHIN_S = 5.0
MOST_STARVED = 400
"""Of an engine's attempts to find free blocks. Until the gate closes, the tier's last rate says how many stores are
let in: where that was high they fill the region, and those behind wait for a slot, with their blocks, for five
seconds (`max_queue_s`, 200 steps with a store and a load each). Never longer."""


def outcomes(jobs: Sequence[Job]) -> dict[str, int]:
    """Chunks by reason, "done" for those that came through."""
    counts = Counter(reason for job in jobs for reason in job.reasons)
    counts["done"] = sum(job.done for job in jobs)
    return dict(counts)


def assert_never_held_up(phase: Phase) -> None:
    # What waits for the store waits for seconds here, and on most calls; a crowded machine costs a few calls some
    # tens of milliseconds.
    assert phase.quantile(0.999) < 0.05, str(phase)
    assert phase.worst[1] < 1.0, str(phase)


@pytest.mark.timeout(150)
def test_a_stall_of_fifty_seconds(own_rgw: Rgw, connect: Connect, capsys: pytest.CaptureFixture[str]) -> None:
    """The gateway is stopped as it is, and goes on after that.

    Two engines: one says nothing of its own speed, one computes 20,000 tokens a second and says so.
    """
    bucket = own_rgw.make_bucket("stalls")
    engines = []
    for number, tokens_per_s in enumerate((None, 20_000.0)):
        paged = Paged()
        engines.append(
            Engine(connect(own_rgw, bucket, paged.layout, {"prefix": f"engine-{number}"}), paged, tokens_per_s)
        )
    threads = threading.active_count()
    memory, figures = [], []

    def phase() -> list[Phase]:
        """Figures are counted apart from here on."""
        for engine in engines:
            engine.phase = Phase()
        return [engine.phase for engine in engines]

    started_s, calls_before = time.monotonic(), phase()
    run_engines(engines, 4.0)
    before = [list(engine.stored) for engine in engines]
    assert all(len(stored) > 20 for stored in before)

    stalled_s, calls_stalled = time.monotonic(), phase()
    os.kill(own_rgw.pids["rgw"], signal.SIGSTOP)
    for _ in range(10):
        memory.append(resident_bytes())
        run_engines(engines, STALL_S / 10)
    memory.append(resident_bytes())
    threads_stalled = threading.active_count()

    released_s, calls_after = time.monotonic(), phase()
    os.kill(own_rgw.pids["rgw"], signal.SIGCONT)
    run_engines(
        engines,
        3 * BACK_WITHIN_S,
        until=lambda: all(
            engine.first_done(kind, released_s) < float("inf") for engine in engines for kind in ("store", "load")
        ),
    )
    run_engines(engines, 2.0)
    over_s = time.monotonic()
    for engine in engines:
        engine.drain(30.0)

    for engine, *calls in zip(engines, calls_before, calls_stalled, calls_after, strict=True):
        figures.append(f"engine that computes {engine.tokens_per_s} tokens/s")
        for name, counted, start_s, end_s in zip(
            ("before", "stall", "after"),
            calls,
            (started_s, stalled_s, released_s),
            (stalled_s, released_s, over_s),
            strict=True,
        ):
            figures.append(f"  {name}: {counted}")
            for kind in ("store", "load"):
                jobs = engine.over(kind, start_s, end_s)
                longest_s = max((job.took_s for job in jobs), default=0.0)
                figures.append(f"    {kind} {outcomes(jobs)}, the longest {longest_s:.1f} s")
        figures += [
            f"  {kind}s again {engine.first_done(kind, released_s) - released_s:.2f} s after the stall"
            for kind in ("store", "load")
        ]
        figures.append(f"  the tier's own count {engine.connector.stats().tiers['obj'].failures}")
    grown = [(now - memory[0]) / 2**20 for now in memory]
    figures.append(f"memory during the stall, MiB: {', '.join(f'{now:+.1f}' for now in grown)}")
    figures.append(f"threads: {threads} before, {threads_stalled} at the end of the stall")
    with capsys.disabled():
        print("\n" + "\n".join(figures))

    for engine, stored, calls in zip(engines, before, calls_stalled, strict=True):
        assert_never_held_up(calls)
        for job in engine.over("load", stalled_s, over_s):
            assert job.took_s < LOAD_TIMEOUT_S + BUSY_S
        for job in engine.over("store", stalled_s, over_s):
            assert job.took_s < STORE_PATIENCE_S + BUSY_S
        # Nothing that was asked for in it came through in it.
        begun = [job for job in engine.jobs if stalled_s <= job.start_s and job.end_s < released_s]
        stores = outcomes([job for job in begun if job.kind == "store"])
        assert stores["done"] == 0
        assert stores[reasons.GATE] > 0.5 * sum(stores.values())
        assert outcomes([job for job in begun if job.kind == "load"])["done"] == 0
        assert engine.first_done("store", released_s) - released_s < BACK_WITHIN_S
        assert engine.first_done("load", released_s) - released_s < BACK_WITHIN_S
        assert engine.starved <= MOST_STARVED
        # Every chunk of before is there, and right.
        assert engine.load_all(stored, 30.0) == {"done": len(stored)}
        assert engine.wrong == []
    # One thread more for each tier that probes.
    assert threads_stalled <= threads + len(engines)
    # Slots that were never used before may be backed now: no more than the two regions. Once the queues are full
    # nothing is kept of what goes on.
    assert max(grown) < (len(engines) * SLOTS * SLOT_BYTES + (8 << 20)) / 2**20
    assert grown[-1] - grown[3] < 4.0


@pytest.mark.timeout(90)
def test_a_gateway_that_is_killed_and_comes_back_empty(
    own_rgw: Rgw, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = own_rgw.make_bucket("comes-and-goes")
    paged = Paged()
    engine = Engine(connect(own_rgw, bucket, paged.layout), paged)
    run_engines([engine], 3.0)
    assert engine.stored
    before = list(engine.stored)
    # Stores are in flight at this moment, as at any of the traffic.
    while not engine.connector.stats().tiers["obj"].running:
        engine.step()
    killed_s = time.monotonic()
    own_rgw.kill()
    run_engines([engine], 3.0)
    own_rgw.restart_empty()
    served_s = time.monotonic()
    run_engines([engine], 2.0)
    made_s = time.monotonic()
    own_rgw.make_bucket(bucket)
    engine.stored.clear()

    def is_back() -> bool:
        return all(engine.first_done(kind, made_s) < float("inf") for kind in ("store", "load"))

    run_engines([engine], 3 * BACK_WITHIN_S, until=is_back)
    over_s = time.monotonic()
    engine.drain(30.0)
    with capsys.disabled():
        print()
        for name, start_s, end_s in (
            ("killed", killed_s, served_s),
            ("no bucket", served_s, made_s),
            ("back", made_s, over_s),
        ):
            for kind in ("store", "load"):
                print(f"{name}: {kind} {outcomes(engine.over(kind, start_s, end_s))}")
        for kind in ("store", "load"):
            print(f"{kind}s again {engine.first_done(kind, made_s) - made_s:.2f} s after the bucket was made")
        print(engine.phase, engine.connector.stats().tiers["obj"].failures)
    for kind in ("store", "load"):
        begun = [
            job for job in engine.jobs if job.kind == kind and killed_s + 1.0 <= job.start_s and job.end_s < made_s
        ]
        assert outcomes(begun)["done"] == 0
        assert engine.first_done(kind, made_s) - made_s < BACK_WITHIN_S
    # What was stored before is gone, and nobody gets anything else for it.
    gone = [number for number in before if number not in engine.stored]
    lost = engine.load_all(gone, 30.0)
    assert set(lost) <= {reasons.MISSING, "done"}
    assert lost["done"] == 0
    assert engine.wrong == []
    assert engine.starved <= MOST_STARVED


@pytest.mark.timeout(90)
def test_a_full_gateway_goes_on_serving_loads(connect: Connect, capsys: pytest.CaptureFixture[str]) -> None:
    """It takes puts and deletes in and never answers; gets it answers as ever."""
    with Rgw(capacity_bytes=64 << 20) as small:
        bucket = small.make_bucket("small")
        # So that the rest is soon filled by stores.
        small.client.put_object(Bucket=bucket, Key="most", Body=os.urandom(44 << 20))
        paged = Paged()
        engine = Engine(connect(small, bucket, paged.layout), paged)
        started_s = time.monotonic()
        while engine.connector.stats().tiers["obj"].oldest_store_s < 1.0:
            assert time.monotonic() - started_s < 30.0
            run_engines([engine], 0.1)
        full_s = time.monotonic()
        engine.phase = Phase()
        known = len(engine.stored)
        run_engines([engine], 6.0)
        over_s = time.monotonic()
        stats = engine.connector.stats().tiers["obj"]
        stores = outcomes(engine.over("store", full_s + 1.0, over_s))
        loads = outcomes(engine.over("load", full_s, over_s))
        before = outcomes(engine.over("load", started_s, full_s))["done"] / (full_s - started_s)
        since = loads["done"] / (over_s - full_s)
        with capsys.disabled():
            print(f"\nfull after {full_s - started_s:.1f} s and {known} chunks: {engine.phase}")
            print(
                f"  stores {stores}, loads {loads}: {before:.0f} a second before, {since:.0f} since; {stats.failures}"
            )
        assert_never_held_up(engine.phase)
        assert stores["done"] == 0
        # As many as were asked for.
        assert since > 0.3 * before
        assert set(loads) <= {"done", reasons.MISSING}
        assert engine.load_all(engine.stored[:40], 30.0) == {"done": 40}
        assert engine.wrong == []
        assert engine.starved <= MOST_STARVED
