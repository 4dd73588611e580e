"""The whole of a calibration: measure a tier, fit, suggest, and write it down as configuration."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from kvsluice.connector.calibrate.measure import Meter, Outcome, Progress
from kvsluice.connector.calibrate.model import Fit, Kind, Measurement, fit
from kvsluice.connector.calibrate.place import name_of, open_place
from kvsluice.connector.calibrate.plan import DEFAULT_CONCURRENCIES, make_plan
from kvsluice.connector.calibrate.suggestion import Suggestion, suggest
from kvsluice.connector.config_tiers import AnyTierConfig
from kvsluice.tiers.errors import ConfigError, SluiceError

__all__ = ["Calibration", "Options", "calibrate", "snippet_for"]

_MARKS: Final = ("high_water_s", "low_water_s", "fixed_cost_s")
_SECRETS: Final = frozenset({"access_key", "secret_key", "session_token"})
_DETECTOR: Final = "EMABackpressureDetector"


@dataclass(frozen=True, slots=True)
class Options:
    """What a calibration may cost, and what it looks at.

    Attributes:
        chunk_bytes: the size of interest; 4 MiB by default, a chunk of 256 tokens of a mid-sized model's rank.
        sizes: bytes of the operations; None for the defaults around `chunk_bytes`.
        concurrencies: operations at once.
        max_seconds: no operation is started later.
        max_bytes: written and read, all together.

    Raises:
        ConfigError: a bound that allows nothing.
    """

    chunk_bytes: int = 4 << 20
    sizes: Sequence[int] | None = None
    concurrencies: Sequence[int] = DEFAULT_CONCURRENCIES
    max_seconds: float = 60.0
    max_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        if not self.max_seconds > 0:
            raise ConfigError(f"max_seconds is {self.max_seconds}: give more than 0")


@dataclass(frozen=True, slots=True)
class Calibration:
    """What came of it.

    Attributes:
        target: what was measured, in the operator's words.
        reads: where reads came from; `direct` is False where it may have been the page cache.
        outcomes: every cell, written and read.
        snippet: an entry of `tiers` for `OffloadConfig.from_dict`, without secrets.
        left_behind: what could not be removed.
    """

    target: str
    tier_type: str
    reads: str
    direct: bool | None
    chunk_bytes: int
    elapsed_s: float
    moved_bytes: int
    outcomes: tuple[Outcome, ...]
    write_fit: Fit
    read_fit: Fit
    suggestion: Suggestion
    snippet: Mapping[str, object]
    left_behind: tuple[str, ...]

    def document(self) -> dict[str, object]:
        """The same as JSON values."""
        return {
            "target": self.target,
            "tier_type": self.tier_type,
            "reads": self.reads,
            "direct_io": self.direct,
            "chunk_bytes": self.chunk_bytes,
            "elapsed_s": self.elapsed_s,
            "moved_bytes": self.moved_bytes,
            "grid": [_cell_document(outcome) for outcome in self.outcomes],
            "fit": {"write": _fit_document(self.write_fit), "read": _fit_document(self.read_fit)},
            "suggestion": asdict(self.suggestion),
            "snippet": dict(self.snippet),
            "left_behind": list(self.left_behind),
        }


def calibrate(
    tier: AnyTierConfig,
    options: Options,
    *,
    detector: str | None = None,
    clock: Callable[[], float] = time.monotonic,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Calibration:
    """Measure the tier that `tier` describes and suggest its marks and threads.

    Nothing is left on the tier, whatever ends the run; what could not be removed is logged, and named in the result.

    Args:
        detector: class of the gate that is configured now, if any is.
        clock: seconds, monotonic.
        on_progress: called before each step and at the end, on this thread.

    Raises:
        ConfigError: the tier or an option cannot be used.
        SluiceError: the tier failed, or too little was measured to say anything.
    """
    plan = make_plan(
        options.chunk_bytes,
        sizes=options.sizes,
        concurrencies=options.concurrencies,
        max_bytes=options.max_bytes,
    )
    with open_place(tier, space_bytes=plan.space_bytes, connections=plan.max_concurrency + 1) as place:
        meter = Meter(
            place.tier,
            plan,
            max_seconds=options.max_seconds,
            space_bytes=place.space_bytes,
            clock=clock,
            on_progress=on_progress,
        )
        outcomes = meter.run()
        elapsed_s = meter.elapsed_s
    measurements = [outcome.measurement for outcome in outcomes if outcome.measurement is not None]
    writes, reads = _of(measurements, "write"), _of(measurements, "read")
    if not writes or not reads:
        what = "write" if not writes else "read"
        why = next(outcome.missing for outcome in outcomes if outcome.kind == what and outcome.missing)
        raise SluiceError(f"{name_of(tier)}: not one {what} could be measured within {options.max_seconds:g} s: {why}")
    suggestion = suggest(measurements, options.chunk_bytes)
    return Calibration(
        target=name_of(tier),
        tier_type=tier.type,
        reads=place.reads,
        direct=place.direct,
        chunk_bytes=options.chunk_bytes,
        elapsed_s=elapsed_s,
        moved_bytes=meter.moved_bytes,
        outcomes=outcomes,
        write_fit=fit(writes),
        read_fit=fit(reads),
        suggestion=suggestion,
        snippet=snippet_for(tier, suggestion, detector=detector),
        left_behind=tuple(place.left_behind),
    )


def snippet_for(tier: AnyTierConfig, suggestion: Suggestion, *, detector: str | None = None) -> dict[str, object]:
    """`tier` as it was written, secrets left out, with the suggested threads and marks in it.

    Its gate's other arguments stay, unless another class of `detector` takes them: the marks are for
    `EMABackpressureDetector`.
    """
    written = tier.model_dump(mode="json", exclude_unset=True, exclude=set(_SECRETS))
    if written.get("name") == tier.type:
        # What a tier without a name is called anyway.
        del written["name"]
    own = written.pop("backpressure", None)
    gate: dict[str, object] = {}
    if detector not in (None, _DETECTOR):
        gate["backpressure_cls"] = _DETECTOR
    elif isinstance(own, dict):
        gate = {key: _without_marks(value) for key, value in own.items() if key not in _MARKS}
    marks = {key: getattr(suggestion, key) for key in _MARKS}
    return {
        "type": tier.type,
        **written,
        "n_read_threads": suggestion.n_read_threads,
        "n_write_threads": suggestion.n_write_threads,
        "backpressure": {**gate, **marks},
    }


def _without_marks(value: object) -> object:
    return {key: item for key, item in value.items() if key not in _MARKS} if isinstance(value, dict) else value


def _of(measurements: Sequence[Measurement], kind: Kind) -> list[Measurement]:
    return [measurement for measurement in measurements if measurement.kind == kind]


def _cell_document(outcome: Outcome) -> dict[str, object]:
    cell: dict[str, object] = {
        "kind": outcome.kind,
        "num_bytes": outcome.num_bytes,
        "concurrency": outcome.concurrency,
    }
    measured = outcome.measurement
    if measured is None:
        return {**cell, "missing": outcome.missing}
    return {
        **cell,
        "operations": len(measured.seconds),
        "bytes_per_s": measured.bytes_per_s,
        "median_s": measured.median_s,
        "p99_s": measured.p99_s,
    }


def _fit_document(of: Fit) -> dict[str, object]:
    return {
        "fixed_cost_s": of.fixed_cost_s,
        "bandwidth_bytes_per_s": of.bandwidth_bytes_per_s,
        "bandwidth_is_bound": of.bandwidth_is_bound,
        "stream_bytes_per_s": of.stream_bytes_per_s,
    }
