"""How long the dynamic programs take, and what their schedules cost: `python -m benchmarks.solvers`.

Uneven random chains; one warm-up compiles. Prints a table and writes benchmarks/results/solvers.json.
"""

import argparse
import json
import random
import resource
import time
from pathlib import Path

from fxremat.chain import Block, Chain, Option
from fxremat.simulate import simulate
from fxremat.solvers import best, keep_all

RESULTS = Path(__file__).parent / "results" / "solvers.json"


def uneven(length: int, options: int = 0, seed: int = 1) -> Chain:
    """A chain of blocks of very different sizes and times, each with so many options besides 0."""
    draw = random.Random(seed)
    blocks = []
    for _ in range(length):
        output = draw.choice([1, 2, 4]) * 2**20 + draw.randrange(2**18)
        saved = int(output * draw.uniform(2, 9))
        forward = draw.uniform(1, 9)
        blocks.append(
            Block(
                forward_time=forward,
                backward_time=2 * forward,
                output_bytes=output,
                saved_bytes=saved,
                forward_scratch=draw.randrange(2**20),
                backward_scratch=draw.randrange(2**21),
                options=tuple(
                    Option(
                        saved_bytes=int(output + (saved - output) * 0.9 * (options - k) / (options + 1)),
                        backward_time=2 * forward + 0.9 * forward * k / options,
                    )
                    for k in range(1, options + 1)
                ),
            )
        )
    return Chain(blocks=tuple(blocks), input_bytes=2**20)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, default=500)
    slots = parser.parse_args().slots
    for solver in ("persistent", "input_drop"):
        best(uneven(20), 2**26, solver=solver, slots=50)  # compiles
    rows = []
    print("blocks options solver       budget  seconds  time/keep_all  peak/budget")
    for length, options in ((50, 0), (50, 7), (100, 0), (100, 5), (340, 0)):
        chain = uneven(length, options)
        plain = simulate(chain, keep_all.schedules(chain)[0])
        for share in (0.1, 0.3, 0.6):
            for solver in ("persistent", "input_drop"):
                mem = int(plain.peak * share)
                begin = time.perf_counter()
                found = best(chain, mem, solver=solver, slots=slots)
                seconds = time.perf_counter() - begin
                row = {
                    "blocks": length,
                    "options": options,
                    "solver": solver,
                    "budget": share,
                    "seconds": round(seconds, 3),
                    "time": round(found.time / plain.time, 4),
                    "peak": round(found.peak / mem, 4),
                }
                rows.append(row)
                print(
                    "{blocks:6} {options:7} {solver:12} {budget:6} {seconds:8} {time:14} {peak:12}".format(
                        **row
                    )
                )
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"largest resident memory {memory} MiB")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"slots": slots, "resident_mib": memory, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
