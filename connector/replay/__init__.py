"""Replays a request trace on virtual time: the product's planner, gates, queues and eviction on modelled devices.

    trace ──▶ engine (GPU cache) ──▶ Planner ──▶ modelled worker (Lane) ──▶ device (processor sharing)

Nothing of the product is copied but what its worker does with bytes; nothing reads a wall clock. Results
are the same, to the digit, for the same trace, scene and rows.
"""

from kvsluice.connector.replay.claims import Claim
from kvsluice.connector.replay.device import DeviceSpec, SlowTime
from kvsluice.connector.replay.knobs import Knobs, find_knobs
from kvsluice.connector.replay.measure import Latency, Series
from kvsluice.connector.replay.rows import MAIN_ROWS, ROW_NAMES, Row, make_rows
from kvsluice.connector.replay.run import RowResult, TierResult, run_row, run_rows
from kvsluice.connector.replay.scene import Scene, TierModel
from kvsluice.connector.replay.trace import Request, make_trace, read_trace, speed_up, spread

__all__ = [
    "MAIN_ROWS",
    "ROW_NAMES",
    "Claim",
    "DeviceSpec",
    "Knobs",
    "Latency",
    "Request",
    "Row",
    "RowResult",
    "Scene",
    "Series",
    "SlowTime",
    "TierModel",
    "TierResult",
    "find_knobs",
    "make_rows",
    "make_trace",
    "read_trace",
    "run_row",
    "run_rows",
    "speed_up",
    "spread",
]
