"""Results as JSON values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from kvsluice.connector.replay.claims import Claim
from kvsluice.connector.replay.run import RowResult
from kvsluice.connector.replay.scene import Scene

__all__ = ["document"]


def document(
    *, scene: Scene, rows: Sequence[RowResult], claims: Sequence[Claim], facts: Mapping[str, object]
) -> dict[str, object]:
    """One document: `facts` (the trace, the knobs), then the scene, the rows and the claims.

    What could not be measured is null.
    """
    return {
        **{key: _plain(value) for key, value in facts.items()},
        "scene": _plain(scene),
        "rows": [_plain(row) for row in rows],
        "claims": [_plain(claim) for claim in claims],
    }


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
