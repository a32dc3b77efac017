"""Joins of uniform chains: thesis Fig. 1.8 and 1.9, and Fig. 10 of RR-9273."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.papers.figure import Claim, Figure, Panel
from fxremat.errors import BudgetTooSmall
from fxremat.solvers.references.joins import branch_by_branch, equiv_chain, multi_chain, trade_off

SHAPES: dict[str, Callable[[int], tuple[int, ...]]] = {
    "CM": lambda length: (length, 5 * length),
    "SNN": lambda length: (2 * length,) * 3,
    "RNN": lambda length: (6 * length,),
}


def makespan_against_memory() -> Figure:
    """Thesis Fig. 1.8: all graphs have 6 L forwards, 6 L + K slots hold every value."""
    panels, at_half = [], []
    near_least: dict[str, list[float]] = {}
    for length in (5, 10, 15):
        curves = {}
        for name, shape in SHAPES.items():
            curves[name] = list(zip(*trade_off(shape(length)), strict=True))
            at_half.append(min(y for x, y in curves[name] if x <= 0.5))
            near_least.setdefault(name, []).append(curves[name][2][1])
        panels.append(
            Panel(title=f"L = {length}", x="slots / enough", y="makespan / (12 L + 1)", curves=curves)
        )
    return Figure(
        name="thesis-1.8",
        title="Joins of uniform chains: makespan against memory (thesis Fig. 1.8)",
        panels=panels,
        claims=[
            Claim(
                claim="Half the memory costs about a quarter more time, whatever the graph.",
                paper="1.25",
                ours=f"{min(at_half):.2f} to {max(at_half):.2f}",
                holds=min(at_half) >= 1.1 and max(at_half) <= 1.4,
            ),
            Claim(
                claim="With two slots more than the least, the makespan is less than doubled.",
                paper="< 2, for L up to 15",
                ours=", ".join(f"{name} at most {max(ys):.2f}" for name, ys in near_least.items()),
                holds=all(max(ys) < 2 for ys in near_least.values()),
            ),
        ],
    )


def makespan_against_length() -> Figure:
    """Thesis Fig. 1.9: a fixed number of slots, longer and longer graphs."""
    panels, gaps = [], []
    for slots in (7, 9, 11, 13):
        curves: dict[str, list[tuple[float, float]]] = {name: [] for name in SHAPES}
        for length in range(1, 16):
            for name, shape in SHAPES.items():
                try:
                    makespan, _ = multi_chain(shape(length), slots)
                except BudgetTooSmall:
                    continue
                curves[name].append((float(length), makespan / (12 * length + 1)))
        alone = dict(curves["RNN"])
        gaps += [y / alone[x] for name in ("CM", "SNN") if slots > 7 for x, y in curves[name]]
        panels.append(Panel(title=f"{slots} slots", x="L", y="makespan / (12 L + 1)", curves=curves))
    return Figure(
        name="thesis-1.9",
        title="Joins of uniform chains: makespan against length (thesis Fig. 1.9)",
        panels=panels,
        claims=[
            Claim(
                claim="The gap between joins and the single chain is small, except at the least memory.",
                paper="rather small",
                ours=f"at most {max(gaps):.2f} times the single chain with 9 slots or more",
                holds=max(gaps) < 1.5,
            )
        ],
    )


def against_linearization() -> Figure:
    """RR-9273 Fig. 10: what it costs to see three equal branches as one chain."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for slots in (9, 12, 15):
        best = {n: multi_chain((n,) * 3, slots)[0] for n in range(2, 26)}
        curves[f"EQUIV-CHAIN, {slots} slots"] = [
            (2.0 * n + 1, equiv_chain(3, n, slots) / best[n]) for n in best
        ]
        curves[f"one branch after another, {slots} slots"] = [
            (2.0 * n + 1, branch_by_branch((n,) * 3, slots) / best[n]) for n in best
        ]
    equiv = curves["EQUIV-CHAIN, 9 slots"]
    return Figure(
        name="rr9273-10",
        title="Joins against their linearization (RR-9273 Fig. 10)",
        panels=[Panel(title="three equal branches", x="length", y="makespan / optimum", curves=curves)],
        claims=[
            Claim(
                claim="EQUIV-CHAIN is near the optimum for short graphs and falls behind as they grow.",
                paper="steadily decreases",
                ours=f"{equiv[0][1]:.2f} at length {equiv[0][0]:.0f}, {equiv[-1][1]:.2f} at {equiv[-1][0]:.0f}",
                holds=equiv[0][1] < equiv[-1][1],
            )
        ],
    )
