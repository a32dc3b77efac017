"""What the page of a plan draws, as plain numbers and texts.

    modules, sources, types   lists of texts that values and ops refer to by number
    values, ops               name, module, source, type: one list each, by number
    points                    the frontier: peak in bytes, seconds, and which of the plans is drawn of it, or -1
    plans                     of some points, the chosen one among them: moments, lives in the order in which they are
                              stacked, copies, and what each module has

Lives are stacked by module (`group_of`; weights below all others, the model's own ops above), then by what they are
for, then by birth. Text is text here: whoever puts it into a page
escapes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fxremat.planned_step import PlannedStep
from fxremat.search.candidate import Candidate
from fxremat.show.labels import source_of, value_name
from fxremat.show.modules import ModuleNode, module_tree
from fxremat.show.moments import Moments
from fxremat.show.text import facts
from fxremat.step.costs import Costs
from fxremat.step.joint import Joint
from fxremat.step.kinds import Life, MemoryKind, host_bytes
from fxremat.step.names import Source
from fxremat.step.program import Role

KINDS = {
    MemoryKind.WEIGHTS: "weights and optimizer state",
    MemoryKind.KEPT: "saved for the backward, or returned",
    MemoryKind.TEMPORARY: "temporary values of the forward",
    MemoryKind.RECOMPUTED: "recomputed",
    MemoryKind.OFFLOADED: "offloaded: leaving, or back",
    MemoryKind.RESULTS: "gradients to return",
    MemoryKind.GRADIENTS: "gradients on their way",
    MemoryKind.OUTSIDE: "the loss outside the model",
    MemoryKind.WORKSPACE: "workspace of kernels",
}
LANES = {Role.OFFLOAD: "to the host", Role.PREFETCH: "from the host"}
COMMUNICATION = "between ranks"
DRAWN = 9  # points of the frontier, at most
MOST_LIVES = 200_000  # of all plans of a page

Data = dict[str, Any]


def page_data(plan: PlannedStep) -> Data:
    """Everything that the page of a plan draws. O(points x steps)."""
    told = [list(fact) for fact in facts(plan, module_tree(plan.chosen, plan.costs))]
    keep_all = [plan.keep_all_peak, plan.keep_all_time]
    plan = plan.running
    drawn = _drawn(plan)
    modules = Numbers(_with_outer(s.module for s in (*plan.joint.sources, *plan.joint.value_sources)))
    return {
        "model": plan.joint.model,
        "title": f"fxremat plan for {plan.device} ({plan.timed} times)",
        "budget": plan.budget,
        "keep_all": keep_all,
        "facts": told,
        "kinds": [[kind.value, text] for kind, text in KINDS.items()],
        **_texts(plan.joint, modules),
        "points": _points(plan, drawn),
        "plans": [_plan(candidate, plan.costs, modules) for candidate in drawn],
        "chosen": drawn.index(plan.chosen),
    }


class Numbers(dict[str, int]):
    """Texts by number, in the order in which they came."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        for text in texts:
            self[text]

    def __missing__(self, text: str) -> int:
        self[text] = number = len(self)
        return number


def group_of(module: str) -> str:
    """The module that a stack of the picture is for: a layer, or the first level.

    >>> group_of("transformer.h.3.mlp.c_fc"), group_of("lm_head"), group_of("")
    ('transformer.h.3', 'lm_head', '')
    """
    match = re.match(r"(?:[^.]*\.)*?[0-9]+(?=\.|$)", module)
    return match[0] if match else module.partition(".")[0]


def _with_outer(paths: Iterable[str]) -> Iterable[str]:
    """Each path, after those of the modules around it."""
    yield ""
    for path in dict.fromkeys(paths):
        parts = path.split(".")
        yield from (".".join(parts[:depth]) for depth in range(1, len(parts) + 1) if path)


def _drawn(plan: PlannedStep) -> list[Candidate]:
    """The candidates that are drawn, fastest first: some of the frontier, and the chosen one.

    Where the budget covers weights, or transfers were found for the chosen one alone, the others do not compare.
    """
    lives = max(1, len(plan.program.steps) * 2)
    count = min(DRAWN, MOST_LIVES // lives)
    others = [] if plan.weights or count < 2 else plan.alternatives.spread(count)
    others = [candidate for candidate in others if candidate.layout.joint is plan.joint]
    if all(candidate is not plan.chosen for candidate in others):
        others = [*others, plan.chosen]
    return sorted(others, key=lambda candidate: (candidate.time, -candidate.peak))


def _points(plan: PlannedStep, drawn: Sequence[Candidate]) -> list[list[float]]:
    numbers = {id(candidate): number for number, candidate in enumerate(drawn)}
    candidates = list({id(c): c for c in (*plan.alternatives.candidates, *drawn)}.values())
    if plan.weights:
        candidates = list(drawn)
    candidates.sort(key=lambda candidate: (candidate.time, -candidate.peak))
    return [[c.peak, _short(c.time), numbers.get(id(c), -1)] for c in candidates]


def _texts(joint: Joint, modules: Numbers) -> Data:
    sources, types = Numbers([""]), Numbers([""])

    def columns(found: Sequence[Source]) -> tuple[list[int], list[int]]:
        return [modules[s.module] for s in found], [sources[str(s.frame or "")] for s in found]

    value_modules, value_sources = columns(joint.value_sources)
    op_modules, op_sources = columns(joint.sources)
    texts: Data = {
        "values": {
            "name": [value_name(joint, value.index) for value in joint.values],
            "module": value_modules,
            "source": value_sources,
            "type": [types[_type(value.node.meta.get("val"))] for value in joint.values],
        },
        "ops": {"name": [op.name for op in joint.ops], "module": op_modules, "source": op_sources},
    }
    return texts | {"modules": list(modules), "sources": list(sources), "types": list(types)}


def _type(shown: object) -> str:
    """Type and shape of a tensor, as "float32[8, 64]"."""
    if not isinstance(shown, torch.Tensor):
        return ""
    return f"{str(shown.dtype).removeprefix('torch.')}[{', '.join(map(str, shown.shape))}]"


def _plan(candidate: Candidate, costs: Costs, modules: Numbers) -> Data:
    moments = Moments.of(candidate, costs)
    joint = candidate.layout.joint
    roles = Numbers()
    lives = _stacked(moments.lives, joint, modules)
    kinds = {kind: number for number, kind in enumerate(KINDS)}
    tree = module_tree(candidate, costs)
    return {
        "peak": candidate.peak,
        "time": candidate.time,
        "timed": moments.timed,
        "split": moments.split,
        "starts": [_short(moment.start) for moment in moments.moments],
        "ends": [_short(moment.end) for moment in moments.moments],
        "role": [roles[moment.role] for moment in moments.moments],
        "roles": list(roles),
        "op": [_number(moment.op) for moment in moments.moments],
        "value": [_number(moment.value) for moment in moments.moments],
        "block": [moment.block for moment in moments.moments],
        "blocks": list(candidate.layout.names),
        "copies": _copies(candidate),
        "host": _on_the_host(moments, costs),
        "lives": {
            "kind": [kinds[life.kind] for life in lives],
            "first": [life.first for life in lives],
            "last": [min(life.last, len(moments.moments) - 1) for life in lives],
            "bytes": [life.bytes for life in lives],
            "value": [_number(None if life.state else life.value) for life in lives],
            "op": [_number(life.op) for life in lives],
        },
        "tree": [_share(node, modules) for node in tree.walk()],
    }


def _stacked(lives: Iterable[Life], joint: Joint, modules: Numbers) -> list[Life]:
    """Lives in the order in which they are stacked, from the bottom up."""
    groups = Numbers(group_of(module) for module in modules if module)  # the model's own ops lie on top
    kinds = list(KINDS)

    def key(life: Life) -> tuple[int, ...]:
        group = -1 if life.kind is MemoryKind.WEIGHTS else groups[group_of(source_of(joint, life).module)]
        return group, kinds.index(life.kind), life.first, life.last

    return sorted(lives, key=key)


def _copies(candidate: Candidate) -> list[list[Any]]:
    """Copies to the host and back, and collectives: lane, start and end."""
    found: list[list[Any]] = []
    if candidate.transfers:
        for (role, _), (start, end) in candidate.transfers.copies.items():
            found.append([LANES[role], _short(start), _short(end)])
    if candidate.communication:
        for one in candidate.communication.collectives:
            found.append([COMMUNICATION, _short(one.begins), _short(one.ends)])
    return found


def _on_the_host(moments: Moments, costs: Costs) -> list[int]:
    """Bytes of activations that wait on the host at each moment; nothing where none ever do."""
    hosted = list(host_bytes(moments.program, costs.sizes))
    if not any(hosted):
        return []
    split = moments.program.split
    return hosted if len(hosted) == len(moments.moments) else [*hosted[:split], hosted[split - 1], *hosted[split:]]


def _share(node: ModuleNode, modules: Numbers) -> list[float]:
    share = node.total
    sizes = share.saved, share.recomputed, share.offloaded, share.gradients
    return [modules[node.path], *sizes, *map(_short, (share.forward, share.backward, share.extra))]


def _number(number: int | None) -> int:
    return -1 if number is None else number


def _short(seconds: float) -> float:
    """Seconds in nine digits, which is what a page is sent."""
    return float(f"{seconds:.9g}")
