"""Step graphs of models with estimated costs, kept as JSON: what is claimed of numbers is tested without a capture.

    graph, costs = saved("gpt")

`python -m tests.saved_steps` captures all models again and writes their files. A long test compares the files with what
is captured today.
"""

from __future__ import annotations

import gzip
import json
import os.path
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fxremat.search.candidate import Frontier
from fxremat.search.survey import survey
from fxremat.step.as_json import read, written
from fxremat.step.costs import Costs
from fxremat.step.liveness import Sizes
from fxremat.step.step_graph import StepGraph

if TYPE_CHECKING:
    from fxremat.graphs.captured import Captured

FOLDER = Path(__file__).parent / "data" / "steps"
MODELS = (
    "gpt", "resnet", "unet", "deep_chain", "mixer", "encoder_decoder", "inception", "siamese", "densenet",
)  # fmt: skip
TOYS = (
    "deep", "deeper", "four_layers", "four_layers_64", "pair", "shared_pair", "three_towers",
    "overwriting", "carrier",
    "waiting_towers",
)  # fmt: skip
RANDOM = tuple(f"random_{seed}" for seed in range(10))
NAMES = (*MODELS, *TOYS, *RANDOM)
VARIED = (*RANDOM, "unet", "shared_pair", "overwriting", "carrier")  # for tests that survey each


class Saved(NamedTuple):
    """A step graph, with costs as `tests.dags.estimated` estimates them."""

    graph: StepGraph
    costs: Costs


@cache
def saved(name: str) -> Saved:
    """Read one of `NAMES`. The graph is frozen: tests share it."""
    content = json.loads(gzip.decompress((FOLDER / f"{name}.json.gz").read_bytes()))
    return Saved(StepGraph.from_json(json.dumps(content["graph"])), read(content["costs"], (Costs, Sizes)))


@cache
def surveyed(name: str) -> Frontier:
    """Return the frontier of a saved step, without a search."""
    return survey(*saved(name), slots=60, effort=0.0)


def main(names: Iterable[str]) -> None:
    """Capture models again and write their files: all of them, or those that are named."""
    from tests.dags import estimated

    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in tuple(names) or NAMES:
        captured = captured_now(name)
        sources = tuple(_without_folders(source) for source in captured.sources)
        graph = replace(captured.step, sources=sources)
        content = {"graph": json.loads(graph.to_json()), "costs": written(estimated(captured))}
        text = json.dumps(content, separators=(",", ":"))
        (FOLDER / f"{name}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


def _without_folders(source: Any) -> Any:
    if source.frame is None:
        return source
    return replace(source, frame=replace(source.frame, file=os.path.basename(source.frame.file)))


def captured_now(name: str) -> Captured:
    """Capture the model of that name anew, from seed 0."""
    import torch

    from benchmarks import models
    from tests.dags import Dag, batch, capture

    torch.manual_seed(0)
    if name in MODELS:
        case = models.get(name, "small")
        return capture(case.model(), *case.batch())
    if name in RANDOM:
        return capture(Dag(random_recipe(int(name.removeprefix("random_")))).train(), *batch())
    model, inputs = _toys()[name]()
    return capture(model, *inputs)


def random_recipe(seed: int) -> Any:
    """A recipe of `tests.dags`: mostly chains, with some values that are read later."""
    from tests.dags import KINDS, Layer, Recipe

    rng = random.Random(seed)
    layers = []
    for _ in range(rng.randint(4, 20)):
        back = rng.choice([0, 0, rng.randrange(13)])
        layers.append(Layer(rng.choice(KINDS), back, rng.randrange(13)))
    return Recipe(tuple(layers), rng.randrange(3), rng.random() < 0.5, seed % 3 == 0)


def _toys() -> dict[str, Callable[[], tuple[Any, tuple[Any, ...]]]]:
    import torch
    from torch import nn

    from tests.dags import Dag, Layer, Recipe, batch
    from tests.linearize.test_towers import Pair, inputs
    from tests.test_planner import INPUTS, Deep
    from tests.toys import Carrier, FourLayers, Overwriting, Total

    waiting = [
        Layer("linear", 0, 4),
        Layer("attend", 8, 10),
        Layer("batch_norm", 4, 5),
        Layer("shared", 0, 3),
        Layer("images", 0, 10),
    ]
    sixty = (nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(60))
    return {
        "deep": lambda: (Deep(), INPUTS),
        "deeper": lambda: (nn.Sequential(*sixty, Total()), INPUTS),
        "four_layers": lambda: (FourLayers(), (torch.ones(4, 8),)),
        "four_layers_64": lambda: (FourLayers(), (torch.ones(64, 8),)),
        "pair": lambda: (Pair(shared=False).train(), inputs()),
        "shared_pair": lambda: (Pair(shared=True).train(), inputs()),
        "three_towers": lambda: (Pair(shared=False, count=3).train(), inputs(3)),
        "overwriting": lambda: (Overwriting(), (torch.ones(256, 16),)),
        "waiting_towers": lambda: (Dag(Recipe(tuple(waiting), 1, True, True)).train(), batch()),
        "carrier": lambda: (Carrier(), batch()),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
