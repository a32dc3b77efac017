"""Results of the pretended CUDA: what was promised, a table for people, a record as JSON, and a part of a page.

    benchmarks/results/pretended_cuda.json      {"2.11.0": results, ...}, a key for each release of torch
    docs/pretended-cuda.md                      has the table between its marks
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "pretended_cuda.json"
PAGE = ROOT / "docs" / "pretended-cuda.md"
MARKS = re.compile(r"(<!-- pretended-cuda -->\n).*?(<!-- /pretended-cuda -->)", re.DOTALL)
LOWEST = -0.006  # requested bytes over predicted ones, less 1: what rounding to 512 bytes may leave
USED = 0.95  # of a device, by training with mem="auto"

Results = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A promise, and what was found."""

    promise: str
    held: bool
    found: str

    def __str__(self) -> str:
        return f"{self.promise}: {'held' if self.held else 'NOT HELD'}, {self.found}"


def claims(results: Results) -> Iterator[Claim]:
    """Yield what has to hold of the parts that were run."""
    if lost := results.get("lost"):
        yield Claim(promise="every job ends", held=False, found="; ".join(lost))
    races, mutants, memory, tests = (results.get(part) for part in ("races", "mutants", "memory", "tests"))
    loops, attention = (results.get(part) for part in ("auto", "attention"))
    if races:
        total, racing = (sum(tally[key] for tally in races.values()) for key in ("programs", "racing"))
        yield Claim(promise="no race", held=racing == 0, found=f"{racing} of {total} programs")
    if mutants:
        missed = [mutant["name"] for mutant in mutants if not mutant["found"]]
        found = f"{len(mutants) - len(missed)} of {len(mutants)}"
        yield Claim(promise="every mutant is found", held=not missed, found="; ".join([found, *missed]))
    if memory:
        deviations = [row["requested"] / row["predicted"] - 1 for row in memory if row["expandable"]]
        outside = sum(not LOWEST <= deviation <= 0 for deviation in deviations)
        found = f"{100 * min(deviations):+.3f} % to {100 * max(deviations):+.3f} %"
        found += f", {outside} of {len(deviations)} programs outside" if outside else f" in {len(deviations)} programs"
        promise = f"in expandable segments, requested bytes are within {100 * LOWEST:g} % and 0 % of the prediction"
        yield Claim(promise=promise, held=not outside, found=found)
        over = [row for row in memory if row["over"]]
        worst = max((row["over"] for row in over), default=0)
        found = f"{len(over)} of {len(memory)} over, by {worst / 2**20:.1f} MiB at most"
        yield Claim(promise="allocated bytes are within the budget", held=not over, found=found)
    if loops:
        cut_off = [f"{row['optimizer']} on {row['device'] / 1e6:,.0f} MB" for row in loops if row["ended"]]
        found = f"{len(loops) - len(cut_off)} of {len(loops)} loops"
        yield Claim(promise='training with mem="auto" lives', held=not cut_off, found="; ".join([found, *cut_off]))
        shares = [row["reserved"] / row["device"] for row in loops if _is_counted(row)]
        yield Claim(
            promise='mem="auto" uses 95 % of a device of a gigabyte or more, with AdamW',
            held=min(shares, default=1.0) >= USED,
            found=", ".join(f"{100 * share:.1f} %" for share in shares),
        )
    if attention:
        equal, cases = (sum(choices[key] for choices in attention) for key in ("equal", "cases"))
        yield Claim(promise="attention is chosen as assumed", held=equal == cases, found=f"{equal} of {cases} calls")
    if tests:
        found = f"{tests.get('passed', 0)} passed, {tests.get('failed', 0)} failed, {tests.get('skipped', 0)} skipped"
        yield Claim(promise="tests/test_cuda.py without numbers", held=not tests.get("failed"), found=found)


def _is_counted(row: Mapping[str, Any]) -> bool:
    """Tell whether a loop with mem="auto" should use all but a twentieth: of less memory, 40 MiB are more than that."""
    return bool(row["device"] >= 1e9 and row["optimizer"] == "AdamW")


def table(results: Results) -> str:
    """All results of one release as text."""
    parts = (_races(results), _memory(results), _loops(results), _dispatch(results), map(str, claims(results)))
    return "\n".join(line for part in parts for line in part)


def _races(results: Results) -> Iterator[str]:
    columns = ("programs", "steps", "failed_steps", "copies", "launches", "racing")
    if results.get("races"):
        yield f"{'programs that copy':<34}" + "".join(f"{column:>14}" for column in columns)
    for name, tally in results.get("races", {}).items():
        yield f"{name:<34}" + "".join(f"{tally[column]:>14,}" for column in columns)
        yield from (f"    {race}" for race in tally["races"][:5])
    for mutant in results.get("mutants", ()):
        found = f"found in program {mutant['programs']}" if mutant["found"] else "NOT FOUND"
        yield f"mutant: {mutant['name']}: {found}"


def _memory(results: Results) -> Iterator[str]:
    if results.get("memory"):
        columns = {"mem": 6, "budget": 10, "predicted": 11, "requested": 11, "allocated": 11, "over": 8}
        yield f"{'memory in MB':<40}" + "".join(f"{name:>{width}}" for name, width in columns.items())
    for row in results.get("memory", ()):
        deviation = 100 * (row["requested"] / row["predicted"] - 1)
        sizes = "".join(f"{row[key] / 1e6:>{width}.1f}" for key, width in (("budget", 10), ("predicted", 11)))
        yield (
            f"{row['model']:<26}{_allocator(row):<14}{row['mem']:>6}{sizes}{deviation:>+9.3f} %"
            f"{100 * (row['allocated'] / row['predicted'] - 1):>+9.2f} %{row['over'] / 1e6:>8.1f}"
        )


def _loops(results: Results) -> Iterator[str]:
    for row in results.get("auto", ()):
        budgets = " and ".join(f"{budget / 1e6:,.0f}" for budget in row["budgets"])
        end = f"{row['ended']} after {row['steps']} steps" if row["ended"] else f"{row['steps']} steps"
        yield (
            f'mem="auto", {row["optimizer"]:<6} on {row["device"] / 1e6:>7,.0f} MB: {end}; budgets {budgets} of the '
            f"{row['keep_all'] / 1e6:,.0f} MB of keeping everything, {row['reserved'] / 1e6:,.0f} MB reserved, "
            f"{row['retries']} retries"
        )


def _dispatch(results: Results) -> Iterator[str]:
    for choices in results.get("attention", ()):
        others = ", ".join(f"{pair}: {count}" for pair, count in choices["others"].items())
        yield f"attention on {choices['device']}: {choices['equal']} of {choices['cases']} as assumed {others}"
    for graph in results.get("graphs", ()):
        if graph["captured"] or graph["assumed"]:
            yield f"graph of {graph['model']}: captured {graph['captured']}, assumed {graph['assumed']}"


def markdown(record: Mapping[str, Results]) -> str:
    """The releases side by side, and then the memory of each."""
    releases = sorted(record, key=lambda release: [int(part) for part in release.split(".")])
    lines = [
        f"| | {' | '.join(f'torch {release}' for release in releases)} |",
        "|---|" + "---|" * len(releases),
        _line("measured on", [record[release]["date"] for release in releases]),
    ]
    kinds = {name: None for release in releases for name in record[release].get("races", {})}
    for name in kinds:
        lines.append(_line(name, [_told(record[release].get("races", {}).get(name)) for release in releases]))
    by_promise = [{claim.promise: claim for claim in claims(record[release])} for release in releases]
    for promise in {promise: None for held in by_promise for promise in held}:
        cells = [held[promise].found if promise in held else "-" for held in by_promise]
        lines.append(_line(promise, cells))
    for device in ("A100", "H100", "B200"):
        lines.append(_line(f"attention on {device} as assumed", [_chosen(record[r], device) for r in releases]))
    lines.append(_line("graphs as assumed for the H100", [_captured(record[release]) for release in releases]))
    sizes = [line for release in releases for line in _sizes(record[release], release)]
    return "\n".join([*lines, "", *sizes]).rstrip()


def _line(name: str, cells: list[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"


def _told(tally: Mapping[str, Any] | None) -> str:
    if tally is None:
        return "-"
    return (
        f"{tally['programs']:,} programs, {tally['copies']:,} copies, {tally['failed_steps']:,} failed steps: "
        f"{tally['racing']} with races"
    )


def _chosen(results: Results, device: str) -> str:
    for choices in results.get("attention", ()):
        if choices["device"] == device:
            others = ", ".join(f"{count} {pair.replace('->', 'in fact')}" for pair, count in choices["others"].items())
            return f"{choices['equal']} of {choices['cases']}" + (f" ({others})" if others else "")
    return "-"


def _captured(results: Results) -> str:
    graphs = results.get("graphs", ())
    others = [graph["model"] for graph in graphs if graph["captured"] or graph["assumed"]]
    told = f"{len(graphs) - len(others)} of {len(graphs)}" + (f" (not {'; '.join(others)})" if others else "")
    return told if graphs else "-"


def _sizes(results: Results, release: str) -> Iterator[str]:
    """A row for each program whose memory was looked at."""
    if not results.get("memory"):
        return
    yield f"Memory with torch {release}, beside the prediction:"
    yield ""
    yield "| model | segments | mem | predicted | requested | allocated | over the budget |"
    yield "|---|---|---|---|---|---|---|"
    for row in results["memory"]:
        requested, allocated = (100 * (row[key] / row["predicted"] - 1) for key in ("requested", "allocated"))
        over = f"{row['over'] / 2**20:.1f} MiB" if row["over"] else "no"
        sizes = f"{row['predicted'] / 1e6:,.1f} MB | {requested:+.3f} % | {allocated:+.2f} % | {over}"
        yield f"| {row['model']} | {_allocator(row)} | {row['mem']} | {sizes} |"
    yield ""


def _allocator(row: Mapping[str, Any]) -> str:
    return "expandable" if row["expandable"] else "of blocks"


def filled(page: str, record: Mapping[str, Results]) -> str:
    """The page with its table made from the record."""
    return MARKS.sub(lambda match: f"{match[1]}{markdown(record)}\n{match[2]}", page)


def read(file: Path = RECORD) -> dict[str, Any]:
    """The record; {} where there is none."""
    return json.loads(file.read_text()) if file.exists() else {}


def write(results: Results, release: str, file: Path = RECORD) -> None:
    """Put the results of a release into the record and, where it is the repository's own, into the page."""
    record = {**read(file), release: {**read(file).get(release, {}), **results}}
    file.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")
    if file == RECORD:
        PAGE.write_text(filled(PAGE.read_text(), record))
