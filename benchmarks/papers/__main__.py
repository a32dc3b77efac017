"""The figures of the papers, reproduced: `python -m benchmarks.papers [NAME ...]`.

Writes benchmarks/results/papers/*.json, docs/papers/*.svg and the page docs/papers.md. Everything is simulated
from the committed chains (`python -m benchmarks.papers.chains` makes them), so no accelerator is needed; all of
it takes about half an hour on two cores, most of that for the figures of POFO.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from benchmarks.papers import joins, offloading, pofo, rematerialization
from benchmarks.papers.figure import Figure
from benchmarks.papers.page import write_page

PARTS: dict[str, Callable[[], list[Figure]]] = {
    "joins": lambda: [
        joins.makespan_against_memory(),
        joins.makespan_against_length(),
        joins.against_linearization(),
    ],
    "rematerialization": lambda: [rematerialization.solver_times(), rematerialization.against_segments()],
    "offloading": lambda: [offloading.against_the_bound(), offloading.against_rematerialization()],
    "pofo": pofo.figures,
    "page": list,
}


def main() -> None:
    """Run the parts that were asked for, then write the page from all saved figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "parts", nargs="*", choices=[*PARTS, []], help=f"some of {', '.join(PARTS)}; default: all"
    )
    for name in parser.parse_args().parts or PARTS:
        start = time.perf_counter()
        for figure in PARTS[name]():
            figure.save()
            for claim in figure.claims:
                print(f"{figure.name}: {'yes' if claim.holds else 'NO '} {claim.claim} {claim.ours}")
        print(f"{name}: {time.perf_counter() - start:.0f} s")
    write_page()


if __name__ == "__main__":
    main()
