"""Train random models in random budgets: numbers are plain PyTorch's, and the measured peak is within the budget.

    python -m benchmarks.fuzz --runs 5000 --seed 1 --processes 2      adds a record to benchmarks/results/fuzz.json
    python -m benchmarks.fuzz --only 7005                              one model again, with what differs

A run is a model and a budget: compiled, then two steps of SGD, of which the second is measured. Models are those of the
random tests (`tests/dags.py`), under autocast or not, with the loss inside or outside of the model, and with offloading
or without; budgets are the least, and random ones up to that of keeping everything. A run is wrong where a number
differs from plain PyTorch's and, if captured graphs compute otherwise (README, Limits), also from those of
`torch.compile(model, backend="aot_eager")` and of the step that keeps everything. It is over where it allocates more
than its budget.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from benchmarks.meter import peak_bytes
from fxremat.settings import Search
from tests.dags import KINDS, WIDTH, Dag, Layer, Recipe, batch

RESULTS = Path(__file__).parent / "results" / "fuzz.json"
BUDGETS = 8  # of each model
STEPS = 2


def _cross_entropy(value: Tensor) -> Tensor:
    return F.cross_entropy(value.float(), torch.arange(len(value)) % WIDTH)


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda value: value.float().pow(2).mean(),
    "cross_entropy": _cross_entropy,
    "transposed": lambda value: (value.t() * torch.arange(1.0, len(value) + 1)).tanh().sum(),
    "mse": lambda value: F.mse_loss(value, torch.zeros_like(value)),
}


@dataclass(frozen=True)
class Case:
    """A random model, and how it is trained."""

    seed: int
    recipe: Recipe
    outside: str  # the loss outside of the model, by name; "": inside
    autocast: bool
    offload: bool
    trained_inputs: bool

    @classmethod
    def of(cls, seed: int) -> Case:
        """Draw a case from a seed: the model, its loss, and how it is trained."""
        chance = random.Random(seed)
        layers = [
            Layer(chance.choice(KINDS), chance.choice((0, 0, chance.randrange(8))), chance.randrange(8))
            for _ in range(chance.randrange(2, 10))
        ]
        outputs = chance.randrange(3)
        recipe = Recipe(tuple(layers), outputs, chance.random() < 0.2, chance.random() < 0.15)
        return cls(
            seed=seed,
            recipe=recipe,
            outside=chance.choice(("", "", *LOSSES)),
            autocast=chance.random() < 0.25,
            offload=chance.random() < 0.2,
            trained_inputs=chance.random() < 0.2,
        )

    def model(self) -> nn.Module:
        """The model, with the same parameters every time."""
        torch.manual_seed(self.seed)
        return (WithoutLoss(self.recipe) if self.outside else Dag(self.recipe)).train()

    def inputs(self, step: int) -> list[Tensor]:
        """The inputs of a step, which want gradients themselves in some cases."""
        return [x.requires_grad_(self.trained_inputs) for x in batch(step)]

    def loss(self, outputs: Any) -> Tensor:
        """The loss of what the model returns."""
        if self.outside:
            values: Sequence[Tensor] = outputs
            return torch.stack([LOSSES[self.outside](value).float() for value in values]).sum()
        loss: Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs
        return loss

    def forward(self, model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
        """The loss of one call."""
        with self.autocasting():
            outputs = model(*inputs)
        return self.loss(outputs)

    def autocasting(self) -> torch.autocast:
        """The context in which the model is called."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.autocast)


class WithoutLoss(Dag):
    """The model without a loss: it returns its latest values, and one that depends on all others."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        loss, values = self._tower(x, y)
        return [*values[len(values) - 1 - self.recipe.outputs :], values[-1] + loss]


@dataclass(frozen=True)
class Run:
    """Result of one budget."""

    seed: int
    budget: int
    peak: int
    differs: tuple[str, ...]  # numbers that are neither plain PyTorch's nor those of a captured graph
    as_captured: bool  # they are those of a captured graph, and not plain PyTorch's

    @property
    def over(self) -> int:
        """Bytes above the budget."""
        return max(0, self.peak - self.budget)


def train(case: Case, model: nn.Module, call: nn.Module | None = None) -> dict[str, Tensor]:
    """Take some steps of SGD; return what they leave behind, by name."""
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs = case.inputs(step)
        loss = case.forward(model if call is None else call, inputs)
        loss.backward()
        found[f"loss {step}"] = loss.detach().clone()
        grads = [*((f"gradient of {n}", p.grad) for n, p in model.named_parameters())]
        grads += [(f"gradient of input {k}", x.grad) for k, x in enumerate(inputs)]
        found |= {f"{name} {step}": g.clone() for name, g in grads if g is not None}
        optimizer.step()
    found |= {name: buffer.clone() for name, buffer in model.named_buffers()}
    found["random state"] = torch.get_rng_state()
    return found


def differences(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[str, ...]:
    """The names of numbers that differ in a bit, or that only one has."""
    names = {**theirs, **ours}
    alike = (n in ours and n in theirs and torch.equal(ours[n].nan_to_num(7), theirs[n].nan_to_num(7)) for n in names)
    return tuple(name for name, same in zip(names, alike, strict=True) if not same)


def runs_of(case: Case) -> Iterator[Run]:
    """All budgets of a case. Raises what fxremat raises, but for a budget that is too small."""
    plain = train(case, case.model())
    references: list[dict[str, Tensor]] = []
    for mem in _budgets(case):
        torch._dynamo.reset()
        model = case.model()
        with case.autocasting():
            compiled = fxremat.compile(model, mem=mem, **_options(case), example_inputs=case.inputs(0))
        found = train(case, compiled)
        differs, as_captured = differences(found, plain), False
        compiled.zero_grad(set_to_none=True)
        inputs = case.inputs(STEPS)
        peak = peak_bytes(lambda inputs=inputs, compiled=compiled: _step(case, compiled, inputs))  # type: ignore[misc]
        assert compiled.plan is not None
        if differs:
            references = references or _captured(case, plain)
            as_captured = any(not differences(found, other) for other in references)
        yield Run(case.seed, compiled.plan.budget, peak, () if as_captured else differs, as_captured)


def _captured(case: Case, plain: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return what captured graphs compute where plain PyTorch does not: with aot_eager, and keeping everything."""
    torch._dynamo.reset()
    model = case.model()
    found = train(case, model, torch.compile(model, backend="aot_eager", fullgraph=True))  # type: ignore[arg-type]
    if not differences(found, plain):
        return [plain]
    torch._dynamo.reset()
    model = case.model()
    return [found, train(case, fxremat.compile(model, mem="100%", **_options(case) | {"solver": "keep_all"}))]


def _step(case: Case, model: nn.Module, inputs: Sequence[Tensor]) -> object:
    loss = case.forward(model, inputs)
    loss.backward()
    return loss


def _options(case: Case) -> dict[str, Any]:
    return {"search": Search(seconds=0.0, slots=100, progress=False), "offload": case.offload}


def _budgets(case: Case) -> list[int]:
    """The least budget, and random ones above it, in bytes."""
    torch._dynamo.reset()
    with case.autocasting():
        plan = fxremat.plan(case.model(), case.inputs(0), mem="100%", **_options(case))
    chance = random.Random(-case.seed)
    least, most = plan.minimum, plan.keep_all_peak
    return [least, *(chance.randrange(least, max(most, least + 1)) for _ in range(BUDGETS - 1))]


def checked(seed: int) -> tuple[int, list[Run], str]:
    """The runs of a seed, and the error that ended them; ""."""
    torch.set_num_threads(1)
    gc.freeze()  # the meter collects garbage before every step: not among all that torch imported
    runs: list[Run] = []
    try:
        runs.extend(runs_of(Case.of(seed)))
    except Exception as error:
        return seed, runs, f"{type(error).__name__}: {error}".splitlines()[0]
    return seed, runs, ""


def main() -> None:
    """Fuzz, and add what was found to the records of other seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", type=int)
    parser.add_argument("--json", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.only is not None:
        print(Case.of(given.only))
        for run in runs_of(Case.of(given.only)):
            print(run)
        return
    began, counts, bad = time.monotonic(), Counter[str](), []
    first = given.seed * 1_000_000
    seeds = range(first, first + -(-given.runs // BUDGETS))
    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn"), max_tasks_per_child=100) as pool:
        for seed, runs, error in pool.map(checked, seeds, chunksize=4):
            counts.update(models=1, runs=len(runs), errors=bool(error))
            counts.update(over=sum(run.over > 0 for run in runs), wrong=sum(bool(run.differs) for run in runs))
            counts.update(as_captured=sum(run.as_captured for run in runs))
            worst = [f"{run}" for run in runs if run.over or run.differs]
            if error or worst:
                bad.append({"seed": seed, "error": error, "runs": worst})
                print(seed, error, *worst, sep="\n  ", flush=True)
            if counts["models"] % 50 == 0:
                print(f"{dict(counts)} after {time.monotonic() - began:.0f} s", flush=True)
    result = {
        "command": f"python -m benchmarks.fuzz --runs {given.runs} --seed {given.seed}",
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        **{name: counts[name] for name in ("models", "runs", "wrong", "over", "errors", "as_captured")},
        "seconds": round(time.monotonic() - began),
        "found": bad,
    }
    earlier = json.loads(given.json.read_text()) if given.json.exists() else []
    others = [record for record in earlier if record["command"] != result["command"]]
    given.json.write_text(json.dumps([*others, result], indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
