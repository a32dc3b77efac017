"""The comparison with the alternatives: by-hand strategies train right and save memory, the verdict adds up, and
docs/alternatives.md is that of the record."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import meter, models
from benchmarks.alternatives import page, rows
from benchmarks.alternatives import strategies as made
from benchmarks.alternatives.by_hand import Run, placements, plainly
from benchmarks.alternatives.floor import floor_bytes
from benchmarks.alternatives.measure import Bench, compared, difference, in_play, measure, nudge
from benchmarks.alternatives.rows import NAMES, Measured, Ours, Point, Record
from benchmarks.alternatives.verdict import cells, claims, geometric_mean, least_alternative
from benchmarks.models.mixer import DeepChain
from fxremat.step.step_graph import Origin

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("torch_ready")]

BY_HAND = ("checkpoint", "checkpoint_sequential", "nested", "selective")
GOT = Measured(
    peak=100, storages=90, rough=1.0, seconds=1.0, loss="equal", gradients="equal", buffers="equal",
    gradient_error=0.0,
)  # fmt: skip


# --- strategies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_rewired_model_that_runs_plainly_is_the_model(name: str) -> None:
    case = models.get(name, "small")
    want, parameters = _step(case.model(), case), [p.shape for p in case.model().parameters()]
    for placement in placements(name).values():
        model = made.rewired(case, placement, plainly)
        assert [p.shape for p in model.parameters()] == parameters
        assert compared(_step(model, case), want, want) == "equal"


@pytest.mark.parametrize("name", NAMES)
def test_by_hand_gradients_are_those_of_plain_pytorch(name: str) -> None:
    """The order in which a gradient's parts are added up may change: the towers share their parameters."""
    case = models.get(name, "small")
    nudged = case.model()
    nudge(nudged)
    plain, rounding = _step(case.model(), case), _step(nudged, case)
    for strategy in made.strategies(case, BY_HAND):
        assert compared(_step(strategy.make(), case), plain, rounding) != "wrong", strategy.setting


@pytest.mark.parametrize(
    ("name", "family"),
    [("gpt", "checkpoint"), ("resnet", "checkpoint_sequential"), ("gpt", "nested"), ("resnet", "selective")],
)
def test_by_hand_strategies_take_less_memory(name: str, family: str) -> None:
    """The first setting and the last of each."""
    case = models.get(name, "small")
    plain, settings = _peak(case.model(), case), made.strategies(case, [family])
    for strategy in (settings[0], settings[-1]):
        assert _peak(strategy.make(), case) < 0.9 * plain, strategy.setting


@pytest.mark.parametrize(
    ("run", "runs"),
    [
        pytest.param(plainly, [1, 1, 1, 1], id="plain"),
        pytest.param(made.every(1), [2, 2, 2, 2], id="each"),
        pytest.param(made.every(3), [2, 1, 1, 2], id="every third"),
        pytest.param(made.in_segments(2), [2, 2, 1, 1], id="segments: torch leaves the last as it is"),
        pytest.param(made.nested(2), [3, 2, 3, 2], id="two deep"),
        pytest.param(made.halved, [3, 2, 3, 2], id="halves"),
        pytest.param(made.selective(1), [2, 2, 2, 2], id="selective"),
    ],
)
def test_how_often_each_block_runs(run: Run, runs: list[int]) -> None:
    """Four blocks. A recomputation stops at the last input it was asked for: of a pair of checkpoints it runs one."""
    counts: Counter[int] = Counter()

    def block(i: int, x: Tensor) -> Tensor:
        counts[i] += 1
        return x.sin()

    out = run([partial(block, i) for i in range(4)], torch.ones(3, requires_grad=True))
    out.sum().backward()
    assert [counts[i] for i in range(4)] == runs


@pytest.mark.parametrize(("each", "again"), [(1, 0), (2, 1)])
def test_selective_keeps_products(each: int, again: int) -> None:
    """Of two products in a block: neither is computed again, or the second one."""
    first, second = (torch.eye(4, requires_grad=True) for _ in range(2))
    out = made.selective(each)([lambda x: ((x @ first).sin() @ second).sin()], torch.ones(2, 4))
    with _Counter() as counter:
        out.sum().backward()
    assert counter.seen["aten::mm"] == 3 + again, "the gradients of both weights, and that between them"


def test_segments_and_splits() -> None:
    assert made.segment_counts(12) == [2, 3, 4, 5, 7, 8, 10, 12]
    assert made.segment_counts(2) == [2]
    blocks = [len, sum, min, max, any, all, abs]
    assert made.split(blocks, 3) == [blocks[:2], blocks[2:4], blocks[4:]]
    assert made.split(blocks[:1], 2) == [blocks[:1]]


def test_torch_budgets_each_get_their_own_graph_and_both_meters_see_it() -> None:
    case = _four_blocks()
    plain = _step(case.model(), case)
    peaks = []
    for budget in (1.0, 0.5):
        model = made.compiled(case, "aot_eager", budget)
        assert compared(_step(model, case), plain, plain) == "equal"
        peak, seen = meter.model_peak(model, case.batch()), _peak(model, case)
        assert seen <= peak <= 1.01 * seen
        peaks.append(peak)
    assert peaks[1] < 0.9 * peaks[0]


def test_an_unknown_family() -> None:
    with pytest.raises(KeyError):
        made.strategies(models.get("gpt", "small"), ["magic"])


# --- measuring ------------------------------------------------------------------------------------------------


def test_a_model_from_end_to_end() -> None:
    case = _four_blocks()
    record = measure(case, ["checkpoint"], [1.0], rounds=1)
    assert rows.parse(_fields(record)) == record
    assert [point.setting for point in record.points] == ["every block", "every 2nd block", "every 3rd block"]
    assert all(got.storages <= got.peak < record.plain.peak for _, got in record.working)
    least, one = record.ours
    assert one.measured is None
    assert one.mem < one.minimum == least.mem
    assert least.measured is not None
    assert record.floor is not None
    assert record.floor <= least.measured.peak <= least.mem
    assert least.measured.gradients == least.measured.loss == least.measured.buffers == "equal"
    assert least.measured.seconds is not None
    assert page.page([record]).count("checkpoint: every block") >= 1


def test_a_strategy_that_fails_is_recorded() -> None:
    def make() -> nn.Module:
        raise RuntimeError("no such thing\nwith more to say")

    bench = Bench(_four_blocks())
    point = bench.alternative(made.Strategy(family="checkpoint", setting="every block", make=make))
    assert point.measured is None
    assert point.failure == "RuntimeError: no such thing"


def test_a_checkpoint_moves_batch_norm_twice_and_that_is_seen() -> None:
    case = models.get("resnet", "small")
    bench = Bench(case)
    (strategy,) = [s for s in made.strategies(case, ["checkpoint"]) if s.setting == "every block"]
    got = bench.alternative(strategy).measured
    assert got is not None
    assert (got.loss, got.gradients, got.buffers) == ("equal", "equal", "wrong")


def test_kinds() -> None:
    plain, nudged = [torch.ones(4), torch.tensor(3)], [torch.ones(4), torch.tensor(3)]
    assert compared([torch.ones(4), torch.tensor(3)], plain, nudged) == "equal"
    assert compared([torch.ones(4) + 1e-5, torch.tensor(3)], plain, nudged) == "close"
    assert compared([torch.ones(4) + 1e-3, torch.tensor(3)], plain, nudged) == "wrong"
    assert compared([torch.ones(4) + 1e-3, torch.tensor(3)], plain, [nudged[0] + 5e-4, nudged[1]]) == "close"
    assert compared([torch.ones(4), torch.tensor(4)], plain, nudged) == "wrong"
    assert compared(plain[:1], plain, nudged) == "wrong"
    assert difference([torch.tensor([3.0, 4.0])], [torch.tensor([0.0, 4.0])]) == 0.75


def test_in_play_are_those_that_nobody_clearly_beats() -> None:
    rough = replace(GOT, seconds=None)
    field = {
        "small": replace(rough, peak=40, rough=1.5),
        "smaller and faster": replace(rough, peak=30, rough=1.2),
        "as good up to noise": replace(rough, peak=30, rough=1.3),
        "as small and slow": replace(rough, peak=30, rough=1.5),
        "beaten by plain": replace(rough, peak=110, rough=1.3),
        "least": replace(rough, peak=20, rough=3.0),
    }
    assert in_play(rough, field) == ["smaller and faster", "as good up to noise", "least"]


def test_ahead_are_those_that_nobody_beats_by_a_little_in_the_rounds() -> None:
    field = {
        "fast": replace(GOT, peak=30, rough=9.0, seconds=1.0),
        "as good up to noise": replace(GOT, peak=30, rough=1.0, seconds=1.03),
        "slower": replace(GOT, peak=30, rough=1.0, seconds=1.08),
    }
    assert in_play(replace(GOT, peak=100, seconds=1.0), field, 1.05) == ["fast", "as good up to noise"]


def test_the_floor_of_a_graph_by_hand() -> None:
    """Forward, then two gradients; the first one (8 bytes) is there while the second is made."""
    values = [SimpleNamespace(origin=origin) for origin in (Origin.PRIMAL, *[Origin.FORWARD] * 4)]
    ops = [
        SimpleNamespace(index=0, reads=(0,), writes=(1,)),  # 4 bytes and 20 of workspace
        SimpleNamespace(index=1, reads=(1,), writes=(2,)),  # makes the first gradient: 4 + 8
        SimpleNamespace(index=2, reads=(1, 2), writes=(3,)),  # 4 + 8 + 16, the first gradient counted once
        SimpleNamespace(index=3, reads=(1,), writes=(4,)),  # 4 + 1 + 2, and both gradients: 8 + 16
    ]
    joint = SimpleNamespace(ops=ops, values=values, returned=frozenset({2, 3}))
    sizes = SimpleNamespace(values=(1000, 4, 8, 16, 1), workspace=(20, 0, 0, 2))
    plan: Any = SimpleNamespace(
        frontier=SimpleNamespace(keep_all=SimpleNamespace(layout=SimpleNamespace(graph=joint))),
        costs=SimpleNamespace(sizes=sizes),
    )
    assert floor_bytes(plan) == 31


# --- the verdict ----------------------------------------------------------------------------------------------


def _record(**changes: Any) -> Record:
    """Plain takes 1000 bytes and a second; budgets of 800, 400, 200 and 100 bytes."""
    return Record(
        **{
            "model": "gpt",
            "conditions": {},
            "plain": replace(GOT, peak=1000),
            "floor": 100,
            "rounding": 1e-6,
            "first_planning_seconds": 20.0,
            "points": [
                _point("slow", peak=700, seconds=1.5),
                _point("fast", peak=790, seconds=1.25),
                _point("tight", peak=400, seconds=2.0),
                Point(family="nested", setting="broken", measured=None, failure="RuntimeError: no"),
            ],
            "ours": [
                _ours(None, mem=150, peak=150, seconds=1.8),
                _ours(80, mem=800, peak=600, seconds=1.0),
                _ours(40, mem=400, peak=390, seconds=1.6),
                _ours(20, mem=200, peak=199, seconds=1.7),
                Ours(percent=10, mem=100, minimum=150, measured=None),
            ],
            **changes,
        }
    )


def _point(setting: str, **changes: Any) -> Point:
    return Point(family="checkpoint", setting=setting, measured=replace(GOT, **changes))


def _ours(percent: float | None, *, mem: int, **changes: Any) -> Ours:
    got = replace(GOT, **changes)
    return Ours(percent=percent, mem=mem, minimum=150, measured=got, planning_seconds=12.0)


def test_the_best_alternative_is_the_fastest_that_fits() -> None:
    eighty, forty, twenty, ten = cells([_record()])
    assert eighty.best is not None
    assert eighty.best.setting == "fast"
    assert eighty.ratio == pytest.approx(1.0 / 1.25)
    assert forty.best is not None
    assert forty.best.setting == "tight"
    assert forty.ratio == pytest.approx(1.6 / 2.0)
    assert twenty.best is None
    assert twenty.ratio is None
    assert ten.ours.measured is None
    assert page.ratios([_record()])
    least = least_alternative(_record())
    assert least is not None
    assert least[0].setting == "tight"


def test_all_that_is_wanted_holds() -> None:
    assert [claim.holds for claim in claims([_record()])] == [True] * 7
    assert "0.800 over 2 cells" in claims([_record()])[2].found
    assert "1 budgets are met by fxremat alone" in claims([_record()])[3].found


@pytest.mark.parametrize(
    ("changes", "number", "found"),
    [
        ({"ours": [_ours(40, mem=400, peak=401)]}, 0, "1 of 1 above (gpt (fxremat: 40 %))"),
        ({"ours": [Ours(percent=40, mem=400, minimum=9, measured=None, failure="E")]}, 0, "1 failed"),
        ({"ours": [_ours(40, mem=400, peak=399, gradients="close")]}, 1, "1 of 1 differ"),
        ({"ours": [_ours(40, mem=400, peak=399, seconds=1.9)]}, 2, "0.950 over 1 cells"),
        ({"ours": []}, 2, "there are no cells"),
        ({"ours": [_ours(40, mem=400, peak=399, seconds=2.1)]}, 3, "slower in 1 (gpt at 40 % 1.050)"),
        ({"ours": [Ours(percent=40, mem=400, minimum=401, measured=None)]}, 3, "without a plan in 1"),
        ({"ours": [_ours(None, mem=401, peak=401)]}, 4, "more in 1 of 1 models (gpt 40.1 % above 40.0 %)"),
        ({"ours": [_ours(80, mem=800, peak=750), _ours(40, mem=400, peak=300, seconds=1.1)]}, 5, "75.0%"),
        ({"first_planning_seconds": 61.0}, 6, "61.0 s (gpt)"),
    ],
)
def test_what_does_not_hold_is_said(changes: dict[str, Any], number: int, found: str) -> None:
    claim = claims([_record(**changes)])[number]
    assert not claim.holds
    assert found in claim.found
    assert "| **no** |" in page.page([_record(**changes, conditions=CONDITIONS)])


def test_a_point_that_took_no_part_in_the_rounds_has_a_rough_time() -> None:
    record = _record(points=[_point("rough", peak=700, rough=3.0, seconds=None)], conditions=CONDITIONS)
    assert record.slowdown(record.working[0][1]) == 3.0
    assert "| checkpoint: rough | 70.0 % | 9.0 % | ~3.000x |" in page.page([record])


def test_geometric_mean() -> None:
    assert geometric_mean([0.5, 2.0]) == pytest.approx(1.0)


# --- the record and the page ----------------------------------------------------------------------------------

CONDITIONS = {
    "date": "2026-01-01", "cpu": "a processor", "cores": 2, "torch": "2.13", "rounds": 5, "minutes": 1.0,
    "load_before": 0.0, "load_after": 0.0,
}  # fmt: skip


def test_records_join_one_file_model_by_model(tmp_path: Any) -> None:
    path = tmp_path / "new" / "record.json"
    assert rows.read(path) == []
    for record in (_record(model="unet"), _record(model="gpt"), _record(model="unet", floor=7)):
        rows.add(path, record)
    assert [(record.model, record.floor) for record in rows.read(path)] == [("gpt", 100), ("unet", 7)]
    assert [file.name for file in path.parent.iterdir()] == ["record.json"]


def test_the_page_is_that_of_the_record() -> None:
    records = rows.read(page.RESULTS)
    assert records
    assert page.PAGE.read_text(encoding="utf-8") == page.page(records), (
        "run `python -m benchmarks.alternatives --page`"
    )
    assert page.PAGE.with_suffix(".svg").exists()
    assert "](alternatives.svg)" in page.page(records)


# --- helpers --------------------------------------------------------------------------------------------------


class _Counter(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.name()] += 1
        return func(*args, **(kwargs or {}))


def _four_blocks() -> models.Case:
    """A short deep chain."""

    def draw(g: torch.Generator) -> tuple[Tensor, ...]:
        return torch.randn(256, 32, generator=g), torch.randn(256, 32, generator=g)

    return models.Case(name="deep_chain", build=lambda: DeepChain(4, 32), draw=draw)


def _step(model: nn.Module, case: models.Case) -> list[Tensor]:
    """Loss and gradients of one step from a fixed seed."""
    torch.manual_seed(7)
    loss: Any = meter.training_step(model, case.batch())()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return [loss, *gradients]


def _peak(model: nn.Module, case: models.Case) -> int:
    """By the second meter, which is fast."""
    step = meter.training_step(model, case.batch())
    step()
    model.zero_grad()
    return meter.storage_peak(step)


def _fields(record: Record) -> Any:
    import json

    return json.loads(rows.text([record]))[0]
