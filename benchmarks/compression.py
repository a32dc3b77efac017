"""Measure what storing in fewer bytes gives: time at equal memory, and the loss curves of rounded numbers.

    python -m benchmarks.compression        writes benchmarks/results/compression.json, prints tables

On the CPU with one thread. The first part trains models with dropout, ReLU and maximum pools within budgets, without
compression and with it, by turns with plain PyTorch; seconds are the least of several steps. The second trains one
small GPT for 300 steps on a Markov chain, in plain PyTorch and with values stored as int8 and as fp8, in the plan that
rounds most of them, from the same weights on the same batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxremat
from benchmarks import meter, report

RESULT = Path(__file__).parent / "results" / "compression.json"
STEPS = 300  # of a loss curve
SHOWN = 30  # of these, on record
REPEATS = 9  # of a timed step
SYMBOLS, CONTEXT, BATCH, WIDTH = 64, 64, 16, 64
LEAST_DENOMINATOR = 1e-12
PERCENTS = (80, 60, 45)
MODES: dict[str, str | bool | None] = {"whole": False, "packed": None, "int8": "int8"}  # values of compress=


class Perceptrons(nn.Module):
    """Residual layers with ReLU and dropout, as in the first transformers."""

    def __init__(self, width: int = 256, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                *(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Dropout(0.1)),
                *(nn.Linear(4 * width, width), nn.Dropout(0.1)),
            )
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


class Decoder(nn.Module):
    """A GPT of torch's own layers, which ends in the loss of the next symbol."""

    def __init__(self, width: int = WIDTH, layers: int = 4, dropout: float = 0.1, symbols: int = SYMBOLS) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(symbols, width), nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, symbols)

    def forward(self, tokens: Tensor) -> Tensor:
        seen = tokens[:, :-1]
        x = self.symbols(seen) + self.places.weight[: seen.shape[1]]
        later = torch.full((seen.shape[1],) * 2, float("-inf"), device=x.device).triu(1)
        for layer in self.layers:
            x = layer(x, src_mask=later, is_causal=True)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


class Pooled(nn.Module):
    """Convolutions with ReLU6 and maximum pools."""

    def __init__(self) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        for narrow, wide in ((3, 32), (32, 64), (64, 64)):
            stages += [nn.Conv2d(narrow, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU6()]
            for _ in range(2):
                stages += [nn.Conv2d(wide, wide, 3, padding=1, groups=wide), nn.BatchNorm2d(wide), nn.ReLU6()]
            stages.append(nn.MaxPool2d(2))
        self.stages, self.last = nn.Sequential(*stages), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.stages(x).mean((2, 3))).square().mean()


MODELS: dict[str, tuple[str, Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "perceptrons": ("layers with ReLU and dropout", Perceptrons, lambda: torch.randn(16, 64, 256)),
    "decoder": (
        "GPT with dropout",
        lambda: Decoder(width=192, layers=6, symbols=512),
        lambda: torch.randint(512, (16, CONTEXT + 1)),
    ),
    "pooled": ("convolutions with ReLU6 and pools", Pooled, lambda: torch.randn(8, 3, 64, 64)),
}


def rows(name: str) -> Iterator[dict[str, Any]]:
    """Times of a model at each budget, without compression and with it, over those of plain PyTorch."""
    _, make, batch_of = MODELS[name]
    torch.manual_seed(0)
    batch = (batch_of(),)
    plain = make()
    for percent in PERCENTS:
        ready: dict[str, Any] = {}
        row: dict[str, Any] = {"model": name, "percent": percent}
        for key, mode in MODES.items():
            try:
                ready[key] = fxremat.compile(make(), mem=f"{percent}%", example_inputs=batch, compress=mode)
            except fxremat.BudgetTooSmall as error:
                row |= {f"{key}_least": error.minimum}
                continue
            plan = ready[key].plan
            row |= {f"{key}_least": plan.minimum, "keep_all": plan.keep_all_peak}
            row |= {f"{key}_stored": str(plan.compression or "")}
        steps = [meter.step_from_none(model, batch) for model in (plain, *ready.values())]
        first, *others = meter.step_times(steps, repeats=REPEATS)
        yield row | {key: seconds / first for key, seconds in zip(ready, others, strict=True)}


def batches() -> Iterator[Tensor]:
    """Yield batches of a Markov chain in which each symbol has four likely followers."""
    g = torch.Generator().manual_seed(0)
    followers = torch.randint(SYMBOLS, (SYMBOLS, 4), generator=g)
    while True:
        tokens = torch.randint(SYMBOLS, (BATCH, 1), generator=g)
        while tokens.shape[1] <= CONTEXT:
            chosen = torch.randint(4, (BATCH,), generator=g)
            tokens = torch.cat([tokens, followers[tokens[:, -1], chosen][:, None]], 1)
        yield tokens


def curve(mode: str | None) -> dict[str, Any]:
    """Train the small GPT; return its losses, and the errors of the first step's gradients by layer."""
    torch.manual_seed(0)
    model, given = Decoder(dropout=0.0), batches()
    trained: nn.Module = model
    rounded, exact = 0, dict[str, Tensor]()
    if mode is not None:
        first = next(batches())
        model(first).backward()
        exact = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        model.zero_grad()
        step = fxremat.capture(model, (first,), mem="min", compress=mode, costs="estimate")
        plan = max((step.plan(f"{percent}%") for percent in (60, 50, 45, 40, 35)), key=_rounded)
        rounded, trained = _rounded(plan), fxremat.compile(model, plan=plan)
        trained(first).backward()
    errors = _errors(model, exact)
    model.zero_grad()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=2e-3), []
    for _ in range(STEPS):
        loss = trained(next(given))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "rounded": rounded, "errors": errors}


def _rounded(plan: Any) -> int:
    return len(plan.compression.rounded) if plan.compression else 0


def _errors(model: nn.Module, exact: dict[str, Tensor]) -> dict[str, float]:
    """Return the norm of the gradients' error over that of the gradients, by layer."""
    squares: dict[str, list[float]] = {}
    for name, parameter in model.named_parameters():
        if name in exact and parameter.grad is not None:
            layer = ".".join(name.split(".")[:2]) if name.startswith("layers") else name.split(".")[0]
            sums = squares.setdefault(layer, [0.0, 0.0])
            sums[0] += float((parameter.grad - exact[name]).double().square().sum())
            sums[1] += float(exact[name].double().square().sum())
    return {layer: (error / max(norm, LEAST_DENOMINATOR)) ** 0.5 for layer, (error, norm) in squares.items()}


def page(record: str) -> str:
    """The tables of docs/compression.md."""
    known = json.loads(record)
    lines = ["| model | budget | as they are | without loss | int8 |", "|---|---|---|---|---|"]
    for row in known["rows"]:
        cells = [f"{row[key]:.3f}" if key in row else "does not fit" for key in ("whole", "packed", "int8")]
        lines.append(f"| {MODELS[row['model']][0]} | {row['percent']} % | {' | '.join(cells)} |")
    least = ["| model | least budget as they are | without loss |", "|---|---|---|"]
    for name, (title, _, _) in MODELS.items():
        row = next(row for row in known["rows"] if row["model"] == name and "keep_all" in row)
        shares = (f"{row[f'{key}_least'] / row['keep_all']:.1%}" for key in ("whole", "packed"))
        least.append(f"| {title} | {' | '.join(shares)} |")
    plain, *others = known["curves"].values()
    names = [*known["curves"]][1:]
    errors = ["| layer | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    errors += [
        f"| {layer} | " + " | ".join(f"{other['errors'][layer]:.2%}" for other in others) + " |"
        for layer in others[0]["errors"]
    ]
    ends = "; ".join(
        f"{other['difference']:.2%} with {name}, of {other['rounded']} values"
        for name, other in zip(names, others, strict=True)
    )
    start, end = plain["losses"][0], statistics.mean(plain["losses"][-3:])
    about = (
        f"The loss of {STEPS} steps fell from {start:.2f} to {end:.2f}; the largest difference from plain's at a step: "
        f"{ends}. Measured on {known['machine']['date']} with torch {known['machine']['torch']}, one thread of a CPU."
    )
    return "\n\n".join("\n".join(each) for each in (lines, least, errors)) + f"\n\n{about}"


def largest(plain: list[float], ours: list[float]) -> float:
    """Return the largest difference of two loss curves at any step, over plain's loss."""
    return max(abs(b - a) / a for a, b in zip(plain, ours, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(1)
    found = [row for name in MODELS for row in rows(name)]
    curves = {str(mode or "plain"): curve(mode) for mode in (None, "int8", "fp8")}
    plain = curves["plain"]["losses"]
    for one in curves.values():
        one |= {"difference": largest(plain, one["losses"]), "losses": one["losses"][:: STEPS // SHOWN]}
    RESULT.write_text(json.dumps({"machine": report.machine(), "rows": found, "curves": curves}, indent=1) + "\n")
    print(page(RESULT.read_text()))


if __name__ == "__main__":
    main()
