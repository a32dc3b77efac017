"""Tests of every solver by name, and of "auto": schedules are valid and fit, and more memory never costs time."""

import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fxremat.chains.chain import Chain
from fxremat.chains.platform import Platform
from fxremat.chains.schedule import Schedule
from fxremat.chains.simulate import simulate
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.solvers import CHOSEN, NAMES, SOLVERS, best, exact, keep_all, registry, solution
from tests.dags import few
from tests.draws import everyday
from tests.solvers.chains import chains

PLATFORMS = st.builds(
    lambda speed, duplex: Platform(to_host=speed, from_host=speed, duplex=duplex),
    st.sampled_from([0.01, 0.5, 3.0, 1e6]),
    st.sampled_from(["full", "half"]),
)
COMPUTE = sorted(name for name, solver in SOLVERS.items() if not solver.transfers)
TRANSFERS = sorted(name for name, solver in SOLVERS.items() if solver.transfers)


def ask(chain: Chain, mem: int, solver: str, platform: Platform | None):
    """The simulation of a solver's answer; where nothing fits, the error's minimum must be right and is asked."""
    try:
        return mem, best(chain, mem, solver=solver, platform=platform, effort=0.05)
    except BudgetTooSmall as error:
        mem = error.minimum
    return mem, best(chain, mem, solver=solver, platform=platform, effort=0.05)


@pytest.mark.parametrize("solver", COMPUTE)
@few(everyday(40))
@given(chains(4, options=1), st.integers(0, 40))
def test_schedules_are_valid_fit_and_do_not_beat_exact(solver, chain, mem):
    mem, timeline = ask(chain, mem, solver, None)
    assert timeline.peak <= mem
    assert Schedule.parse(str(timeline.schedule)) == timeline.schedule
    (fastest,) = exact.schedules(chain, mem)
    assert timeline.time >= simulate(chain, fastest).time - 1e-9


@pytest.mark.parametrize("solver", TRANSFERS)
@few(everyday(25))
@given(chains(4), st.integers(0, 40), PLATFORMS)
def test_schedules_with_transfers_are_valid_and_fit(solver, chain, mem, platform):
    mem, timeline = ask(chain, mem, solver, platform)
    assert timeline.peak <= mem
    assert timeline.time >= chain.least_time - 1e-9
    assert Schedule.parse(str(timeline.schedule)) == timeline.schedule


@pytest.mark.parametrize("solver", COMPUTE)
@few(everyday(15))
@given(chains(4, options=1), st.integers(0, 20))
def test_more_memory_never_costs_time(solver, chain, mem):
    mem, _ = ask(chain, mem, solver, None)
    times = [best(chain, mem + more, solver=solver).time for more in range(8)]
    assert all(after <= before + 1e-9 for before, after in pairwise(times))


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Local searches of a few steps, whatever the effort."""
    monkeypatch.setattr(registry, "_MOST_TRIES", 50)


@pytest.mark.usefixtures("short_search")
@few(everyday(15))
@given(chains(4, options=1), st.integers(0, 40), st.none() | PLATFORMS)
def test_auto_is_never_worse_than_any_of_those_it_had_time_for(chain, mem, platform):
    try:
        found = solution(chain, mem, platform=platform, effort=600.0)  # compiling takes some
    except BudgetTooSmall as error:
        mem = error.minimum
        found = solution(chain, mem, platform=platform, effort=600.0)  # compiling takes some
    assert found.solver in CHOSEN
    assert found.lower_bound - 1e-9 <= found.timeline.time
    assert found.fluid_time <= found.timeline.time + 1e-9
    for name in CHOSEN if platform else set(CHOSEN) & set(COMPUTE):
        try:
            alone = best(chain, mem, solver=name, platform=platform, effort=0.05)
        except BudgetTooSmall:
            continue
        assert found.timeline.time <= alone.time + 1e-9, name


def test_auto_keeps_to_its_allowance_but_always_answers():
    from benchmarks.solvers import uneven

    chain = uneven(60)
    mem = simulate(chain, keep_all.schedules(chain)[0]).peak // 3
    best(chain, mem, slots=100, effort=0.0)  # compiles
    before = time.process_time()
    quick = solution(chain, mem, slots=100, effort=0.0)
    assert time.process_time() - before < 10.0  # floating_drop alone would take longer
    assert quick.timeline.time <= best(chain, mem, solver="input_drop", slots=100).time


def test_a_solver_with_transfers_needs_a_link():
    for name in TRANSFERS:
        with pytest.raises(FxrematError, match="to_host"):
            best(chain_of_one(), 100, solver=name)


def test_the_memory_of_the_platform_is_a_limit_too():
    chain = Chain.from_json({"input_bytes": 1, "blocks": [BLOCK] * 4})
    small = best(chain, 1000, platform=Platform(memory=12))
    assert small.peak <= 12
    assert small.time > best(chain, 1000).time
    with pytest.raises(BudgetTooSmall, match="3 bytes"):
        best(chain, 1000, platform=Platform(memory=3))


@few(everyday(15))
@given(chains(4), st.integers(0, 30))
def test_a_link_that_carries_nothing_is_no_link(chain, mem):
    still = Platform(to_host=0.0, from_host=0.0)
    mem, persistent = ask(chain, mem, "persistent", None)
    assert best(chain, mem, solver="pofo", platform=still).time == pytest.approx(persistent.time)
    for name in TRANSFERS:
        mem, timeline = ask(chain, mem, name, still)
        assert timeline.sent == 0
        assert timeline.peak <= mem


def test_only_the_registry_knows_the_references():
    folder = Path(registry.__file__).parent
    for path in folder.rglob("*.py"):
        if path.name != "registry.py" and "references" not in path.relative_to(folder).parts:
            assert "solvers.references" not in path.read_text(), path


def test_unknown_names_and_bad_efforts_are_refused():
    with pytest.raises(FxrematError, match="input_drop"):
        best(chain_of_one(), 100, solver="best")
    with pytest.raises(FxrematError, match="effort is nan"):
        best(chain_of_one(), 100, effort=float("nan"))
    assert NAMES[0] == "auto"


BLOCK = {"forward_time": 1, "backward_time": 1, "output_bytes": 1, "saved_bytes": 3}


def chain_of_one() -> Chain:
    return Chain.from_json({"input_bytes": 1, "blocks": [BLOCK]})
