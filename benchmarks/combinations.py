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
from collections.abc import Iterator, Mapping, Sequence
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


def batches(features: Sequence[str]) -> list[Tensor]:
    """Return the token ids (batch, length) of all micro-batches, in order."""
    generator = torch.Generator().manual_seed(1)
    lengths = [LENGTH, LENGTH + 8] if "dynamic" in features else [LENGTH]
    count = STEPS * micro(features)
    sizes = itertools.islice(itertools.cycle(lengths), count)
    return [torch.randint(0, WORDS, (4, length), generator=generator) for length in sizes]


def micro(features: Sequence[str]) -> int:
    """Return the number of batches whose gradients are added up for a step."""
    return 2 if "accumulation" in features else 1


def forward_and_loss(model: nn.Module, tokens: Tensor, features: Sequence[str]) -> Tensor:
    """Return the loss, under autocast if that is among the features."""
    with torch.autocast("cpu", torch.bfloat16) if "autocast" in features else contextlib.nullcontext():
        result: Tensor = model(tokens)
    return loss_of(result, tokens) if "outside" in features else result


def train(model: nn.Module, optimizer: torch.optim.Optimizer, features: Sequence[str]) -> list[float]:
    """Train `STEPS` steps; return the losses."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled="scaler" in features)
    given, losses = iter(batches(features)), list[float]()
    torch.manual_seed(0)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(micro(features)):
            loss = forward_and_loss(model, next(given), features)
            scaler.scale(loss).backward()
            losses.append(float(loss.detach()))
        if "clipping" in features:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return losses


def trained(features: tuple[str, ...]) -> Cell:
    """Train with these features, and beside them plainly."""
    began = time.monotonic()
    torch._dynamo.reset()
    torch.manual_seed(0)
    start = GPT(features)
    plain, ours = copy.deepcopy(start), copy.deepcopy(start)
    theirs, mine = (torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, ours))
    wanted = train(plain, theirs, features)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = fxremat.compile(ours, **options_of(features, mine))
            losses = train(model, mine, features)
            pairs_of = zip(ours.parameters(), plain.parameters(), start.parameters(), strict=True)
            off = max(_off(*each) for each in pairs_of)
            used = _used(model, mine, features)
    except fxremat.FxrematError as error:
        return Cell(features, "refused", why=_line(error), seconds=time.monotonic() - began)
    except Exception as error:
        return Cell(features, "broken", why=_line(error), seconds=time.monotonic() - began)
    exact = losses == wanted and off == 0
    within = off <= TOLERANCE["autocast" in features] and (INEXACT.intersection(features) or exact)
    outcome = "bits" if exact else "rounding" if within else "wrong"
    if used > 1:
        outcome = "wrong"
    return Cell(features, outcome, off, used, seconds=time.monotonic() - began)


def _off(ours: Tensor, plain: Tensor, start: Tensor) -> float:
    difference, update = (float((a - b).detach().abs().max()) for a, b in ((ours, plain), (plain, start)))
    return difference / update if update > 0 else difference


def _used(model: Any, optimizer: torch.optim.Optimizer, features: Sequence[str]) -> float:
    """Return the measured peak of a step over the budget."""
    tokens = batches(features)[-1]
    optimizer.zero_grad()
    held = _held(model, optimizer) if "hosted" in features else 0
    peak = meter.peak_bytes(lambda: forward_and_loss(model, tokens, features).backward())
    return (peak + held) / float(model.plan.budget)


def _held(model: Any, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameters and optimizer state that live on the device."""
    homes = model._fxremat.backend.weights._homes
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [t for p in parameters for t in optimizer.state[p].values() if isinstance(t, Tensor) and t.dim()]
    return sum(t.nbytes for t in (*parameters, *states) if t.data_ptr() not in homes)


def _line(error: Exception) -> str:
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
        shown = [_shown(cells.get(frozenset({row, column}))) for column in names]
        lines.append(f"| **{row}** | {' | '.join(shown)} |")
    counts = {kind: sum(cell["outcome"] == kind for cell in found["cells"]) for kind in ("bits", "rounding", "refused")}
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    lines += ["", f"{len(found['cells'])} cells: {told}. Measured on {found['date']} with torch {found['torch']}.", ""]
    lines += [f"* **{name}**: {what}." for name, what in FEATURES.items()]
    reasons = [cell for cell in found["cells"] if cell["outcome"] not in ("bits", "rounding")]
    lines += ["", "What is refused, and with which words:", ""] if reasons else []
    lines += [f"* {' and '.join(cell['features'])}: `{cell['why'].partition(': ')[2]}`" for cell in reasons]
    return "\n".join(lines)


def _shown(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return ""
    return {"bits": "bits", "rounding": "rounding", "refused": "refused"}.get(cell["outcome"], cell["outcome"].upper())


def main() -> None:
    """Train with the pairs of the command line, or with all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", nargs="*", help=f"one or two of {', '.join(FEATURES)}, joined by +")
    given = [tuple(text.split("+")) for text in parser.parse_args().pair]
    if unknown := sorted({name for names in given for name in names} - set(FEATURES)):
        parser.error(f"no feature {', '.join(unknown)}; there are {', '.join(FEATURES)}")
    torch.set_num_threads(1)
    cells = []
    for features in given or pairs():
        cells.append(cell := trained(features))
        used = "" if cell.peak is None else f", peak {cell.peak:.3f} of mem"
        print(f"{' + '.join(features):28} {cell.outcome:9} off {cell.off:.1e}{used}, {cell.seconds:.1f} s  {cell.why}")
        sys.stdout.flush()
    known = json.loads(OUT.read_text())["cells"] if given and OUT.exists() else []
    found = {tuple(cell["features"]): cell for cell in (*known, *map(asdict, cells))}
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "machine": platform.machine(),
        "cells": [found[features] for features in pairs() if features in found],
    }
    OUT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
