"""Models that read a number from their data and compute with it: the plan holds for every number.

Only a size that depends on data is refused (tests/runtime/test_advice.py).
"""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks.meter import peak_bytes
from fxremat.settings import Search
from fxremat.torch_private import torch_release
from tests.steps import differences, step_of

pytestmark = pytest.mark.usefixtures("torch_ready")

QUICK: Any = {"search": Search(seconds=0.0, slots=100)}


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(4)]
        self.layers = nn.Sequential(*layers)


class Checked(Deep):
    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        torch._check(at.max().item() <= x.shape[0])
        return self.layers(x).square().mean()


class Factor(Deep):
    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return self.layers((self.layers(x) * (at.item() + 1)).sin()).square().mean()


class Largest(Deep):
    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return self.layers((self.layers(x) * x.detach().abs().max().item()).sin()).square().mean() * at


class Count(Deep):
    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return self.layers(self.layers(x)).square().sum() / max(at.sum().item(), 1)


class Row(Deep):
    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        number = at.item()
        torch._check(number >= 0)
        torch._check(number < x.shape[0])
        hidden = self.layers(x)
        return self.layers(hidden[number].sin() + hidden).square().mean()


class Rolled(Deep):
    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return self.layers(torch.roll(self.layers(x), at.item(), 0)).square().mean()


class Filled(Deep):
    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        scale = torch.full(x.shape, at.item(), dtype=x.dtype)
        return self.layers((self.layers(x) * scale).sin()).square().mean()


class Returned(Deep):
    def forward(self, x: Tensor, at: Tensor) -> tuple[Tensor, int]:
        number = at.item()
        return self.layers((self.layers(x) * number).sin()).square().mean(), number


MODELS = (Checked, Factor, Largest, Count, Row, Rolled, Filled, Returned)
CASES = [*((kind, "measure") for kind in MODELS), (Filled, "estimate"), (Rolled, "estimate")]
EVERYDAY = [(Returned, "measure"), (Rolled, "estimate")]


@pytest.mark.parametrize(
    ("kind", "cost"),
    [pytest.param(*case, marks=[] if case in EVERYDAY else pytest.mark.long) for case in CASES],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_number_of_the_data_changes_no_bit_and_no_budget(kind: type[Deep], cost: Any) -> None:
    torch.manual_seed(0)
    plain = kind()
    state = plain.state_dict()
    x = torch.randn(64, 16)

    def loss_of(outputs: Any) -> Tensor:
        return outputs[0] if isinstance(outputs, tuple) else outputs

    def trained(mem: int | str) -> fxremat.Plan:
        model = kind()
        model.load_state_dict(state)
        compiled = fxremat.compile(model, mem, costs=cost, **QUICK)
        for number in (2, 5):
            at = torch.tensor(number)
            ours = step_of(compiled, lambda at=at: compiled(x, at), loss_of)
            assert differences(ours, step_of(plain, lambda at=at: plain(x, at), loss_of)) == []
            compiled.zero_grad(set_to_none=True)
            assert peak_bytes(lambda at=at: loss_of(compiled(x, at)).backward()) <= compiled.plan.budget
        assert len(compiled.fxremat.plans) == 1
        return compiled.plan

    everything = trained("100%")
    least = everything.minimum + (everything.keep_all_peak - everything.minimum) // 10
    assert trained(least).predicted_peak < everything.predicted_peak


class Asserting(Deep):
    """Checks its data first, and returns its loss, its logits, and a state that nothing reads."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        torch._check(torch.all(x < 5).item())
        hidden = self.layers(x)
        made = self.layers(hidden)
        return made.square().mean(), made, hidden.tanh()


@pytest.mark.parametrize("options", [{}, {"dynamic": True}], ids=["each size", "dynamic"])
def test_a_check_of_the_data_stays_in_steps_captured_again(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = Asserting()
    compiled = fxremat.compile(copy.deepcopy(plain), "100%", **QUICK, **options)

    def step(model: nn.Module, x: Tensor, retain: bool) -> Any:
        def loss_of(outputs: tuple[Tensor, ...]) -> Tensor:
            if retain:
                outputs[0].backward(retain_graph=True)
            return outputs[0]

        return step_of(model, lambda: model(x), loss_of)

    # from the second step on without a gradient of the state
    for rows, retain in ((8, False), (8, False), (8, True), (12, False), (8, False)):
        x = torch.rand(rows, 16)
        assert differences(step(compiled, x, retain), step(plain, x, retain)) == []
        if torch_release() < (2, 13):
            continue  # torch 2.11's AOTAutograd drops the check
        with pytest.raises(RuntimeError, match="assertion failed") as failed:
            compiled(x + 5)
        (note,) = failed.value.__notes__
        assert "test_numbers.py" in note


class Finding(Deep):
    """Looks for NaN and infinity in a number that it reads from its data."""

    def __init__(self, finds: Callable[[float], bool]) -> None:
        super().__init__()
        self.finds = finds

    def forward(self, x: Tensor) -> Tensor:
        if self.finds(x.abs().mean().item()):
            raise ValueError("not finite")
        return self.layers(x).square().mean()


FINDS: list[tuple[Callable[[float], bool], float, str]] = [
    (lambda number: number != number, math.nan, "unequal"),
    (lambda number: number - number != 0, math.nan, "difference"),
    (lambda number: not number <= number, math.nan, "at most"),
    (lambda number: number == math.inf, math.inf, "infinite"),
    (lambda number: not number > -math.inf, math.nan, "above minus infinity"),
    (lambda number: max(-math.inf, number) == math.inf, math.inf, "largest"),
]


@pytest.mark.parametrize(
    ("finds", "bad"),
    [
        pytest.param(finds, bad, id=name, marks=[] if name in ("unequal", "at most") else pytest.mark.long)
        for finds, bad, name in FINDS
    ],
)
def test_what_holds_for_real_numbers_only_is_computed_by_python(finds: Callable[[float], bool], bad: float) -> None:
    torch.manual_seed(0)
    plain = Finding(finds)
    compiled = fxremat.compile(copy.deepcopy(plain), "100%", **QUICK)

    def step(model: nn.Module, value: float) -> Any:
        return step_of(model, lambda: model(torch.full((8, 16), value)), lambda loss: loss)

    for value in (1.0, 2.0):
        assert differences(step(compiled, value), step(plain, value)) == []
        with pytest.raises(ValueError, match="not finite"):
            compiled(torch.full((8, 16), bad))


class Cells(Deep):
    """Leaves out the cells of a table that pairs of numbers name, each of them a tensor (transformers' Udop)."""

    def forward(self, x: Tensor, pairs: Tensor) -> Tensor:
        mask = torch.ones(x.shape, dtype=torch.bool)
        rows, columns = zip(*pairs, strict=True)
        mask[rows, columns] = False
        return (self.layers(x) * mask).square().mean()


def test_an_op_that_no_trace_can_compute_is_left_to_python() -> None:
    torch.manual_seed(0)
    plain = Cells()
    compiled = fxremat.compile(copy.deepcopy(plain), "100%", **QUICK)
    x = torch.randn(8, 16)
    for place in range(3):
        pairs = torch.tensor([[0, place], [place, 3]])
        steps = [step_of(model, lambda m=model, at=pairs: m(x, at), lambda loss: loss) for model in (compiled, plain)]
        assert differences(*steps) == []


@pytest.mark.parametrize("broken", [False, True], ids=["one graph", "several"])
def test_a_forward_that_raises_keeps_nothing_alive(broken: bool) -> None:
    class Indexing(Deep):
        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            hidden = self.layers(x)
            if broken:
                torch._dynamo.graph_break()
            return hidden[at].sum()

    compiled: Any = fxremat.compile(Indexing(), "100%", **QUICK)
    x, at = torch.randn(64, 16), torch.arange(64)
    for _ in range(3):
        compiled(x, at).backward()
    gc.collect()
    gc.disable()
    try:
        given = x.clone()
        alive = weakref.ref(given)
        with contextlib.suppress(IndexError):
            compiled(given, at + 1)
        del given
        assert alive() is None
    finally:
        gc.enable()


class Queue(nn.Module):
    """Writes each batch into a buffer at a place that another buffer holds, as momentum contrast does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 5))
        self.register_buffer("kept", torch.zeros(5, 64))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        made = self.layers(x)
        loss = torch.cat([made, made @ self.kept.clone()], 1).logsumexp(1).mean()
        begin = int(self.place)
        with torch.no_grad():
            self.kept[:, begin : begin + 4] = made[:4].T
            self.place[0] = (begin + 4) % 64
        return loss


@pytest.mark.skipif(torch_release() < (2, 13), reason="torch 2.11 does not trace a slice between numbers of the data")
def test_a_place_that_is_written_to_may_be_a_number_of_the_data() -> None:
    torch.manual_seed(0)
    plain = Queue()
    model = copy.deepcopy(plain)
    compiled = fxremat.compile(model, mem="100%", search=Search(seconds=0.0))
    for seed in range(3):
        for network in (plain, compiled):
            network.zero_grad()
            network(torch.full((8, 16), 0.1 * seed)).backward()
        for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
        for name, buffer in plain.named_buffers():
            assert torch.equal(buffer, compiled.get_buffer(name)), name
