"""Check that two versions of fxremat make the same plans, byte for byte, by a digest of each of 26.

    FXREMAT_CACHE=/tmp/costs python -m benchmarks.fingerprints > before.json        # in one checkout
    FXREMAT_CACHE=/tmp/costs python -m benchmarks.fingerprints > after.json         # in the other
    diff before.json after.json

Arguments, where there are any, are ends of the names of those to make.

Both read the costs that the first one measured. A digest covers the budget and the least one, the peak, time, ops,
versions and transfers of the chosen program, the whole frontier, and the printed schedule.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

import fxremat
from fxremat.cost import updates
from fxremat.settings import Offload, Search

from . import models

EFFORT = 2.0
HOSTED = Offload(weights=True, activations=False)
MUCH = 1 << 40  # bytes: more than any of the models needs


def main() -> None:
    """Print one digest a plan, as JSON."""
    updates.__dict__["seconds_of"] = lambda *_: 1e-3  # what no cache remembers
    found = {}
    for name, case, share, options in _wanted():
        if not name.endswith(tuple(sys.argv[1:]) or ""):
            continue
        torch._dynamo.reset()
        model = models.get(case, "small").model()
        if options.get("offload") is HOSTED:
            options["optimizer"] = torch.optim.AdamW(model.parameters())
        batch = models.get(case, "small").batch()
        everything = fxremat.plan(model, batch, mem=MUCH, **options)
        budget = everything.minimum + int(share * (everything.keep_all_peak - everything.minimum))
        plan = fxremat.plan(model, batch, mem=budget, **options)
        assert isinstance(plan, fxremat.Plan)
        found[name] = digest(plan)
        print(name, found[name], file=sys.stderr, flush=True)
    json.dump(found, sys.stdout, indent=1)


def _wanted() -> Iterator[tuple[str, str, float, dict[str, Any]]]:
    """Names, models, shares of the way from the least budget to keeping everything, and options."""
    for case in models.ALL:
        yield f"{case} auto", case, 0.3, {"search": Search(seconds=EFFORT)}
    for case in ("gpt", "unet", "encoder_decoder"):
        yield f"{case} estimated", case, 0.1, {"search": Search(seconds=0.0), "costs": "estimate"}
    for case in ("gpt", "unet", "deep_chain", "siamese"):
        yield f"{case} offload", case, 0.2, {"search": Search(seconds=EFFORT), "offload": True}
    for case in ("gpt", "mixer", "deep_chain"):
        yield f"{case} weights", case, 0.5, {"search": Search(seconds=0.0), "offload": HOSTED}
    for solver in ("input_drop", "persistent", "keep_all", "revolve"):
        yield f"mixer {solver}", "mixer", 1.0, {"solver": solver}
    for solver in ("pofo", "autocapper"):
        yield f"deep_chain {solver}", "deep_chain", 0.3, {"solver": solver, "offload": True}


def digest(plan: fxremat.Plan) -> str:
    """A short text that is equal for equal plans."""
    program = plan.program
    seen = (
        (plan.budget, plan.minimum, plan.keep_all_peak, plan.predicted_peak, plan.predicted_time),
        plan.frontier,
        str(plan.schedule),
        [
            (step.role.value, step.block, sorted(step.reads), step.writes, step.op, getattr(step, "trip", None))
            for step in program.steps
        ],
        plan.describe(full=True),
    )
    return hashlib.sha256(repr(seen).encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
