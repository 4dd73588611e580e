"""The main job, end to end: an engine's KV cache outlives the engine.

1. An engine process serves prompts with a shared prefix cold, its chunks go to three tiers, and it is killed.
2. A new process on the same folder gets its hits from the `fs` tier.
3. A third one, with the host and fs tiers emptied, gets its hits from the `obj` tier.

Exit code 0: the tokens of all runs are identical and every hit was there. 1: not so, and it says what.
A control run with one loaded KV block zeroed has to give other tokens, or the comparison proves nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from demo_engine import SIZES, Size, Spec, distinct_chunks, expected_hit
from demo_process import EngineProcess, StageError, StageResult
from demo_store import StoreError, break_file, break_object, local_store, open_bucket
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

__all__ = ["main"]

RUNS = ("cold", "host", "fs", "obj")
STAGE_TIMEOUT_S = 240.0
"""Without a word from an engine process; the whole demo takes well under a minute on two idle cores."""


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="demo.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", choices=sorted(SIZES), default="full", help="default: full")
    parser.add_argument(
        "--endpoint-url", help="an S3 server to use, credentials from the environment; default: moto's, started here"
    )
    parser.add_argument("--bucket", default="kvsluice-demo", help="made if it is missing; default: kvsluice-demo")
    parser.add_argument("--work-dir", type=Path, help="where the fs tiers' folders go; default: a temporary folder")
    parser.add_argument(
        "--break",
        dest="broken",
        choices=("fs", "obj"),
        help="damage a chunk of that tier first, to see the demo fail",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    # Wide enough for the tables where the output is a file or a pipe.
    console = Console() if sys.stdout.isatty() else Console(width=110)
    started_s = time.monotonic()
    try:
        with ExitStack() as stack:
            work_dir = args.work_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvsluice-demo-")))
            results = run_stages(args.size, args.endpoint_url, args.bucket, args.broken, work_dir, console, stack)
    except (StageError, StoreError) as error:
        console.print(Text(str(error), style="red"), highlight=False, soft_wrap=True)
        return 1
    size = SIZES[args.size]
    console.print(prompt_table(size, results), tier_table(results))
    troubles = find_troubles(size, results)
    for trouble in troubles:
        console.print(Text(trouble, style="red"), highlight=False, soft_wrap=True)
    console.print(f"all stages: {time.monotonic() - started_s:.0f} s", highlight=False)
    different = any(trouble.startswith("tokens") for trouble in troubles)
    console.print(f"identical tokens: {'no' if different else 'yes'}", highlight=False)
    return 1 if troubles else 0


def run_stages(
    size_name: str,
    endpoint_url: str | None,
    bucket: str,
    broken: str | None,
    work_dir: Path,
    console: Console,
    stack: ExitStack,
) -> dict[str, StageResult]:
    """Three engine processes, one after the other; what each reported, by what it took its hits from."""
    # Threads that spin while they wait would take the cores from the connector's and the store's own.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    if endpoint_url is None:
        endpoint_url, credentials = stack.enter_context(local_store())
        environment.update(credentials)
    prefix = f"demo-{uuid.uuid4().hex[:12]}"  # of its own: whatever the bucket holds, this run starts cold
    store = stack.enter_context(open_bucket(endpoint_url, bucket, prefix, environment))
    prompts = len(SIZES[size_name].own_tokens)
    progress = stack.enter_context(
        Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
        )
    )
    results = {}
    for source, title, folder, steps in (
        ("cold", "engine 1: cold, then killed", "fs", 2 * prompts + 3),
        ("fs", "engine 2: hits from fs", "fs", prompts + 4),
        ("obj", "engine 3: hits from obj", "empty", prompts + 4),
    ):
        if broken == source == "fs":
            break_file(work_dir / folder)
        elif broken == source == "obj":
            break_object(store, bucket, prefix)
        spec = Spec(size_name, source, str(work_dir / folder), bucket, endpoint_url, prefix)
        advance = _row(progress, title, steps)
        with EngineProcess(spec, environment, work_dir / f"{source}.log") as process:
            results[source] = process.run(STAGE_TIMEOUT_S, advance)
    return results


def _row(progress: Progress, title: str, steps: int) -> Callable[[str, int], None]:
    """A line of the progress display; what is returned sets its note and moves it on."""
    task = progress.add_task(title, total=steps, note="starting")

    def advance(note: str, done: int) -> None:
        progress.update(task, note=note, advance=done)

    return advance


def find_troubles(size: Size, results: Mapping[str, StageResult]) -> list[str]:
    """Everything that is not as it must be, one sentence each."""
    served = {name: run for result in results.values() for name, run in result.served.items()}
    troubles = []
    for name in RUNS[1:]:
        for number, (cold, hit) in enumerate(zip(served["cold"], served[name], strict=True), start=1):
            if hit.tokens != cold.tokens:
                troubles.append(f"tokens of prompt {number} differ: cold {cold.tokens}, from {name} {hit.tokens}")
            if hit.hit_tokens < (expected := expected_hit(size, hit.prompt_tokens)):
                troubles.append(
                    f"a hit is missing: prompt {number} took {hit.hit_tokens} of {expected} tokens from {name}"
                )
    for name in RUNS[2:]:
        # What two prompts share may come from the host tier the second time; the first time it can't.
        loaded, wanted = results[name].tiers[name].loaded[0], distinct_chunks(size)
        if loaded < wanted:
            reasons = ", ".join(f"{count} {reason}" for reason, count in results[name].tiers[name].missed.items())
            troubles.append(
                f"a hit is missing: {loaded} of {wanted} chunks came from the {name} tier ({reasons or 'none missed'})"
            )
        if results[name].served["control"][0].tokens == served["cold"][0].tokens:
            troubles.append("the comparison proves nothing: one zeroed KV block left the tokens as they were")
    return troubles


def prompt_table(size: Size, results: Mapping[str, StageResult]) -> Table:
    served = {name: run for result in results.values() for name, run in result.served.items()}
    table = Table(title="Time to first token", title_justify="left")
    for column in ("prompt", "tokens", "hit tokens", "cold", "host hit", "fs hit", "obj hit", "obj vs. cold"):
        table.add_column(column, justify="right")
    for number, cold in enumerate(served["cold"]):
        times_s = [served[name][number].first_token_s for name in RUNS]
        table.add_row(
            str(number + 1),
            str(cold.prompt_tokens),
            str(min(served[name][number].hit_tokens for name in RUNS[1:])),
            *(f"{time_s * 1e3:.0f} ms" for time_s in times_s),
            f"{times_s[0] / times_s[-1]:.1f}x faster" if times_s[-1] < times_s[0] else "not faster",
        )
    table.caption = f"{size.tokens_per_chunk} tokens a chunk; hit tokens are the fewest of the three hits"
    return table


def tier_table(results: Mapping[str, StageResult]) -> Table:
    table = Table(title="Tiers, all engines together", title_justify="left")
    for column in ("tier", "stored", "loaded", "gate", "s/MiB", "dropped", "failed"):
        table.add_column(column, justify="right")
    for name in RUNS[1:]:
        tiers = [result.tiers[name] for result in results.values()]
        gates = [tier.gate for tier in tiers if tier.gate is not None]
        table.add_row(
            name,
            _amount([tier.stored for tier in tiers]),
            _amount([tier.loaded for tier in tiers]),
            "off" if not gates else "under pressure" if any(pressed for pressed, _ in gates) else "open",
            f"{max(ema_s for _, ema_s in gates):.4f}" if gates else "",
            _counts([tier.dropped for tier in tiers]),
            _counts([tier.failed for tier in tiers]),
        )
    return table


def _amount(counts: Sequence[tuple[int, int]]) -> str:
    return f"{sum(chunks for chunks, _ in counts)} chunks, {sum(size for _, size in counts) / 2**20:.2f} MiB"


def _counts(parts: Sequence[Mapping[str, int]]) -> str:
    reasons = sorted({reason for part in parts for reason in part})
    return ", ".join(f"{sum(part.get(reason, 0) for part in parts)} {reason}" for reason in reasons) or "0"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
