"""The verifier of programs: what planning makes passes it, and each kind of mistake is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fxremat
from fxremat.errors import InvalidSchedule
from fxremat.passes.lower import lower
from fxremat.settings import Search
from fxremat.step.program import Program, Role, Step
from fxremat.step.verify import verify

pytestmark = pytest.mark.usefixtures("torch_ready")


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.fixture(scope="module")
def program() -> Program:
    """A program that recomputes."""
    plan = fxremat.plan(Deep(), (torch.ones(16, 8),), mem="min", search=Search(seconds=0), costs="estimate")
    assert plan.program.recomputed
    return plan.program


def place_of(program: Program, role: Role) -> int:
    return next(place for place, step in enumerate(program.steps) if step.role is role and step.writes)


def without(program: Program, place: int) -> Program:
    steps = (*program.steps[:place], *program.steps[place + 1 :])
    return replace(program, steps=steps, split=program.split - (place < program.split))


def first_removed(program: Program) -> Program:
    return without(program, place_of(program, Role.FORWARD))


def recomputation_removed(program: Program) -> Program:
    return without(program, place_of(program, Role.RECOMPUTE))


def backward_moved_ahead(program: Program) -> Program:
    place = place_of(program, Role.BACKWARD) + 3
    steps = list(program.steps)
    steps.insert(program.split, steps.pop(place))
    return replace(program, steps=tuple(steps))


def backward_twice(program: Program) -> Program:
    step = program.steps[-1]
    assert isinstance(step, Step)
    versions = tuple(range(len(program.version_of), len(program.version_of) + len(step.writes)))
    made = tuple(program.version_of[version] for version in step.writes)
    again = replace(step, writes=versions)
    return replace(program, steps=(*program.steps, again), version_of=(*program.version_of, *made))


def another_role(program: Program) -> Program:
    place = place_of(program, Role.RECOMPUTE)
    step = replace(program.steps[place], role=Role.FORWARD)
    return replace(program, steps=(*program.steps[:place], step, *program.steps[place + 1 :]))


def another_operand(program: Program) -> Program:
    place = next(k for k, step in enumerate(program.steps) if len(set(step.reads)) > 1)
    step = program.steps[place]
    wrong = replace(step, reads=(step.reads[1], *step.reads[1:]))
    return replace(program, steps=(*program.steps[:place], wrong, *program.steps[place + 1 :]))


def forgets_what_repeats(program: Program) -> Program:
    return replace(program, repeated=frozenset(list(program.repeated)[1:]))


def returns_a_recomputed_loss(program: Program) -> Program:
    (kept,) = program.layout.graph.kept_outputs
    return replace(program, first={**program.first, kept: len(program.version_of) - 1})


def test_a_program_of_a_plan_passes(program: Program) -> None:
    assert verify(program) is program


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (first_removed, "is made by an op, and no step"),
        (recomputation_removed, "is made by an op, and no step"),
        (backward_moved_ahead, "before it is made"),
        (backward_twice, "runs twice"),
        (another_role, "is called forward, and it is recompute"),
        (another_operand, "reads other values than its op"),
        (forgets_what_repeats, "what runs more than once is noted otherwise"),
        (returns_a_recomputed_loss, "is returned by the forward, and made later"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_each_mistake_is_named(program: Program, breaks: Callable[[Program], Program], says: str) -> None:
    with pytest.raises(InvalidSchedule, match=says):
        verify(breaks(program))


def test_lowering_asks_for_it(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = forgets_what_repeats(program)
    with pytest.raises(InvalidSchedule):
        lower(broken)
    monkeypatch.delenv("FXREMAT_VERIFY")
    lower(broken)
