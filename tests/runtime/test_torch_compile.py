"""Models that users give to `torch.compile` itself: the graphs of a call share one budget."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks.meter import peak_bytes
from fxremat import Slices
from fxremat.plan_of_graphs import PlanOfGraphs
from fxremat.planning import surveys
from fxremat.runtime import torch_compile
from fxremat.runtime.called_graph import current
from fxremat.torch_private import is_profiled
from tests.runtime.test_several_graphs import (
    QUICK,
    Block,
    Broken,
    as_it_is,
    clamped,
    early,
    nothing_is_saved,
    peak_of,
    rows,
    selected,
)
from tests.steps import differences, step_of

pytestmark = pytest.mark.usefixtures("torch_ready")


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    """Let dynamo forget the functions of other tests: it compiles each only so many times."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def twins(model: nn.Module, mem: object, **options: Any) -> tuple[Any, nn.Module, nn.Module]:
    """A compiled model, the model in it, and an equal plain one."""
    plain = copy.deepcopy(model)
    given = {"mem": mem, "search": QUICK, **options}
    return torch.compile(model, backend="fxremat", options=given), model, plain


def assert_equal_steps(ours: Any, model: nn.Module, plain: nn.Module, x: Tensor) -> None:
    found = step_of(model, lambda: ours(x), lambda loss: loss)
    assert differences(found, step_of(plain, lambda: plain(x), lambda loss: loss)) == []


def plans() -> list[PlanOfGraphs]:
    """The plans of functions that are several graphs."""
    gc.collect()
    found = [graphs.coordinator.plan for graphs in torch_compile._known.values() if graphs.coordinator]
    return [plan for plan in found if plan]


EVERY_DAY = {("min", as_it_is), ("95%", early), ("95%", selected)}
CASES = [
    pytest.param(*case, marks=() if case in EVERY_DAY else pytest.mark.long)
    for case in itertools.product(("95%", "min"), (as_it_is, early, clamped, selected))
]


@pytest.mark.parametrize(("mem", "between"), CASES)
def test_the_graphs_of_a_model_share_one_budget(mem: str, between: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    ours, model, plain = twins(Broken(between), mem)
    for seed in range(5):
        assert_equal_steps(ours, model, plain, rows(seed=seed))
    measured = peak_of(ours, rows(seed=4))
    (plan,) = plans()
    assert {"blocks.0", "blocks.1"} <= {call.name for call in plan.calls}
    assert measured <= plan.budget
    assert nothing_is_saved()


def test_a_break_in_the_middle_of_a_function() -> None:
    torch.manual_seed(0)
    block, head = Block(), nn.Linear(32, 8)

    def loss(x: Tensor) -> Tensor:
        x = block(x)
        torch._dynamo.graph_break()
        return head(x).square().mean()

    compiled = torch.compile(loss, backend="fxremat", options={"mem": "min", "search": QUICK})
    both = nn.ModuleList([block, head])
    for seed in range(3):
        x = rows(seed=seed)
        expected = step_of(both, lambda x=x: loss(x), lambda loss: loss)
        assert differences(step_of(both, lambda x=x: compiled(x), lambda loss: loss), expected) == []
    (plan,) = plans()
    assert "test_torch_compile.py" in plan.broken_at
    assert len(plan.calls) == 2


def test_a_model_that_is_one_graph_is_planned_as_one() -> None:
    ours, model, plain = twins(nn.Sequential(Block(), Block()), "100%")

    def step(called: Any, of: nn.Module) -> Any:
        return step_of(of, lambda: called(rows()), lambda y: y.square().mean())

    assert differences(step(ours, model), step(plain, plain)) == []
    assert plans() == []


def test_a_container_whose_parts_are_captured_one_by_one() -> None:
    torch.manual_seed(0)
    ours, model, plain = twins(nn.Sequential(Broken(as_it_is)), "min")
    for seed in range(3):
        assert_equal_steps(ours, model, plain, rows(seed=seed))
    (plan,) = plans()
    assert peak_of(ours, rows()) <= plan.budget


def test_graphs_of_hooks_share_the_budget() -> None:
    torch.manual_seed(0)
    model = Block()
    model.register_forward_hook(lambda _module, _args, y: y.square().mean())
    ours, inner, plain = twins(model, "100%")
    for _ in range(3):
        assert_equal_steps(ours, inner, plain, rows())
    (plan,) = plans()
    assert len(plan.calls) == 2


def test_what_needs_one_graph_is_refused_by_name() -> None:
    """A part alone may be planned; a second would take the budget again."""
    ours, _, _ = twins(nn.Sequential(Broken(as_it_is, blocks=2)), "100%", slices=Slices(drop_outputs=True))
    with pytest.raises(Exception, match=r"captured parts of it, and a call runs several.*slices=.*True\) needs one"):
        ours(rows())
    block = Block()

    def loss(x: Tensor) -> Tensor:
        return [block(x)][0].square().mean()

    skipped = torch.compiler.disable(loss, recursive=False)
    compiled = torch.compile(lambda x: skipped(x), backend="fxremat", options={"mem": "100%", "slices": True})
    compiled(rows()).backward()
    assert block.up.weight.grad is not None


def test_a_budget_that_is_too_small_is_said_by_the_first_graph() -> None:
    ours, model, _ = twins(Broken(as_it_is), "10%")
    for _ in range(2):
        ours(rows()).backward()
    before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    for _ in range(2):
        with pytest.raises(Exception, match="no schedule fits in 10%"):
            ours(rows())
    assert all(map(torch.equal, before, (p.grad for p in model.parameters())))
    assert current.runner is None


def test_an_error_inside_of_a_call_and_a_good_step_after_it() -> None:
    fails = [False]

    def between(number: int, x: Tensor) -> Tensor:
        if number == 1 and fails[0]:
            raise ValueError("in the middle")
        return x

    torch.manual_seed(0)
    ours, model, plain = twins(Broken(between), "95%")
    assert_equal_steps(ours, model, plain, rows())
    fails[0] = True
    with pytest.raises(ValueError, match="in the middle"):
        ours(rows())
    assert current.runner is None
    assert nothing_is_saved()
    fails[0] = False
    assert_equal_steps(ours, model, plain, rows())


def test_evaluation_between_forward_and_backward() -> None:
    torch.manual_seed(0)
    ours, model, plain = twins(Broken(as_it_is), "95%")

    def step(called: Any, of: nn.Module) -> Any:
        def forward() -> Tensor:
            loss: Tensor = called(rows())
            assert not is_profiled()
            of.eval()
            with torch.no_grad():
                called(rows(seed=1))
            of.train()
            return loss

        return step_of(of, forward, lambda loss: loss)

    for _ in range(3):
        assert differences(step(ours, model), step(plain, plain)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [(None, "needs a budget: "), ({"memm": "70%"}, "unknown option 'memm', did you mean 'mem'"),
     ({"mem": "70%", "effort": 3}, "the option effort has a new form")],
)  # fmt: skip
def test_options_are_checked_by_name(options: dict[str, Any] | None, message: str) -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="fxremat", options=options)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
        compiled(torch.ones(1, 2))


def test_a_saved_plan_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(32, 32), nn.GELU())))
    planned: Any = fxremat.compile(copy.deepcopy(plain), mem="60%", example_inputs=(rows(),))
    planned.plan.save(tmp_path / "plan.json")
    monkeypatch.setattr(surveys, "survey", None)
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path))
    model = copy.deepcopy(plain)
    ours: Any = torch.compile(model, backend="fxremat", options={"plan": tmp_path / "plan.json"})

    def step(of: nn.Module, call: Callable[..., Any]) -> Any:
        return step_of(of, lambda: call(rows()), lambda out: out.square().mean())

    assert differences(step(model, ours), step(plain, plain)) == []


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, pytest.param(torch.optim.AdamW, marks=pytest.mark.long)])
def test_a_whole_training_step_is_within_the_budget_and_nothing_of_its_backward_is_traced(
    optimizer: type[torch.optim.Optimizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """AOTAutograd would make new parameters and states beside the old ones."""
    traced: list[str] = []
    compile_frame: Any = torch._dynamo.convert_frame._compile

    def noted(code: Any, *arguments: Any, **named: Any) -> Any:
        traced.append(code.co_filename)
        return compile_frame(code, *arguments, **named)

    monkeypatch.setattr(torch._dynamo.convert_frame, "_compile", noted)
    torch.manual_seed(0)
    plain = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(48, 192), nn.GELU(), nn.Linear(192, 48))))
    ours = copy.deepcopy(plain)
    named: dict[str, Any] = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
    optimizers = {model: optimizer(model.parameters(), lr=0.01, **named) for model in (plain, ours)}

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizers[model].step()
        optimizers[model].zero_grad()
        return loss.detach()

    mem, x = 700_000, torch.randn(128, 48)
    compiled = torch.compile(step, backend="fxremat", options={"mem": mem, "search": QUICK})
    expected = torch.compile(step, backend="aot_eager")  # which computes AdamW in another order than plain PyTorch
    for _ in range(5):
        compiled(ours, x)
        expected(plain, x)
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert peak_bytes(lambda: compiled(ours, x)) <= mem
    assert peak_bytes(lambda: step(plain, x)) > 1.3 * mem
    assert not [name for name in traced if name.startswith(str(Path(fxremat.__file__).parent))]
