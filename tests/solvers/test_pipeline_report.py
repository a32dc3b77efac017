"""Chains as pipelines: their ways, the command line, the picture, and the page of the benchmark."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given

from benchmarks import pipeline as benchmark
from benchmarks.papers import chains as networks
from fxremat.__main__ import main
from fxremat.chains.chain import Block, Chain, Option
from fxremat.chains.schedule import Schedule
from fxremat.errors import BudgetTooSmall
from fxremat.show.pipeline import picture, text
from fxremat.solvers.pipeline.best_plan import plan_pipeline
from fxremat.solvers.pipeline.check import check
from fxremat.solvers.pipeline.model import Machines
from fxremat.solvers.pipeline.of_chain import layers_of, ways_of
from fxremat.solvers.pipeline.solved import plan_chain, solved_ways, way_of
from fxremat.solvers.pipeline.stage_costs import Job
from tests.dags import few
from tests.draws import everyday
from tests.solvers.chains import chains


def small() -> Chain:
    block = Block(
        forward_time=1.0,
        backward_time=2.0,
        output_bytes=4,
        saved_bytes=12,
        weight_bytes=9,
        weight_grad_bytes=2,
        options=(Option(saved_bytes=8, backward_time=2.25),),
    )
    return Chain(blocks=(block,) * 6, input_bytes=4)


def test_a_chain_s_layers_keep_their_input_instead_of_their_output() -> None:
    layers = layers_of(small())
    layer = layers.layers[0]
    assert (layer.forward_time, layer.backward_time, layer.weight_bytes) == (1.0, 2.0, 2)
    assert (layer.saved_bytes, layer.output_bytes, layer.grad_bytes) == (12, 4, 4)
    assert len(layers) == 6


def test_stages_of_a_chain_can_be_run_again() -> None:
    found = {(way.seconds, way.kept_bytes, way.peak_bytes) for way in ways_of(small())(0, 5)}
    assert (18.0, 4 + 72, 4 + 72 + 8) in found  # all kept, and two gradients
    assert (19.5, 4 + 48, 4 + 48 + 8) in found  # all under the small option
    assert (24.0, 4, 4 + 72 + 8) in found  # all again
    assert (24.0, 4 + 4, 8 + 36 + 8) in found  # all again, in halves
    assert (18.0 + 3, 4 + 4 + 36 - 4, 4 + 36 + 36 + 8) not in found


@few(everyday(60))
@given(chains(6))
def test_every_way_of_a_chain_s_stages_is_worth_its_place(chain: Chain) -> None:
    ways = ways_of(chain)
    for first in range(len(chain)):
        for last in range(first, len(chain)):
            found = ways(first, last)
            blocks = chain.blocks[first : last + 1]
            fastest = sum(b.forward_time + min(o.backward_time for o in b.choices) for b in blocks)
            assert found[0].seconds == pytest.approx(fastest)
            for fast, slow in pairwise(found):
                assert fast.seconds <= slow.seconds
                assert slow.kept_bytes < fast.kept_bytes or slow.bytes(1) < fast.bytes(1)
            assert min(way.kept_bytes for way in found) == chain.output_sizes[first] or last == first


def test_recomputing_takes_less_memory_and_is_not_slower_at_the_same() -> None:
    chain = small()
    machines = Machines(devices=3, memory=70, bandwidth=8.0, copies=3)
    keeping = plan_pipeline(layers_of(chain), machines, effort=0.0)
    mixed = plan_pipeline(layers_of(chain), machines, options=ways_of(chain), effort=0.0)
    check(mixed)
    assert mixed.period < keeping.period


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "chain.json"
    file.write_text(small().to_json())
    return str(file)


ASKED = ["--devices", "3", "--mem", "70", "--bandwidth", "8", "--microbatches", "8", "--effort", "0"]


def test_a_chain_solver_s_ways_are_its_schedules() -> None:
    blocks = [
        Block(
            forward_time=1.0 + k % 3,
            backward_time=2.0,
            output_bytes=10 + k,
            saved_bytes=40 - k,
            weight_bytes=5,
        )
        for k in range(8)
    ]
    chain = Chain(input_bytes=7, blocks=blocks)
    first, last = 2, 6
    ways = solved_ways(chain, first, last)
    keep = ways_of(chain)(first, last)[0]
    assert (ways[0].kept_bytes, ways[0].seconds) == (keep.kept_bytes, keep.seconds)
    assert ways[0].kept_bytes == chain.output_sizes[first] + sum(
        b.saved_bytes for b in blocks[first : last + 1]
    )
    assert [way.peak_bytes for way in ways] == sorted((way.peak_bytes for way in ways), reverse=True)
    assert [way.seconds for way in ways] == sorted(way.seconds for way in ways)
    assert all(way.kept_bytes < way.peak_bytes for way in ways)
    assert ways[-1].kept_bytes < 0.5 * ways[0].kept_bytes


def test_a_schedule_s_way_by_hand() -> None:
    blocks = [Block(forward_time=1.0, backward_time=2.0, output_bytes=10, saved_bytes=30) for _ in range(3)]
    stage = Chain(input_bytes=7, blocks=blocks)
    way = way_of(stage, Schedule.parse("Fck1 Fnone2 Fall3 B3 Fck1 Fall2 B2 Fall1 B1"))
    assert (way.forward_time, way.backward_time) == (3.0, 9.0)
    assert way.kept_bytes == 7 + 10 + 30  # the input, a_2, for which a_1 has gone, and A_3


@pytest.mark.parametrize(("memory", "better"), [(5e9, True), pytest.param(6e9, False, marks=pytest.mark.long)])
def test_ways_of_a_chain_solver_lose_no_time(memory: float, better: bool) -> None:
    chain = networks.read("resnet50_1000x8")
    machines = Machines(devices=4, memory=memory, bandwidth=12e9, copies=3)
    simple = plan_pipeline(layers_of(chain), machines, options=ways_of(chain), effort=0.0)
    solved = plan_chain(chain, machines, effort=0.0)
    check(solved)
    assert solved.period < simple.period if better else solved.period <= simple.period


@pytest.mark.long
def test_ways_of_a_chain_solver_make_room() -> None:
    """A shorter chain shows it every day: test_a_chain_solver_s_ways_are_its_schedules."""
    chain = networks.read("resnet50_1000x8")
    tight = Machines(devices=4, memory=4e9, bandwidth=12e9, copies=3)
    with pytest.raises(BudgetTooSmall):
        plan_pipeline(layers_of(chain), tight, options=ways_of(chain), effort=0.0)
    check(plan_chain(chain, tight, effort=0.0))


def test_the_command_line_prints_a_table_and_draws_a_picture(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.svg"
    assert main(["pipeline", path, *ASKED, "--picture", str(out)]) == 0
    printed = capsys.readouterr().out
    for word in ("period", "above the bound", "PipeDream", "a step of 8 micro-batches", "device 2:"):
        assert word in printed
    ElementTree.fromstring(out.read_text())


def test_the_command_line_answers_in_json(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", path, *ASKED, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["period"] >= answer["lower_bound"] > 0
    assert answer["stages"][0]["layers"][0] == 1
    assert answer["stages"][-1]["layers"][1] == 6
    assert all(size <= 70 for size in answer["memory"])
    assert main(["pipeline", path, *ASKED, "--json", "--keep-all"]) == 0
    assert json.loads(capsys.readouterr().out)["period"] > answer["period"]


def test_the_command_line_names_the_least_memory(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["pipeline", path, "--devices", "3", "--effort", "0", "--mem"]
    assert main([*asked, "10"]) == 2
    error = capsys.readouterr().err
    least = int(error.partition("the least that does is ")[2].split()[0])
    assert main([*asked, str(least)]) == 0
    assert main([*asked, str(least - 1)]) == 2


def test_the_picture_shows_every_device_with_its_micro_batches() -> None:
    chain = small()
    machines = Machines(devices=3, memory=120, bandwidth=8.0, copies=3)
    job = Job(layers_of(chain), machines)
    plan = plan_pipeline(job.layers, machines, effort=0.0)
    drawing = ElementTree.fromstring(picture(plan))
    words = [element.text for element in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert {"device 0", "device 1", "device 2", "link 0-1", "link 1-2"} <= set(words)
    works = [
        e.text or ""
        for e in drawing.iter("{http://www.w3.org/2000/svg}title")
        if (e.text or "")[1:4] == " of"
    ]
    assert len(works) >= 2 * 3 * 4  # a forward and a backward of three stages in four periods
    assert text(plan).startswith(f"period {plan.period:.6g} s")


def test_the_page_is_that_of_the_record() -> None:
    assert benchmark.PAGE.read_text(encoding="utf-8") == benchmark.page(), (
        "run python -m benchmarks.pipeline page"
    )


def test_the_record_holds_what_is_wanted() -> None:
    rows = json.loads(benchmark.RESULTS.read_text(encoding="utf-8"))["rows"]
    assert len(rows) == len(list(benchmark.instances()))
    for row in rows:
        assert row["ours"] is None or row["bound"] <= row["ours"] * (1 + 1e-9)
        for other in ("contiguous", "madpipe", "pipedream"):
            assert row[other] is None or row["ours"] <= row[other] * (1 + 1e-6)
