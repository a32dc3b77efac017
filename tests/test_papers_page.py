"""docs/papers.md says what the saved figures say; the chains behind them can be read and solved."""

import pytest

from benchmarks.papers import page
from benchmarks.papers.chains import FOLDER, as_in_the_papers, read
from benchmarks.papers.figure import PICTURES, RESULTS, Figure
from fxremat.chains.simulate import simulate
from fxremat.solvers import best, keep_all

NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))

pytestmark = pytest.mark.long


def test_the_page_is_that_of_the_saved_figures():
    assert page.PAGE.read_text(encoding="utf-8") == page.page(), "run python -m benchmarks.papers page"


def test_every_figure_has_its_numbers_its_picture_and_a_claim():
    for name in page.ORDER:
        assert Figure.load(name).claims
        assert (PICTURES / f"{name}.svg").exists()
    assert {path.stem for path in RESULTS.glob("*.json")} == set(page.ORDER)


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_of_a_network_can_be_solved(name):
    chain = as_in_the_papers(read(name))
    assert chain.name == name
    peak = simulate(chain, keep_all.schedules(chain)[0]).peak
    timeline = best(chain, peak * 2 // 3, solver="persistent", slots=60)
    assert timeline.peak <= peak * 2 // 3
    assert timeline.time < 2 * chain.least_time
