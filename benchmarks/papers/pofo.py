"""Offloading and rematerialization together: thesis Fig. 4.2 to 4.5, and what goes beyond them.

Time is a multiple of that with all the memory. POFO is as published: one table of 50 slots, sizes rounded up, and
one way to save a block (the solver `pofo` reads several tables). It is judged in `fluid` accounting, which it is
optimal for, and in `whole`, which a machine keeps. Ours is judged in `whole` only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.papers.figure import Claim, Figure, Panel
from benchmarks.papers.runs import GB, Case, Point, run_all

NETWORKS = ("resnet101_500x16", "densenet169_500x16", "inception_v3_500x16")
MORE = ("resnet50_500x16",)  # for the grid
ALPHAS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9)
SPEEDS = (12, 24, 36)  # GB/s
GRID_ALPHAS = (0.05, 0.1, 0.2, 0.4, 0.75)
DIVISIONS = (4, 5, 6)  # of the memory that keeps everything
PUBLISHED = ("pofo", "rematerialization", "offload_dp", "autocapper (thesis)", "opportunist")
OURS = "ours"  # whatever `solve` finds in some seconds
ALONE = "ours, without POFO"  # input dropping, autocapper and local search only
SOLVERS = (*PUBLISHED, OURS)


def case(network: str, alpha: float, speed: float, solver: str) -> Case:
    """`speed` in GB/s."""
    return Case(network=network, alpha=alpha, speed=speed * GB, solver=solver)


def figures() -> list[Figure]:
    """All four, the headline and the grid, from one set of runs."""
    cases = [case(n, a, 12, s) for n in NETWORKS for a in ALPHAS for s in PUBLISHED]
    cases += [case(n, 0.2, b, s) for n in NETWORKS for b in SPEEDS for s in SOLVERS]
    grid = [(n, a, b) for n in (*NETWORKS, *MORE) for a in GRID_ALPHAS for b in SPEEDS]
    cases += [case(n, a, b, s) for n, a, b in grid for s in ("pofo", OURS, ALONE)]
    cases += [divided(n, d, s) for n in NETWORKS for d in DIVISIONS for s in ("pofo", OURS)]
    points = run_all(cases, "POFO")
    return [
        over_memory(points),
        over_bandwidth(points),
        sent_over_memory(points),
        sent_over_bandwidth(points),
        headline(points),
        beyond(points, grid),
    ]


def over_memory(points: dict[Case, Point]) -> Figure:
    """Fig. 4.2."""
    panels = [
        _panel(points, [case(n, a, 12, s) for a in ALPHAS for s in SOLVERS], n, "alpha") for n in NETWORKS
    ]
    below = [
        _time(points, case(n, a, 12, "pofo"))
        <= 1.01 * min(_time(points, case(n, a, 12, s)) for s in ("rematerialization", "offload_dp"))
        for n in NETWORKS
        for a in ALPHAS
    ]
    high = [
        (
            n,
            _time(points, case(n, 0.75, 12, "offload_dp")),
            _time(points, case(n, 0.75, 12, "rematerialization")),
        )
        for n in NETWORKS
    ]
    low = [
        _time(points, case(n, 0.1, 12, "offload_dp")) > _time(points, case(n, 0.1, 12, "rematerialization"))
        for n in NETWORKS
    ]
    return Figure(
        name="thesis-4.2",
        title="Time over memory at 12 GB/s (thesis Fig. 4.2)",
        panels=panels,
        claims=[
            Claim(
                claim="POFO is at least as fast as rematerialization alone and as offloading alone.",
                paper="consistently",
                ours=f"within 1 % or better at {sum(below)} of {len(below)} points",
                holds=all(below),
            ),
            Claim(
                claim="With much memory (ratio 0.75) offloading beats rematerialization.",
                paper="for all networks",
                ours=", ".join(f"{n.split('_')[0]} {x:.3f} against {y:.3f}" for n, x, y in high),
                holds=all(x <= y for _, x, y in high),
            ),
            Claim(
                claim="With little memory it is the other way round.",
                paper="for all networks",
                ours=f"at ratio 0.1 on {sum(low)} of {len(low)}",
                holds=all(low),
            ),
        ],
    )


def over_bandwidth(points: dict[Case, Point]) -> Figure:
    """Fig. 4.3."""
    panels = [
        _panel(points, [case(n, 0.2, b, s) for b in SPEEDS for s in SOLVERS], n, "speed") for n in NETWORKS
    ]
    best = [
        _time(points, case(n, 0.2, b, "pofo"))
        <= 1.01 * min(_time(points, case(n, 0.2, b, s)) for s in PUBLISHED if s != "pofo")
        for n in NETWORKS
        for b in SPEEDS
    ]
    return Figure(
        name="thesis-4.3",
        title="Time over bandwidth at memory ratio 0.2 (thesis Fig. 4.3)",
        panels=panels,
        claims=[
            Claim(
                claim="For little memory POFO finds much better sequences than the heuristics.",
                paper="much better",
                ours=f"best of the published ones at {sum(best)} of {len(best)} points",
                holds=all(best),
            )
        ],
    )


def sent_over_memory(points: dict[Case, Point]) -> Figure:
    """Fig. 4.4."""
    panels, spreads = [], []
    for network in NETWORKS:
        curves = {
            s: [(a, points[one].sent) for a in ALPHAS if (one := case(network, a, 12, s)) in points]
            for s in ("pofo", "autocapper (thesis)", "opportunist", OURS)
        }
        middle = [y for a, y in curves["pofo"] if 0.1 <= a <= 0.6]
        spreads.append(max(middle) - min(middle))
        panels.append(Panel(title=network, x="memory ratio", y="sent / activations", curves=curves))
    return Figure(
        name="thesis-4.4",
        title="What goes to the host, over memory at 12 GB/s (thesis Fig. 4.4)",
        panels=panels,
        claims=[
            Claim(
                claim="POFO offloads about the same amount whatever the memory limit.",
                paper="about constant",
                ours=f"between ratios 0.1 and 0.6 its share varies by at most {max(spreads):.0%} of the activations",
                holds=max(spreads) <= 0.15,
            )
        ],
    )


def sent_over_bandwidth(points: dict[Case, Point]) -> Figure:
    """Fig. 4.5."""
    panels, growth = [], []
    for network in NETWORKS:
        curves = {
            s: [(float(b), points[case(network, 0.2, b, s)].sent) for b in SPEEDS]
            for s in ("pofo", "autocapper (thesis)", "opportunist", OURS)
        }
        first, last = curves["pofo"][0][1], curves["pofo"][-1][1]
        growth.append(last / first if first else float("inf"))
        panels.append(Panel(title=network, x="GB/s", y="sent / activations", curves=curves))
    return Figure(
        name="thesis-4.5",
        title="What goes to the host, over bandwidth at memory ratio 0.2 (thesis Fig. 4.5)",
        panels=panels,
        claims=[
            Claim(
                claim="What POFO offloads grows almost linearly with the bandwidth.",
                paper="almost linearly",
                ours="three times the bandwidth sends "
                + ", ".join(f"{g:.1f}" for g in growth)
                + " times as much",
                holds=all(g >= 1.8 for g in growth),
            )
        ],
    )


def divided(network: str, division: int, solver: str) -> Case:
    """With so small a part of the memory that keeps everything, at 12 GB/s."""
    low, high = case(network, 0.0, 12, solver).memory
    return case(network, (high / division - low) / (high - low), 12, solver)


def headline(points: dict[Case, Point]) -> Figure:
    """4.4.1: how far the memory can be divided with at most 20 % more time, at 12 GB/s."""
    panels, claims = [], []
    for network in NETWORKS:
        curves: dict[str, list[tuple[float, float]]] = {}
        for solver, accounting in (("pofo", "fluid"), ("pofo", "whole"), (OURS, "whole")):
            label = f"{solver}, {accounting}" if solver == "pofo" else solver
            for division in DIVISIONS:
                point = points[divided(network, division, solver)]
                time = point.fluid if accounting == "fluid" else point.whole
                if time is not None:
                    curves.setdefault(label, []).append((float(division), time))
            quarter = dict(curves[label])[4.0]
            claims.append(
                Claim(
                    claim=f"{network.split('_')[0]}, {label}: a quarter of the memory costs at most 20 % more time.",
                    paper="a fourth to a sixth, below 20 %" if solver == "pofo" else "-",
                    ours=f"{quarter - 1:.1%} more",
                    holds=quarter <= 1.2,
                )
            )
        panels.append(
            Panel(title=network, x="memory divided by", y="time / time with all memory", curves=curves)
        )
    return Figure(
        name="headline", title="Dividing the memory, 12 GB/s (thesis 4.4.1)", panels=panels, claims=claims
    )


def beyond(points: dict[Case, Point], grid: Sequence[tuple[str, float, float]]) -> Figure:
    """Ours against POFO as published, both in whole accounting."""
    ours, alone = (_ratios(points, grid, solver) for solver in (OURS, ALONE))
    panels = [
        Panel(
            title=network,
            x="memory ratio",
            y="time / POFO's",
            curves={
                f"{speed} GB/s": [
                    (a, ours[network, a, speed]) for a in GRID_ALPHAS if (network, a, speed) in ours
                ]
                for speed in SPEEDS
            },
        )
        for network in (*NETWORKS, *MORE)
    ]
    return Figure(
        name="beyond-pofo",
        title="Input dropping, autocapper and local search against POFO as published, whole accounting",
        panels=panels,
        claims=[
            _beats(
                "Input dropping, autocapper and local search are faster than POFO on 80 % of the grid.", alone
            ),
            _beats(
                "`solve` with a link, which asks POFO too, is faster than POFO on 80 % of the grid.", ours
            ),
        ],
    )


def _ratios(
    points: dict[Case, Point], grid: Sequence[tuple[str, float, float]], solver: str
) -> dict[tuple[str, float, float], float]:
    """Its time over POFO's, where both have an answer."""
    found = {}
    for network, alpha, speed in grid:
        mine = points[case(network, alpha, speed, solver)].whole
        theirs = points[case(network, alpha, speed, "pofo")].whole
        if mine is not None and theirs is not None:
            found[network, alpha, speed] = mine / theirs
    return found


def _beats(claim: str, ratios: dict[tuple[str, float, float], float]) -> Claim:
    better = sum(ratio < 1 - 1e-6 for ratio in ratios.values())
    worse = sum(ratio > 1 + 1e-6 for ratio in ratios.values())
    spread = f"from {min(ratios.values()):.3f} to {max(ratios.values()):.3f} times its time"
    return Claim(
        claim=claim,
        paper="-",
        ours=f"faster at {better} of {len(ratios)} points, slower at {worse}, {spread}",
        holds=better >= 0.8 * len(ratios),
    )


def _time(points: dict[Case, Point], case: Case) -> float:
    """In fluid accounting for the published solvers, as there; infinite where there is no answer."""
    point = points[case]
    time = point.whole if case.solver == OURS else point.fluid
    return float("inf") if time is None else time


def _panel(points: dict[Case, Point], cases: Iterable[Case], network: str, axis: str) -> Panel:
    curves: dict[str, list[tuple[float, float]]] = {}
    for one in filter(points.__contains__, cases):
        x = one.alpha if axis == "alpha" else one.speed / GB
        if (time := _time(points, one)) < float("inf"):
            curves.setdefault(one.solver, []).append((x, time))
        if one.solver == "pofo" and (whole := points[one].whole) is not None:
            curves.setdefault("pofo, whole", []).append((x, whole))
    label = "memory ratio" if axis == "alpha" else "GB/s"
    return Panel(title=network, x=label, y="time / time with all memory", curves=curves)
