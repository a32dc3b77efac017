"""Compare the dynamic programs with the best schedule there is, on random short chains.

    python -m benchmarks.optimality [--count N]        writes benchmarks/results/optimality.json

Every instance has 2 to 6 blocks and a budget in which some recomputation is needed and possible; sizes are
small whole numbers and times spread widely, so that a wrong choice shows. Three classes: "plain" is the model
of the papers, gradients as large as their values; "general" adds gradients of any size and scratch memory;
"options" adds other ways to save a block. Tables are exact: one slot a byte.
"""

import argparse
import json
import random
from pathlib import Path

from fxremat.chains.chain import Block, Chain, Option
from fxremat.chains.simulate import simulate
from fxremat.errors import BudgetTooSmall
from fxremat.progress import progress
from fxremat.solvers import TABLES, exact

RESULTS = Path(__file__).parent / "results" / "optimality.json"
CLASSES = ("plain", "general", "options")
SOLVERS = ("persistent", "floating", "input_drop", "floating_drop")


def draw(source: random.Random, kind: str) -> Chain:
    """A random chain of one of the classes."""
    return Chain(
        blocks=tuple(_block(source, kind) for _ in range(source.randint(2, 6))),
        input_bytes=source.randint(0, 3),
    )


def _block(source: random.Random, kind: str) -> Block:
    output = source.randint(0, 5)
    general = kind != "plain"
    options = source.choice([0, 0, 1, 2]) if kind == "options" else 0
    return Block(
        forward_time=source.choice([0, 1, 2, 3, 5, 9, 30]),
        backward_time=source.randint(0, 3),
        output_bytes=output,
        saved_bytes=output + source.choice([0, 0, 1, 2, 4]),
        grad_bytes=source.randint(0, 5) if general else output,
        forward_scratch=source.choice([0, 0, 2]) if general else 0,
        backward_scratch=source.choice([0, 0, 2]) if general else 0,
        options=tuple(
            Option(saved_bytes=output + source.randint(0, 2), backward_time=source.randint(3, 9))
            for _ in range(options)
        ),
    )


def compare(chain: Chain, mem: int) -> dict[str, float] | None:
    """The time of each solver within `mem` bytes, infinite where it finds nothing; None for easy budgets."""
    tables = {name: TABLES[name](chain, mem, mem) for name in SOLVERS if name in TABLES}
    times = {name: chain.least_time + float(table.curve[-1]) for name, table in tables.items()}
    if min(times.values()) in (chain.least_time, float("inf")):
        return None
    try:
        (schedule,) = exact.schedules(chain, mem)
    except BudgetTooSmall:
        return None
    return times | {"exact": simulate(chain, schedule).time}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=8000, help="instances a class (default 8000)")
    count = parser.parse_args().count
    report = {kind: _survey(kind, count) for kind in CLASSES}
    RESULTS.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for kind, row in report.items():
        print(kind, {name: value for name, value in row.items() if name != "counter-examples"})


def _survey(kind: str, count: int) -> dict[str, object]:
    source = random.Random(kind)
    missed = dict.fromkeys(SOLVERS, 0)
    worst = dict.fromkeys(SOLVERS, 1.0)
    examples: list[dict[str, object]] = []
    steps = progress(range(count), kind)
    for _ in steps:
        found = None
        while found is None:
            chain = draw(source, kind)
            mem = source.randint(2, sum(block.saved_bytes for block in chain.blocks) + chain.input_bytes + 8)
            found = compare(chain, mem)
        for name in missed.keys() & found.keys():
            if found[name] > found["exact"] + 1e-9:
                missed[name] += 1
                if found[name] < float("inf"):
                    worst[name] = max(worst[name], found[name] / found["exact"])
        if found["floating_drop"] > found["exact"] + 1e-9:
            examples.append({"chain": json.loads(chain.to_json()), "mem": mem, **found})
    return {"instances": count, "missed": missed, "worst ratio": worst, "counter-examples": examples[:3]}


if __name__ == "__main__":
    main()
