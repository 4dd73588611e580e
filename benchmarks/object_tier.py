"""The object tier beside boto3, obstore and plain HTTP, on one S3 server in one run.

    python benchmarks/object_tier.py --endpoint-url URL [--bucket NAME] [--claims] [--json FILE] [--tiny]
    python benchmarks/object_tier.py --endpoint-url URL --parts [--json FILE] [--tiny]

PUT and GET of 64 KiB to 32 MiB with 1, 4 and 16 in flight: MB/s, this process's CPU time for an
operation, and ours as a share of the raw HTTP floor and as a multiple of boto3 with its defaults.
The clients take turns in each round, in an order that changes, and ratios are taken within a round.
With --claims it exits 1 where one fails.

--parts is another table: one request against ranged GET and multipart PUT in parallel, straight to the
server and over a path that limits each connection. It says from which size on splitting helps where.

Credentials come from the environment. What is put is deleted again, and no more than --room-gib lie
on the server at a time; RGW keeps the tails of deleted objects for a while, by default for two hours
(`rgw gc obj min wait`, `rgw gc processor period`; the tests' RGW has 5 s each), so --gc-s waits for it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Final, TypeVar

from object_tier_cells import MIB
from object_tier_clients import contenders, has_obstore
from object_tier_http import RefusedError, Signer, credentials_in_use
from object_tier_measure import Plan, measure
from object_tier_parts import PartsPlan, measure_parts
from object_tier_report import claims_of, parts_table_of, table_of, threshold_lines
from object_tier_space import BALLAST_BYTES, Room, Space, open_space
from rich.console import Console

HELP: Final = """\
give --endpoint-url. A throw-away Ceph RADOS Gateway for it, as the tests use one:
    make rgw-start
    . build/rgw/env.sh
    make bench-object-tier ARGS="--endpoint-url $AWS_ENDPOINT_URL_S3"
    make rgw-stop"""

PLAN: Final = Plan((64 << 10, 256 << 10, 4 * MIB, 32 * MIB), (1, 4, 16), rounds=5, cell_s=0.3)
TINY: Final = Plan((64 << 10, 5 * MIB), (1, 2), rounds=2, cell_s=0.0, sources=2)
PARTS: Final = PartsPlan(
    tuple(size * MIB for size in (16, 32, 64, 128)),
    (1, 4),
    (1, 2, 4, 8),
    rounds=3,
    cell_bytes=64 * MIB,
    mbps=100.0,
    rtt_ms=20.0,
)
TINY_PARTS: Final = PartsPlan((11 * MIB,), (1,), (1, 2, 4), rounds=1, cell_bytes=0, mbps=1000.0, rtt_ms=2.0)

_T = TypeVar("_T")


def _counted(console: Console, what: str, cells: Iterable[_T]) -> list[_T]:
    """All of them, with a sign of life while they come; none where nobody watches."""
    done = []
    with console.status(what) as status:
        for cell in cells:
            done.append(cell)
            status.update(f"{what}: {len(done)} cells done")
    return done


def _machine() -> dict[str, object]:
    packages = ("boto3", "obstore", "urllib3") if has_obstore() else ("boto3", "urllib3")
    return {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def _clients(console: Console, args: argparse.Namespace, space: Space) -> tuple[dict[str, object], bool]:
    plan = TINY if args.tiny else replace(PLAN, rounds=args.rounds or PLAN.rounds, cell_s=args.cell_s)
    if not has_obstore():
        console.print("obstore is not installed in this environment: its columns stay empty")
    with contenders(args.endpoint_url, space.bucket, space.prefix, max(plan.in_flight)) as made:
        cells = _counted(console, "clients", measure(made, space, plan))
    console.print(table_of(cells))
    claims = list(claims_of(cells))
    for claim in claims if not args.tiny else ():
        console.print(claim.as_text())
    document: dict[str, object] = {
        "cells": [cell.as_json() for cell in cells],
        "claims": [{**asdict(claim), "ok": claim.ok} for claim in claims],
    }
    return document, all(claim.ok for claim in claims)


def _parts(console: Console, args: argparse.Namespace, space: Space) -> tuple[dict[str, object], bool]:
    plan = TINY_PARTS if args.tiny else replace(PARTS, rounds=args.rounds or PARTS.rounds)
    if not args.tiny:
        plan = replace(plan, mbps=args.path_mbps, rtt_ms=args.path_rtt_ms)
        if args.sizes_mib:
            plan = replace(plan, sizes_bytes=[size * MIB for size in args.sizes_mib])
    cells = _counted(console, "parts", measure_parts(Signer(args.endpoint_url, space.bucket), space, plan))
    console.print(parts_table_of(cells, plan.mbps, plan.rtt_ms))
    for line in threshold_lines(cells):
        console.print(line)
    return {"mbps": plan.mbps, "rtt_ms": plan.rtt_ms, "cells": [asdict(cell) for cell in cells]}, True


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables; 1 where a claim failed and --claims was given, 2 without a server."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--endpoint-url", help="of the S3 server")
    parser.add_argument("--bucket", help="work below a new prefix of this one (default: a new bucket)")
    parser.add_argument("--parts", action="store_true", help="the other table: one request or several")
    parser.add_argument("--claims", action="store_true", help="exit 1 where one fails")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there as well")
    parser.add_argument("--tiny", action="store_true", help="a few operations: shows that it runs, claims nothing")
    parser.add_argument("--rounds", type=int, help=f"default: {PLAN.rounds}, with --parts {PARTS.rounds}")
    parser.add_argument("--cell-s", type=float, default=PLAN.cell_s, help="of a client's turn (default: 0.3)")
    parser.add_argument("--room-gib", type=float, default=3.0, help="on the server at a time (default: 3)")
    parser.add_argument("--gc-s", type=float, default=12.0, help="until tails are collected (default: 12)")
    parser.add_argument("--path-mbps", type=float, default=PARTS.mbps, help="of a connection (default: 100)")
    parser.add_argument("--path-rtt-ms", type=float, default=PARTS.rtt_ms, help="default: 20")
    parser.add_argument("--sizes-mib", type=int, nargs="+", help="of --parts (default: 16 32 64 128)")
    args = parser.parse_args(arguments)
    if not args.endpoint_url:
        print(HELP, file=sys.stderr)
        return 2
    try:
        credentials_in_use()
    except RefusedError as error:
        print(error, file=sys.stderr)
        return 2
    console = Console(width=None if sys.stdout.isatty() else 120)
    machine = _machine()
    console.print(", ".join(f"{name} {value}" for name, value in machine.items()))
    room = Room(int(args.room_gib * 1024 * MIB), args.gc_s)
    with open_space(args.endpoint_url, args.bucket, room, 0 if args.tiny else BALLAST_BYTES) as space:
        document, ok = _parts(console, args, space) if args.parts else _clients(console, args, space)
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine, "waited_for_room_s": room.waited_s, **document}, indent=1))
    return 1 if args.claims and not args.tiny and not ok else 0


if __name__ == "__main__":
    sys.exit(main())
