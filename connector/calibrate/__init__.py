"""Measures a tier and says what to configure: a gate's marks, threads, the fixed cost of a store.

    place ──▶ plan ──▶ measure (closed loops on the tier) ──▶ model ──▶ suggestion ──▶ snippet

`Measurement`, `fit` and `suggest` are pure: a simulator can call them with modelled measurements.
"""

from kvsluice.connector.calibrate.measure import Meter, Outcome, Progress
from kvsluice.connector.calibrate.model import Fit, Measurement, fit
from kvsluice.connector.calibrate.plan import Cell, Plan, make_plan
from kvsluice.connector.calibrate.run import Calibration, Options, calibrate, snippet_for
from kvsluice.connector.calibrate.suggestion import Suggestion, suggest

__all__ = [
    "Calibration",
    "Cell",
    "Fit",
    "Measurement",
    "Meter",
    "Options",
    "Outcome",
    "Plan",
    "Progress",
    "Suggestion",
    "calibrate",
    "fit",
    "make_plan",
    "snippet_for",
    "suggest",
]
