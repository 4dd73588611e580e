"""From chunks that were copied on trial to findings: which way is taken, why, and whether it is as it should be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvsluice.connector.calibrate.units import format_seconds, format_size
from kvsluice.connector.doctor.report import Finding
from kvsluice.connector.doctor.seen import (
    DIRECTIONS,
    CopiesSeen,
    Seen,
    Wanted,
    rate_of,
    share_of_plain,
    unusable_because,
)
from kvsluice.kernels.gpu import GpuFacts
from kvsluice.kernels.ways import CopyChoice

__all__ = ["BATCHED_CUDA", "copy_findings", "format_gb_per_s", "lacks_batched_copy", "why_chosen"]

BATCHED_CUDA: Final = (12, 8)
"""The first CUDA whose driver has the batched copy; NVIDIA's drivers of branch 570 are of it."""

_SLOW_SHARE: Final = 0.5
"""Of a plain copy: a way below it leaves more of the link unused than it uses."""
_NAMED_SHARE: Final = 0.8
"""Of the best way's rate: below it the configuration's choice is worth a word."""
_PACKAGE_OF: Final = {"batched": "cuda-bindings", "triton": "triton"}
"""The distribution that a way needs."""


def format_gb_per_s(bytes_per_s: float) -> str:
    """`45.1 GB/s`, of 10^9 bytes, as links are sold."""
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def lacks_batched_copy(gpu: GpuFacts) -> bool:
    """Whether the driver is known to be too old for the batched copy."""
    major, _, minor = (gpu.cuda_version or "").partition(".")
    return major.isdecimal() and minor.isdecimal() and (int(major), int(minor)) < BATCHED_CUDA


def copy_findings(wanted: Wanted, seen: Seen, copies: CopiesSeen) -> Iterator[Finding]:
    """What is to be told of the copies, in order."""
    if copies.refused is not None:
        yield _refused(wanted, copies.refused)
    if copies.failed is not None:
        yield _failed(copies, copies.failed)
    if copies.choices is None:
        return
    for at, name in enumerate(DIRECTIONS):
        yield _choice(wanted, copies, at, name)
    yield from _unusable(seen, copies.choices)
    if copies.same_bytes is not None:
        yield _same_bytes(wanted, copies.same_bytes)
    if copies.queue_s is not None:
        out, into = (format_seconds(seconds) for seconds in copies.queue_s)
        size = format_size(wanted.pages.chunk_bytes)
        yield Finding("queueing", "ok", f"a chunk of {size} costs a thread {out} to store and {into} to load")


def why_chosen(wanted: Wanted, copies: CopiesSeen, choice: CopyChoice) -> str:
    """Why that way is taken."""
    if choice.way.name == "host":
        return "the pages are in host memory"
    if wanted.device_copy != "auto" and copies.refused is None:
        return f"device_copy is {wanted.device_copy!r}"
    rates = [one.bytes_per_s for one in choice.measured if one.bytes_per_s is not None]
    if len(rates) == 1:
        return "the only one that can be had"
    if rate_of(choice) == max(rates):
        return "the fastest"
    return "nearly the fastest, and it leaves more multiprocessors to the model"


def _refused(wanted: Wanted, why: str) -> Finding:
    text = why.removeprefix(f"copying by {wanted.device_copy}: ")
    return Finding(
        "device_copy",
        "problem",
        f"device_copy is {wanted.device_copy!r}, which cannot be had: {text}; an engine would not start",
        "set device_copy to 'auto'",
    )


def _failed(copies: CopiesSeen, why: str) -> Finding:
    if copies.out_of_memory:
        remedy = "stop what fills the GPU, an engine perhaps, or examine another one with --device"
    else:
        remedy = "try again with nothing else on the GPU, and look for errors of the driver (dmesg)"
    return Finding("copies", "problem", f"copying failed: {why}", remedy)


def _choice(wanted: Wanted, copies: CopiesSeen, at: int, name: str) -> Finding:
    assert copies.choices is not None
    choice = copies.choices[at]
    why = why_chosen(wanted, copies, choice)
    rate = rate_of(choice)
    if rate is None:
        unusable = next((unusable_because(one) for one in choice.measured if one.way == choice.way), None)
        return Finding(name, "note", f"by {choice.way}, not measured: {unusable or 'it was not tried'}; {why}")
    share = share_of_plain(choice, rate)
    text = f"by {choice.way}: {format_gb_per_s(rate)}"
    if share is not None:
        text += f", {share:.0%} of a plain copy"
    text += f"; {why}"
    best = rate_of(copies.best[at]) if copies.best is not None else None
    if best is not None and copies.best is not None and rate < _NAMED_SHARE * best:
        text += f"; 'auto' would take {copies.best[at].way}, {format_gb_per_s(best)}"
        return Finding(name, "note", text, "set device_copy to 'auto'")
    if share is not None and share < _SLOW_SHARE:
        return Finding(name, "note", text, _faster(wanted, choice))
    return Finding(name, "ok", text)


def _faster(wanted: Wanted, choice: CopyChoice) -> str:
    raise_it = f"raise the engine's block size: pages of {format_size(wanted.pages.page_bytes)} are small"
    lacking = dict.fromkeys(one.way.name for one in choice.measured if one.bytes_per_s is None)
    return f"make {' and '.join(lacking)} available, or {raise_it}" if lacking else raise_it


def _unusable(seen: Seen, choices: tuple[CopyChoice, CopyChoice]) -> Iterator[Finding]:
    """Ways that cannot be had, each once, unless an absent package or an old driver was told of already."""
    told: dict[str, str] = {}
    for choice in choices:
        for one in choice.measured:
            why = unusable_because(one)
            if why is not None:
                told.setdefault(one.way.name, why)
    for name, why in told.items():
        package = _PACKAGE_OF.get(name)
        if package is not None and seen.packages.get(package) is None:
            continue
        if name == "batched" and seen.gpu is not None and lacks_batched_copy(seen.gpu):
            continue
        remedy = "Triton compiles at first use: it needs a C compiler" if name == "triton" else None
        yield Finding(f"way {name}", "note", f"cannot be had: {why}", remedy)


def _same_bytes(wanted: Wanted, same: bool) -> Finding:
    size = format_size(wanted.pages.chunk_bytes)
    if same:
        return Finding("round trip", "ok", f"a chunk of {size} came back with the bytes it went with")
    return Finding(
        "round trip",
        "problem",
        f"a chunk of {size} came back with other bytes",
        "do not offload on this machine: choose another device_copy and examine again, and report this",
    )
