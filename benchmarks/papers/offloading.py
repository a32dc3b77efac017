"""Activation offloading alone: thesis Fig. 3.5 (against the lower bound) and 3.6 (against rematerialization)."""

from __future__ import annotations

from benchmarks.papers.figure import Claim, Figure, Panel
from benchmarks.papers.runs import GB, Case, Point, run_all

NETWORKS = (
    *(
        f"{network}_{batch}"
        for network in ("resnet18", "resnet50", "resnet101", "resnet152", "densenet121", "densenet201")
        for batch in ("224x32", "500x16")
    ),
    "inception_v3_299x32",
    "inception_v3_500x16",
)
SOLVERS = ("offload_greedy", "offload_dp", "vdnn")
ALPHAS = tuple(round(0.1 * step, 1) for step in range(1, 11))
SPEED = 12 * GB


def bound(case: Case) -> float:
    """Prop. 3: what does not fit crosses the link twice. As a multiple of the time with all the memory."""
    chain = case.chain
    _, most = case.memory
    return max(1.0, 2 * (most - case.mem) / case.speed / chain.least_time)


def against_the_bound() -> Figure:
    """Fig. 3.5, in fluid accounting as there."""
    cases = [
        Case(network=network, alpha=alpha, speed=SPEED, solver=solver)
        for network in NETWORKS
        for alpha in ALPHAS
        for solver in SOLVERS
    ]
    points = run_all(cases, "Fig. 3.5")
    panels = []
    ratios: dict[str, list[float]] = {solver: [] for solver in SOLVERS}
    for network in NETWORKS:
        curves: dict[str, list[tuple[float, float]]] = {solver: [] for solver in SOLVERS}
        for case in cases:
            if case.network == network and (time := points[case].fluid) is not None:
                curves[case.solver].append((case.alpha, time / bound(case)))
                ratios[case.solver].append(curves[case.solver][-1][1])
        panels.append(Panel(title=network, x="memory ratio", y="time / bound", curves=curves))
    worst = {solver: max(found) for solver, found in ratios.items()}
    within = sum(ratio <= 1.2 for ratio in ratios["offload_dp"]) / len(ratios["offload_dp"])
    last, where = max((y, f"{p.title} at {x}") for p in panels for x, y in p.curves["offload_dp"])
    share = sum(g <= d * 1.02 for g, d in _pairs(points, cases)) / (len(cases) / len(SOLVERS))
    return Figure(
        name="thesis-3.5",
        title="Offloading alone against its lower bound, 12 GB/s (thesis Fig. 3.5)",
        panels=panels,
        claims=[
            Claim(
                claim="DYNPROG stays within 1.2 times the lower bound.",
                paper="<= 1.2",
                ours=f"{within:.0%} of the points do; at most {last:.2f}, {where} of the memory range",
                holds=worst["offload_dp"] <= 1.2,
            ),
            Claim(
                claim="The greedy choice is close to DYNPROG in most cases.",
                paper="small differences, but for DenseNet",
                ours=f"within 2 % in {share:.0%} of the cases; its worst ratio is {worst['offload_greedy']:.2f}",
                holds=share >= 0.5,
            ),
            Claim(
                claim="vDNN is outperformed by both.",
                paper="in all cases",
                ours=f"its worst ratio is {worst['vdnn']:.2f}",
                holds=worst["vdnn"] > max(worst["offload_dp"], worst["offload_greedy"]),
            ),
        ],
    )


def _pairs(points: dict[Case, Point], cases: list[Case]) -> list[tuple[float, float]]:
    """Times of greedy and DYNPROG at the same place."""
    found: dict[tuple[str, float], dict[str, float]] = {}
    for case in cases:
        if (time := points[case].fluid) is not None:
            found.setdefault((case.network, case.alpha), {})[case.solver] = time
    return [
        (times["offload_greedy"], times["offload_dp"])
        for times in found.values()
        if {"offload_greedy", "offload_dp"} <= times.keys()
    ]


def against_rematerialization() -> Figure:
    """Fig. 3.6: throughput over memory."""
    networks = ("resnet50_224x32", "resnet101_500x16", "densenet121_500x16", "inception_v3_500x16")
    lines = {"rematerialization": ("persistent", SPEED)} | {
        f"offloading, {speed} GB/s": ("offload_dp", speed * GB) for speed in (12, 24, 36)
    }
    cases = {
        (network, label, alpha): Case(network=network, alpha=alpha, speed=speed, solver=solver)
        for network in networks
        for label, (solver, speed) in lines.items()
        for alpha in ALPHAS
    }
    points = run_all(cases.values(), "Fig. 3.6")
    panels = []
    for network in networks:
        curves: dict[str, list[tuple[float, float]]] = {}
        for label in lines:
            found = [(alpha, points[cases[network, label, alpha]].fluid) for alpha in ALPHAS]
            curves[label] = [(alpha, 1 / time) for alpha, time in found if time is not None]
        panels.append(Panel(title=network, x="memory ratio", y="throughput / full memory", curves=curves))
    slow = [_wins(panel, "offloading, 12 GB/s", alphas=ALPHAS[:5]) for panel in panels]
    fast = [_wins(panel, "offloading, 36 GB/s", alphas=ALPHAS[5:]) for panel in panels]
    return Figure(
        name="thesis-3.6",
        title="Offloading against rematerialization, by bandwidth (thesis Fig. 3.6)",
        panels=panels,
        claims=[
            Claim(
                claim="At 12 GB/s rematerialization is better, except at high memory limits.",
                paper="significantly",
                ours=f"better at {1 - sum(slow) / len(slow):.0%} of the points up to half the memory",
                holds=sum(slow) == 0,
            ),
            Claim(
                claim="With a link two or three times as fast offloading wins over a wide range.",
                paper="wide range of memory limits",
                ours=f"at 36 GB/s better at {sum(fast) / len(fast):.0%} of the points above half the memory",
                holds=sum(fast) / len(fast) >= 0.5,
            ),
        ],
    )


def _wins(panel: Panel, label: str, *, alphas: tuple[float, ...]) -> float:
    """In which share of the points offloading has the higher throughput."""
    other, mine = dict(panel.curves["rematerialization"]), dict(panel.curves[label])
    return sum(mine.get(alpha, 0.0) > other[alpha] for alpha in alphas) / len(alphas)
