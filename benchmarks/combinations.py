"""Every pair of features of fxremat, trained with on one small GPT beside the same loop in plain PyTorch.

    python -m benchmarks.combinations                        trains, and writes benchmarks/results/combinations.json
    python -m benchmarks.combinations offload+slices         trains with this pair alone; other records stay as they are
    python -m benchmarks.readme                              puts the table into docs/combinations.md

A cell trains `STEPS` steps with both features, and says

    bits         every loss, and every parameter afterwards, is that of plain PyTorch
    rounding     the parameters are off by a share of their largest update, as with compiled kernels and slices
    refused      fxremat has said in one line that the two do not go together
    wrong        the parameters are off by more than `TOLERANCE`, or the step took more than the budget
    broken       another exception was raised

On the diagonal are the features alone.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import json
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from fxremat.settings import Offload, Search

from . import meter

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "combinations.json"
STEPS = 3
FEATURES: Mapping[str, str] = {
    "dynamic": "dynamic=True, and sequences of two lengths",
    "inductor": 'backend="inductor"',
    "offload": "offload=True",
    "hosted": "Offload(weights=True), with updates=\"step\" where all gradients are needed at once",
    "slices": "slices=True",
    "accumulation": "gradients of two batches are added up",
    "clipping": "clip_grad_norm_ of all gradients",
    "scaler": "torch.amp.GradScaler",
    "break": "a forward that torch.compile breaks into two graphs",
    "autocast": "torch.autocast in bfloat16",
    "outside": "a loss outside of the model",
}
AT_ONCE = {"accumulation", "clipping", "scaler"}  # these need all gradients at once
INEXACT = {"inductor", "slices"}  # gradients are equal up to rounding
TOLERANCE = {False: 1e-3, True: 0.2}  # off by this share of the largest update at most; True: in bfloat16
WORDS, WIDTH, DEPTH, LENGTH = 96, 48, 3, 40


@dataclass(frozen=True)
class Cell:
    """The result of training with one feature or two."""

    features: tuple[str, ...]
    outcome: str  # bits, rounding, refused, wrong or broken
    off: float = 0.0  # the largest difference of a parameter, over the largest update of its parameter
    peak: float | None = None  # of the measured step, over the budget
    why: str = ""  # the message, where there is one
    seconds: float = 0.0  # of the clock


class Block(nn.Module):
    """A residual MLP with dropout behind attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        """Return (batch, length, width) for (batch, length, width)."""
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """A language model that returns its loss, or its logits where the loss is outside."""

    def __init__(self, features: Sequence[str]) -> None:
        super().__init__()
        self.outside, self.breaks = "outside" in features, "break" in features
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of predicting each of `tokens` (batch, length) from those before, or all logits."""
        x = self.words(tokens)
        x = self.blocks[0](x)
        if self.breaks:
            torch._dynamo.graph_break()
        for block in self.blocks[1:]:
            x = block(x)
        logits = self.head(x)
        return logits if self.outside else loss_of(logits, tokens)


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean cross entropy of the logits (batch, length, words) with the next tokens."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def options_of(features: Sequence[str], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the options of `fxremat.compile` for these features."""
    options: dict[str, Any] = {"mem": "70%", "search": Search(seconds=0.3, progress=False)}
    if "dynamic" in features:
        options["dynamic"] = True
    if "inductor" in features:
        options["backend"] = "inductor"
    if "offload" in features:
        options["offload"] = True
    if "slices" in features:
        options["slices"] = True
    if "hosted" in features:
        updates = "step" if AT_ONCE.intersection(features) else "backward"
        options["offload"] = Offload(weights=True, activations="offload" in features, updates=updates)
        options["optimizer"] = optimizer
    return options


def batches(features: Sequence[str], seed: int = 1) -> list[Tensor]:
    """Return the token ids (batch, length) of all micro-batches, in order."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [LENGTH, LENGTH + 8] if "dynamic" in features else [LENGTH]
    count = STEPS * micro(features)
    sizes = itertools.islice(itertools.cycle(lengths), count)
    return [torch.randint(0, WORDS, (4, length), generator=generator) for length in sizes]


def micro(features: Sequence[str]) -> int:
    """Return the number of batches whose gradients are added up for a step."""
    return 2 if {"accumulation", "no_sync"}.intersection(features) else 1


def forward_and_loss(model: nn.Module, tokens: Tensor, features: Sequence[str]) -> Tensor:
    """Return the loss, under autocast if that is among the features."""
    with torch.autocast("cpu", torch.bfloat16) if "autocast" in features else contextlib.nullcontext():
        result: Tensor = model(tokens)
    return loss_of(result, tokens) if "outside" in features else result


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, features: Sequence[str], seed: int = 1
) -> list[float]:
    """Train `STEPS` steps; return the losses."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled="scaler" in features)
    given, losses = iter(batches(features, seed)), list[float]()
    torch.manual_seed(seed)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for following in reversed(range(micro(features))):
            with _without_reducing(model) if following and "no_sync" in features else contextlib.nullcontext():
                loss = forward_and_loss(model, next(given), features)
                scaler.scale(loss).backward()
            losses.append(float(loss.detach()))
        if "clipping" in features:
            scaler.unscale_(optimizer)
            clip(list(model.parameters()), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return losses


def trained(features: tuple[str, ...]) -> Cell:
    """Train with these features, and beside them plainly."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    start = GPT(features)
    return compared(features, copy.deepcopy(start), start)


def compared(
    features: tuple[str, ...],
    plain: nn.Module,
    ours: nn.Module,
    seed: int = 1,
    around: Callable[[nn.Module], nn.Module] = lambda compiled: compiled,
) -> Cell:
    """Train `plain` as it is and `ours`, of equal parameters, through fxremat; return how the second differs.

    Args:
        around: what wraps the compiled model.
    """
    began = time.monotonic()
    start = [local(parameter).clone() for parameter in plain.parameters()]
    theirs, mine = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, ours))
    wanted = train(plain, theirs, features, seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compiled = fxremat.compile(ours, **options_of(features, mine))
            model = around(compiled)
            losses = train(model, mine, features, seed)
            pairs_of = zip(map(local, ours.parameters()), map(local, plain.parameters()), start, strict=True)
            off = max(off_by(*each) for each in pairs_of)
            used = _used(compiled, model, mine, features)
    except fxremat.FxrematError as error:
        return Cell(features, "refused", why=line_of(error), seconds=time.monotonic() - began)
    except Exception as error:
        return Cell(features, "broken", why=line_of(error), seconds=time.monotonic() - began)
    exact = losses == wanted and off == 0
    within = off <= TOLERANCE["autocast" in features] and (INEXACT.intersection(features) or exact)
    outcome = "bits" if exact else "rounding" if within else "wrong"
    if used > 1:
        outcome = "wrong"
    return Cell(features, outcome, off, used, seconds=time.monotonic() - began)


def clip(parameters: Sequence[nn.Parameter], most: float) -> None:
    """Scale gradients so that their norm is at most `most`, as `clip_grad_norm_`, which takes tensors of one kind."""
    kinds: dict[bool, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(_is_distributed(parameter), []).append(parameter)
    norms = [nn.utils.get_total_norm([p.grad for p in kind if p.grad is not None]) for kind in kinds.values()]
    whole = [norm.full_tensor() if _is_distributed(norm) else norm for norm in norms]  # type: ignore[attr-defined]
    norm = whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))
    for kind in kinds.values():
        nn.utils.clip_grads_with_norm_(kind, most, norm)


def _is_distributed(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def local(tensor: Any) -> Tensor:
    """Return what this rank has of a tensor."""
    part: Tensor = tensor.detach()
    return part.to_local() if _is_distributed(part) else part  # type: ignore[attr-defined]


@contextlib.contextmanager
def _without_reducing(model: Any) -> Iterator[None]:
    """Within this context, gradients are not reduced over ranks, where the model does so."""
    if hasattr(model, "no_sync"):
        with model.no_sync():
            yield
    elif hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        yield


def off_by(ours: Tensor, plain: Tensor, start: Tensor) -> float:
    """Return the largest difference of two parameters over the largest update; the difference where there is none."""
    difference, update = (float((a - b).detach().abs().max()) for a, b in ((ours, plain), (plain, start)))
    return difference / update if update > 0 else difference


def _used(compiled: Any, model: nn.Module, optimizer: torch.optim.Optimizer, features: Sequence[str]) -> float:
    """Return the measured peak of a step over the budget."""
    tokens = batches(features)[-1]
    optimizer.zero_grad()
    held = _held(compiled, optimizer) if "hosted" in features else 0
    peak = meter.peak_bytes(lambda: forward_and_loss(model, tokens, features).backward())
    return (peak + held) / float(compiled.plan.budget)


def _held(model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameters and optimizer state that live on the device."""
    homes = model._fxremat.backend.weights._homes
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [t for p in parameters for t in optimizer.state[p].values() if isinstance(t, Tensor) and t.dim()]
    return sum(t.nbytes for t in (*parameters, *states) if t.data_ptr() not in homes)


def line_of(error: Exception) -> str:
    """Return the class and the first line of an error, without the path of this checkout."""
    line = next(iter(str(error).splitlines()), "").replace(f"{ROOT}/", "")
    return f"{type(error).__name__}: {line}"


def pairs() -> Iterator[tuple[str, ...]]:
    """Yield each feature alone, and each pair."""
    for place, first in enumerate(FEATURES):
        yield (first,)
        for second in list(FEATURES)[place + 1 :]:
            yield first, second


def page(record: str) -> str:
    """Return the table of a record as Markdown, with the reasons of what is refused below it."""
    found = json.loads(record)
    cells = {frozenset(cell["features"]): cell for cell in found["cells"]}
    names = list(FEATURES)
    lines = [f"| | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for row in names:
        row_of = [shown(cells.get(frozenset({row, column}))) for column in names]
        lines.append(f"| **{row}** | {' | '.join(row_of)} |")
    lines += ["", summary(found), "", *(f"* **{name}**: {what}." for name, what in FEATURES.items())]
    return "\n".join([*lines, *reasons(found)])


def summary(record: Mapping[str, Any]) -> str:
    """Return a sentence that counts the outcomes of a record."""
    outcomes = [cell["outcome"] for cell in record["cells"]]
    counts = {kind: outcomes.count(kind) for kind in ("bits", "rounding", "refused")}
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    begun, ended = record.get("begun", record["date"]), record["date"]
    when = f"on {ended}" if begun == ended else f"from {begun} to {ended}"
    return f"{len(record['cells'])} cells: {told}. Measured {when} with torch {record['torch']}."


def reasons(record: Mapping[str, Any]) -> list[str]:
    """Return lines with the words of each cell that does not train."""
    cells = [cell for cell in record["cells"] if cell["outcome"] not in ("bits", "rounding")]
    lines = ["", "What is refused, and with which words:", ""] if cells else []
    return lines + [f"* {' and '.join(cell['features'])}: `{cell['why'].partition(': ')[2]}`" for cell in cells]


def shown(cell: Mapping[str, Any] | None) -> str:
    """Return the outcome of a cell for a table, in capitals where it is a defect."""
    if cell is None:
        return ""
    return {"bits": "bits", "rounding": "rounding", "refused": "refused"}.get(cell["outcome"], cell["outcome"].upper())


def tell(cell: Cell) -> None:
    """Print a cell."""
    used = "" if cell.peak is None else f", peak {cell.peak:.3f} of mem"
    seconds = f"{cell.seconds:.1f} s"
    print(f"{' + '.join(cell.features):28} {cell.outcome:9} off {cell.off:.1e}{used}, {seconds}  {cell.why}")
    sys.stdout.flush()


def write(path: Path, cells: Sequence[Cell], order: Iterable[tuple[str, ...]], *, kept: bool) -> None:
    """Write cells as a record; with `kept`, those that were not measured are taken from the earlier record."""
    before = json.loads(path.read_text()) if kept and path.exists() else {"cells": []}
    found = {tuple(cell["features"]): cell for cell in (*before["cells"], *map(asdict, cells))}
    today = time.strftime("%Y-%m-%d")
    record = {
        "begun": before.get("begun", before.get("date", today)),
        "date": today,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cells": [found[features] for features in order if features in found],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    """Train with the pairs of the command line, or with all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", nargs="*", help=f"one or two of {', '.join(FEATURES)}, joined by +")
    given = [tuple(text.split("+")) for text in parser.parse_args().pair]
    if unknown := sorted({name for names in given for name in names} - set(FEATURES)):
        parser.error(f"no feature {', '.join(unknown)}; there are {', '.join(FEATURES)}")
    given = [tuple(name for name in FEATURES if name in names) for names in given]
    torch.set_num_threads(1)
    cells = []
    for features in given or pairs():
        cells.append(cell := trained(features))
        tell(cell)
    write(OUT, cells, pairs(), kept=bool(given))


if __name__ == "__main__":
    main()
