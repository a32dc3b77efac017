"""Models of the library `transformers`: which are captured, what the least and half of the memory cost, same numbers.

    python -m benchmarks.libraries --models gpt2,llama

Each model runs in a process of its own with one thread; plain and planned steps take turns, and the least process CPU
time of `--steps` rounds counts. Writes benchmarks/results/libraries.json and the table in docs/models.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import fxremat
from fxremat.settings import Search

from . import meter, models_page, report
from .models import libraries
from .models.libraries import LibraryCase
from .readme import RESULTS

RECORD = RESULTS / "libraries.json"
PERCENT = 50


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One model inside one budget."""

    mem: int
    measured_peak: int
    predicted_peak: int
    different: list[str]  # what is not bit for bit as in the plain model
    seconds: float | None = None  # of a step; not taken at the least budget
    plain_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    model: str
    kind: str  # the class of the library
    note: str
    plain_peak: int
    refused: str | None = None  # the error
    least: Measured | None = None
    half: Measured | None = None  # None where half is less than the least


def measure(case: LibraryCase, steps: int) -> Row:
    """Capture one model, train it at its least budget and at half of its plain peak. Set one thread first."""
    plain, batch = case.model(), case.batch()
    kind, plain_peak = type(plain).__name__, _peak(plain, batch)
    half, refused = None, None
    try:
        ours = _planned(case, plain_peak * PERCENT // 100)
        minimum = ours.plan.minimum
        half = _measured(case, ours, steps)
    except fxremat.BudgetTooSmall as error:
        minimum = error.minimum
    except fxremat.CaptureError as error:
        refused = _brief(error)
    return Row(
        model=case.name,
        kind=kind,
        note=case.note,
        plain_peak=plain_peak,
        refused=refused,
        least=None if refused else _measured(case, _planned(case, minimum), steps=0),
        half=half,
    )


def _planned(case: LibraryCase, mem: int) -> Any:
    torch._dynamo.reset()
    return fxremat.compile(case.model(), mem=mem, example_inputs=case.batch(), search=Search(progress=False))


def _measured(case: LibraryCase, ours: Any, steps: int) -> Measured:
    batch, plain = case.batch(), case.model()
    got, expected = _outcome(ours, batch), _outcome(plain, batch)
    seconds: list[float | None] = [None, None]
    if steps:
        seconds = [*meter.step_times([_step(plain, batch), _step(ours, batch)], repeats=steps)]
    return Measured(
        mem=ours.plan.budget,
        measured_peak=_peak(ours, batch),
        predicted_peak=ours.plan.predicted_peak,
        different=[name for name in expected if not _same(got[name], expected[name])],
        plain_seconds=seconds[0],
        seconds=seconds[1],
    )


def _step(model: nn.Module, batch: Mapping[str, Any]) -> meter.Step:
    """A step from gradients of None; it returns all that the model does, as a training loop would hold it."""

    def step() -> object:
        model.zero_grad(set_to_none=True)
        outputs = model(**batch)
        outputs.loss.backward()
        return outputs

    return step


def _peak(model: nn.Module, batch: Mapping[str, Any]) -> int:
    step = _step(model, batch)
    step()
    model.zero_grad(set_to_none=True)
    peak = meter.peak_bytes(step)
    model.zero_grad(set_to_none=True)
    return peak


def _outcome(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """Return the outputs of one step from a fixed seed, and all that it leaves behind."""
    torch.manual_seed(7)
    outputs = _step(model, batch)()
    assert isinstance(outputs, Mapping)
    tensors = [leaf.detach() for leaf in tree_leaves(dict(outputs)) if isinstance(leaf, Tensor)]
    return {
        **{f"output {i}": tensor for i, tensor in enumerate(tensors)},
        **{f"gradient of {name}": value.grad for name, value in model.named_parameters()},
        **{f"buffer {name}": value.clone() for name, value in model.named_buffers()},
        "random state": torch.get_rng_state(),
    }


def _same(ours: Tensor | None, plain: Tensor | None) -> bool:
    return ours is plain if ours is None or plain is None else torch.equal(ours, plain)


def _brief(error: Exception) -> str:
    """The message, without the way to the library's files."""
    place = Path(transformers.__file__).parent.parent
    return str(error).replace(f"{place}/", "")


def main() -> None:
    arguments = _parse()
    if arguments.worker:
        torch.set_num_threads(1)
        print(json.dumps(asdict(measure(libraries.get(arguments.models), arguments.steps))))
        return
    record = _record(arguments)
    for name in arguments.models.split(","):
        row = _in_a_process(name, arguments)
        record["rows"][name] = row
        print(models_page.line(row), flush=True)
        RECORD.write_text(json.dumps(record, indent=1) + "\n")
    models_page.main()


def _record(arguments: argparse.Namespace) -> dict[str, Any]:
    """The rows of earlier runs are kept, so that some models can be measured anew."""
    rows = json.loads(RECORD.read_text())["rows"] if RECORD.exists() else {}
    conditions = {
        **report.machine(),
        "transformers": transformers.__version__,
        "threads": 1,
        "clock": "process CPU time, least of",
        "steps": arguments.steps,
        "percent": PERCENT,
    }
    known = (*libraries.CAPTURED, *libraries.REFUSED)
    return {"conditions": conditions, "rows": {name: rows[name] for name in known if name in rows}}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", default=",".join((*libraries.CAPTURED, *libraries.REFUSED)))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _in_a_process(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [
        *(sys.executable, "-m", "benchmarks.libraries", "--worker"),
        *("--models", name, "--steps", str(arguments.steps)),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    if done.returncode != 0:
        raise SystemExit(f"benchmarks.libraries: the process for {name} failed")
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


if __name__ == "__main__":
    main()
