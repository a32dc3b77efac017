"""A plan in a notebook: its page in a frame that reaches nothing, and bars that appear without a terminal."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterable
from html.parser import HTMLParser
from types import ModuleType
from typing import Any

import pytest

from fxremat import progress as module
from fxremat.cost.estimate import Device
from fxremat.progress import bars, in_notebook, progress
from tests.exported import PLANS, Deep, planned

pytestmark = pytest.mark.usefixtures("torch_ready")


class _Frames(HTMLParser):
    """The attributes of every frame of a page, and the text outside of them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.frames: list[dict[str, str | None]] = []
        self.tags: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "iframe":
            self.frames.append(dict(attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_plan_shows_its_page_in_a_frame_and_its_text_below() -> None:
    plan = PLANS["plain"]()
    found = _Frames(plan._repr_html_())
    (frame,) = found.frames
    assert frame["srcdoc"] == plan.to_html()
    assert frame["sandbox"] == "allow-scripts"  # above all, not allow-same-origin
    assert "src" not in frame
    assert found.tags == ["iframe", "details", "summary", "pre"]
    assert str(plan) in found.text


def test_names_do_not_leave_the_frame() -> None:
    device = Device(name='"></iframe><script>x</script>', flops=1e12, half_flops=1e12, bandwidth=1e11, link=1e9)
    plan = planned(Deep(), "60%", costs=device)
    found = _Frames(plan._repr_html_())
    assert found.tags == ["iframe", "details", "summary", "pre"]
    assert found.frames[0]["srcdoc"] == plan.to_html()


def test_the_representation_is_a_line() -> None:
    """A notebook keeps it beside the page."""
    plan = PLANS["plain"]()
    assert repr(plan) == f"<fxremat plan: {plan.headline}>"


# --- bars -------------------------------------------------------------------------------------------------------------


class InteractiveShell:
    """A shell in a terminal."""


class ZMQInteractiveShell(InteractiveShell):
    """The shell of a kernel."""


class Shell(ZMQInteractiveShell):
    """The shell of a service that derives its own class from a kernel's."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The settings of every bar that is made as text."""
    found: list[dict[str, Any]] = []

    def tqdm(steps: Iterable[Any], **settings: Any) -> Any:
        found.append(settings)
        return original(steps, **{**settings, "disable": True})

    original = module.tqdm
    monkeypatch.setattr(module, "tqdm", tqdm)
    return found


def shell(monkeypatch: pytest.MonkeyPatch, running: object) -> None:
    """Let IPython be imported, with this shell."""
    ipython: Any = ModuleType("IPython")
    ipython.get_ipython = lambda: running
    monkeypatch.setitem(sys.modules, "IPython", ipython)


@pytest.mark.parametrize(
    ("running", "expected"),
    [(None, False), (InteractiveShell(), False), (ZMQInteractiveShell(), True), (Shell(), True)],
)
def test_a_kernel_is_recognized_by_its_shell(
    monkeypatch: pytest.MonkeyPatch, running: object, expected: bool
) -> None:
    shell(monkeypatch, running)
    assert in_notebook() is expected


def test_ipython_is_not_imported_to_find_out() -> None:
    code = "import sys; from fxremat.progress import *; from fxremat.progress import in_notebook\n"
    code += "assert not in_notebook(); list(progress([1], 'x')); print([m for m in ('IPython',) if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_a_module_that_is_half_imported_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    assert not in_notebook()


def test_without_widgets_the_bar_is_text_and_nobody_is_warned(
    monkeypatch: pytest.MonkeyPatch, made: list[dict[str, Any]]
) -> None:
    """`tqdm.auto` warns then, and warnings are errors here."""
    shell(monkeypatch, ZMQInteractiveShell())
    monkeypatch.setattr("tqdm.notebook.IProgress", None, raising=False)
    module.notebook_bar.cache_clear()
    try:
        assert list(progress([1, 2], "shown")) == [1, 2]
        with bars(shown=False):
            list(progress([1], "not shown"))
    finally:
        module.notebook_bar.cache_clear()
    assert [settings["disable"] for settings in made] == [False, True]


def test_with_widgets_the_bar_is_a_widget(monkeypatch: pytest.MonkeyPatch, made: list[dict[str, Any]]) -> None:
    widgets: list[dict[str, Any]] = []

    class Bar:
        def __init__(self, steps: Iterable[Any], **settings: Any) -> None:
            self.steps = steps
            widgets.append(settings)

        def __enter__(self) -> Iterable[Any]:
            return self.steps

        def __exit__(self, *_: object) -> None: ...

    shell(monkeypatch, ZMQInteractiveShell())
    monkeypatch.setattr(module, "notebook_bar", lambda: Bar)
    assert list(progress([1, 2], "measuring ops")) == [1, 2]
    with bars(shown=False):
        list(progress([1], "hidden"))
    assert made == []
    assert [bar["disable"] for bar in widgets] == [False, True]
    assert widgets[0] == {
        "desc": "fxremat: measuring ops",
        "total": None,
        "delay": module.DELAY,
        "leave": False,
        "disable": False,
    }


CELLS = (
    """
import time, torch, fxremat, fxremat.progress
from torch import nn
fxremat.progress.DELAY = 1e-6  # seconds; bars appear past two otherwise

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()
""",
    "plan = fxremat.plan(Net(), (torch.ones(256, 16),), mem='80%')",
    "plan",
    "plan.frontier",
    "plan.diff(plan.within('100%'))",
    """
for step in fxremat.progress.progress(range(100), 'left early'):
    time.sleep(0.02)
    if step == 30:
        break
""",
    """
with fxremat.progress.bars(shown=False):
    for step in fxremat.progress.progress(range(10), 'hidden'):
        time.sleep(0.02)
""",
)


@pytest.mark.long
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("nbclient", "nbformat", "ipykernel")),
    reason="needs nbclient, nbformat and ipykernel, of the extra `libraries`",
)
@pytest.mark.parametrize("widgets", [True, False], ids=["widgets", "text"])
def test_in_a_real_notebook(widgets: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if widgets:
        pytest.importorskip("ipywidgets", reason="needs ipywidgets, of the extra `libraries`")
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path))  # every op is measured anew, which is what the bar is of
    monkeypatch.setenv("TQDM_MININTERVAL", "0")  # every step is shown
    hidden = "import sys; sys.modules['ipywidgets'] = None  # as where it is not installed\n" * (not widgets)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(hidden + CELLS[0])])
    notebook.cells += [nbformat.v4.new_code_cell(cell) for cell in CELLS[1:]]
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}).execute()
    _, planning, shown, frontier, difference, early, none = ([*cell.outputs] for cell in notebook.cells)

    assert any("fxremat: measuring ops" in text for text in map(_text, planning)), planning
    (page,) = shown
    assert page.output_type == "execute_result"
    assert page.data["text/html"].startswith("<iframe srcdoc=")
    assert page.data["text/plain"].startswith("<fxremat plan: peak ")
    assert "<table>" in frontier[-1].data["text/html"]
    assert "budget" in difference[-1].data["text/html"]
    assert any("fxremat: left early" in text for text in map(_text, early)), early
    assert all("danger" not in str(output) for output in early)
    assert none == []
    kinds = {output.output_type for output in (*planning, *early)}
    assert kinds == ({"display_data"} if widgets else {"stream"})
    assert all("Warning" not in _text(output) for output in (*planning, *early))


def _text(output: Any) -> str:
    """The text that an output shows; tqdm puts other spaces into widgets."""
    text = output.text if output.output_type == "stream" else output.data.get("text/plain", "")
    return str(text).replace("\u2007", " ")
