"""Plots time over memory with matplotlib, which is imported only for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fxremat.errors import FxrematError
from fxremat.planned_step import PlannedStep
from fxremat.show.axes import SECONDS, SIZES
from fxremat.show.frontier import FrontierTable
from fxremat.show.text import whatever_is
from fxremat.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVE, BOUND, BUDGET = "#3b6ea5", "#888888", "#c0392b"


def plot(plan: PlannedStep, frontier: FrontierTable, ax: Axes | None = None) -> Axes:
    """Plot the time of the alternative plans over their memory, on `ax` or new axes (None), and return the axes.

    The plot also has this plan, its budget, and the lower bound.

    Raises:
        FxrematError: matplotlib is not installed.
    """
    ax = ax if ax is not None else _new_axes()
    whole = plan.alternatives.keep_all
    size, bytes_each = _unit(whole.peak, SIZES)
    time, seconds_each = _unit(max(whole.time, plan.predicted_time), SECONDS)

    def at(peak: float, seconds: float) -> tuple[float, float]:
        return peak / bytes_each, seconds / seconds_each

    offered = sorted(at(*point) for point in frontier)
    right = max([point[0] for point in offered] + [plan.budget / bytes_each if _near(plan) else 0.0])
    steps = [*offered, (right, offered[-1][1])]
    ax.step(*zip(*steps, strict=True), where="post", color=CURVE, label="fastest plan on offer")
    ax.plot(*zip(*offered, strict=True), ".", color=CURVE)
    bounds = sorted(at(row.peak, row.bound) for row in frontier.rows if row.bound is not None)
    if bounds:
        ax.plot(*zip(*bounds, strict=True), "--", color=BOUND, label=f"lower bound, {whatever_is(plan)}")
    ax.plot(*at(whole.peak, whole.time), "s", color="black", label="everything kept")
    ax.plot(*at(plan.predicted_peak, plan.predicted_time), "o", color=BUDGET, label="this plan")
    if _near(plan):
        ax.axvline(plan.budget / bytes_each, color=BUDGET, linestyle=":", label=f"budget {format_bytes(plan.budget)}")
    ax.set_xlabel(f"peak memory of a step ({size})")
    ax.set_ylabel(f"time of a step ({time})")
    ax.set_ylim(bottom=0.0)
    ax.set_title(f"{plan.graph.model} on {plan.device} ({plan.timed} times)", parse_math=False)
    ax.legend()
    return ax


def _near(plan: PlannedStep) -> bool:
    """Tell whether the budget is drawn; one far above all peaks would squeeze the rest of the picture."""
    return plan.budget <= 2 * max(plan.keep_all_peak, plan.alternatives.keep_all.peak)


def _unit(most: float, units: tuple[tuple[str, float], ...]) -> tuple[str, float]:
    return next(((name, each) for name, each in reversed(units) if most >= each), units[0])


def _new_axes() -> Axes:
    try:
        from matplotlib import pyplot
    except ImportError:
        need = "plan.plot() draws with matplotlib, which is not installed: pip install fxremat[plot]"
        raise FxrematError(need) from None
    return pyplot.subplots()[1]
