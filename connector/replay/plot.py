"""The rows over time, as one picture."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvsluice.connector.replay.measure import Series
from kvsluice.connector.replay.run import RowResult
from kvsluice.tiers.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["check", "plot"]

_PANELS: Final[Sequence[tuple[str, bool, Callable[[Series], Sequence[float]]]]] = (
    ("load p99 per request [s]", True, lambda series: series.load_p99_s),
    ("stored [MB/s]", False, lambda series: [rate / 1e6 for rate in series.store_bytes_per_s]),
    ("EMA [ms/MiB]", True, lambda series: [1e3 * ema_s for ema_s in series.ema_s]),
    ("dropped [share]", False, lambda series: series.drop_share),
)


def check(path: Path) -> None:
    """See that `plot` will be able to write to `path`, before a long run; what is there stays as it is.

    Raises:
        ConfigError: as `plot` does.
    """
    _new_figure()
    try:
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise _unwritable(path, error) from error


def plot(rows: Sequence[RowResult], tier: str, path: Path, title: str) -> None:
    """Write a PNG: load latency, store goodput, EMA and drop rate of one tier, a line per row, the last one bold.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    figure = _new_figure()
    figure.suptitle(title)
    all_axes = figure.subplots(len(_PANELS), 1, sharex=True)
    for axes, (label, logarithmic, values) in zip(all_axes, _PANELS, strict=True):
        for row in rows:
            series = row.tiers[tier].series
            last = row is rows[-1]
            axes.plot(
                series.end_s,
                values(series),
                label=row.row,
                linewidth=2 if last else 1,
                color="black" if last else None,
            )
        axes.set_ylabel(label)
        axes.set_yscale("log" if logarithmic else "linear")
        axes.grid(visible=True, alpha=0.3)
    all_axes[0].legend(ncol=4, fontsize="small")
    all_axes[-1].set_xlabel("virtual time [s]")
    try:
        figure.savefig(path, format="png", dpi=100)
    except OSError as error:
        raise _unwritable(path, error) from error


def _new_figure() -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ConfigError("a plot needs matplotlib: pip install 'kvsluice[plot]'") from error
    figure = Figure(figsize=(11, 10), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"the plot cannot be written to {str(path)!r}: {error.strerror or error}")
