"""The pages of docs/: their Python runs and prints what they show, and the site is built of all of them.

The blocks of a page run in page order, in one namespace and in a folder of their own. A block of `>>>` lines is a
doctest. Where a text block follows a Python block, it is what that block prints, with the last line of the traceback
where the block raises; `...` stands for anything, and lines may be broken anywhere between words:

    ```python
    fxremat.compile(model, mem="a lot")
    ```

    ```text
    fxremat.errors.InvalidBudget: mem='a lot' is not a budget; ...
    ```

`PREPARATIONS` has what the reader has: the model, the inputs, a job's environment.
"""

from __future__ import annotations

import contextlib
import doctest
import functools
import importlib.util
import io
import linecache
import os
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxremat
from fxremat import errors, passes
from tests.test_readme import job_of_one

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))
LONG = {  # slow, or of `libraries`
    *("errors.md", "fits.md", "gallery.md", "kernels.md", "models.md", "solvers.md"),
    *("guides/fsdp.md", "guides/means.md", "guides/test-memory.md"),
    *("guides/diffusion.md", "guides/lightning.md", "guides/long-context.md", "guides/trainer.md"),
    *("guides/vision-language.md",),
}
LIBRARIES = {
    "fits.md": "transformers",
    "guides/diffusion.md": "diffusers",
    "guides/lightning.md": "lightning",
    "guides/long-context.md": "transformers",
    "guides/trainer.md": "transformers",
    "guides/trl.md": "trl",
    "guides/vision-language.md": "transformers",
    "models.md": "transformers",
}
BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$(?:\s*^\1```text\n(.*?)^\1```$)?", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")

pytestmark = pytest.mark.usefixtures("torch_ready")


@dataclass(frozen=True, kw_only=True)
class Code:
    """A Python block of a page."""

    text: str
    shown: str | None  # the text block after it
    line: int  # of the page, where the block begins


def blocks_of(page: str) -> list[Code]:
    """The Python blocks of a page's text."""
    return [
        Code(
            text=textwrap.dedent(match[2]),
            shown=None if match[3] is None else textwrap.dedent(match[3]),
            line=page.count("\n", 0, match.start()) + 2,
        )
        for match in BLOCK.finditer(page)
    ]


# --- what the reader has ------------------------------------------------------------------------------------


class Model(nn.Module):
    """Six blocks; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.blocks(x).square().mean()
        return loss


class Llama(Model):
    """A stand-in for a language model: the pages write its arguments as `...`."""

    def __init__(self, _: object) -> None:
        super().__init__()
        self.words = nn.Embedding(128, 64)

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(self.words(tokens))


Names = contextlib.AbstractContextManager[dict[str, Any]]


@contextlib.contextmanager
def a_model(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    yield {"fxremat": fxremat, "torch": torch, "model": Model(), "Llama": Llama}


@contextlib.contextmanager
def a_sharded_model(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    with job_of_one(folder), a_model(folder, patch) as names:
        yield names


@contextlib.contextmanager
def a_small_gpt(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The library's configuration, of a small model."""
    import transformers

    small = functools.partial(transformers.GPT2Config, n_layer=2, n_embd=64, n_head=2, vocab_size=128)
    patch.setattr(transformers, "GPT2Config", small)
    yield {"input_ids": torch.randint(128, (8, 64))}


@contextlib.contextmanager
def an_environment_of_torchrun(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A job of one process."""
    job = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    for name, value in job.items():
        patch.setenv(name, str(value))
    try:
        yield {}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def nothing(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    yield {}


PREPARATIONS: dict[str, Callable[[Path, pytest.MonkeyPatch], Names]] = {
    "compression.md": a_model,
    "distributed.md": a_sharded_model,
    "gpu.md": a_model,
    "guides/ddp.md": an_environment_of_torchrun,
    "guides/fsdp.md": an_environment_of_torchrun,
    "index.md": a_model,
    "models.md": a_small_gpt,
    "shapes.md": a_model,
    "slices.md": a_model,
    "solvers.md": a_model,
    "what-if.md": a_model,
}


# --- running ------------------------------------------------------------------------------------------------


def run(code: Code, file: Path, names: dict[str, Any]) -> str:
    """Execute a block, and return what it prints, with the last line of the traceback where it shows an error.

    The block is appended to a file, where errors that name a line of the reader's code find it.
    """
    before = file.read_text() if file.exists() else ""
    file.write_text(before + code.text)
    linecache.checkcache(str(file))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            exec(compile("\n" * before.count("\n") + code.text, str(file), "exec"), names)
        except Exception as error:
            if code.shown is None:
                raise
            kind = type(error)
            place = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
            print(f"{place}{kind.__qualname__}: {error}")
    return printed.getvalue()


def run_doctest(code: str, place: str, names: dict[str, Any]) -> None:
    test = doctest.DocTestParser().get_doctest(code, {}, place, place, 0)
    test.globs = names  # not a copy: later blocks go on with what this one defines
    said = io.StringIO()
    failed, _ = doctest.DocTestRunner().run(test, out=said.write, clear_globs=False)
    if failed:
        raise AssertionError(said.getvalue())


def is_shown(printed: str, shown: str) -> bool:
    """Tell whether a text of a page is what was printed."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return doctest.OutputChecker().check_output(shown, printed, flags)


def check_page(page: str, name: str, folder: Path, names: dict[str, Any]) -> None:
    """Run the blocks of a page one after the other. Raises AssertionError where one prints something else."""
    for code in blocks_of(page):
        place = f"docs/{name}:{code.line}"
        if ">>> " in code.text:
            run_doctest(code.text, place, names)
            continue
        try:
            printed = run(code, folder / "train.py", names)
        except Exception as error:
            error.add_note(f"in the block at {place}")
            raise
        if code.shown is not None and not is_shown(printed, code.shown):
            raise AssertionError(f"{place} prints\n{printed}\ninstead of\n{code.shown}")


def marked(name: str) -> Any:
    """A page as a parameter; libraries raise warnings of their own."""
    marks = [pytest.mark.long] if name in LONG else []
    return pytest.param(name, marks=[*marks, *[pytest.mark.filterwarnings("ignore")] * (name in LIBRARIES)])


@pytest.mark.parametrize("name", [marked(name) for name in PAGES])
def test_the_blocks_of_a_page_run_and_print_what_it_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (DOCS / name).read_text()
    assert len(blocks_of(page)) == len(re.findall(r"^ *[`~]{3,}py", page, re.MULTILINE)), "a block is not closed"
    if not blocks_of(page):
        return
    if name in LIBRARIES:
        pytest.importorskip(LIBRARIES[name], reason=f"docs/{name} needs {LIBRARIES[name]}, which is not installed")
    code = types.ModuleType(re.sub(r"\W", "_", name))  # a name of its own: dynamo remembers modules by name
    monkeypatch.setitem(sys.modules, code.__name__, code)
    monkeypatch.chdir(tmp_path)
    with PREPARATIONS.get(name, nothing)(tmp_path, monkeypatch) as names:
        vars(code).update(names)
        check_page(page, name, tmp_path, vars(code))


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("```python\nprint(1)\n```\n\n```text\n2\n```\n", "prints"),
        ("```python\n1 / 0\n```\n", "division by zero"),
        ("```python\nx = 1\n```\n\n```text\nZeroDivisionError: division by zero\n```\n", "prints"),
        ("```python\n1 / 0\n```\n\n```text\nKeyError: ...\n```\n", "ZeroDivisionError: division by zero"),
        ("```python\n>>> 1 + 1\n3\n\n```\n", "Got:\n    2"),
        ("1. Indented\n\n   ```python\n   undefined\n   ```\n", "is not defined"),
    ],
)
def test_a_page_that_is_wrong_is_noticed(page: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=re.escape(said)):
        check_page(page, "wrong.md", tmp_path, {})


def test_later_blocks_know_the_names_of_earlier_ones(tmp_path: Path) -> None:
    first = "```python\n>>> x = 1\n\n```\n"
    second = "```python\nprint(x)\n1 / 0\n```\n\n```text\n1\nZero...: division by\nzero\n```\n"
    check_page(first + second, "right.md", tmp_path, {})


# --- what the site consists of ------------------------------------------------------------------------------


def entries(nav: Any) -> Iterator[str]:
    """The pages in a part of the navigation of mkdocs.yml."""
    match nav:
        case str():
            yield nav
        case list() | dict():
            for part in nav if isinstance(nav, list) else nav.values():
                yield from entries(part)


def test_the_navigation_has_every_page_once() -> None:
    yaml = pytest.importorskip("yaml", reason="mkdocs.yml is read with PyYAML, which is not installed")
    listed = list(entries(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert sorted(listed) == PAGES


def test_the_list_for_language_models_has_every_page_once() -> None:
    listed = re.findall(r"^- \[.+\]\((.+)\)$", (DOCS / "llms.txt").read_text(), re.MULTILINE)
    assert sorted(listed) == PAGES


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name: str) -> None:
    page = re.sub(r"^ *```.*?^ *```", "", (DOCS / name).read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = {target for target in LINK.findall(page) if not target.startswith("http")}
    assert [target for target in sorted(targets) if not ((DOCS / name).parent / target).exists()] == []


def test_the_page_on_errors_has_every_class() -> None:
    kinds = (value for value in vars(errors).values() if isinstance(value, type))
    classes = [kind.__name__ for kind in kinds if issubclass(kind, errors.FxrematError)]
    headings = re.findall(r"^## `(\w+)`", (DOCS / "errors.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(classes)


def test_the_reference_has_every_public_name_once() -> None:
    shown = re.findall(r"^::: (\S+)", (DOCS / "reference.md").read_text(), re.MULTILINE)
    public = {f"{module.__name__}.{name}" for module in (fxremat, passes) for name in module.__all__}
    assert len(shown) == len(set(shown))
    assert public - set(shown) == {f"fxremat.{name}" for name in vars(errors) if name in fxremat.__all__}


def test_the_front_page_says_how_to_install_and_shows_a_plan() -> None:
    """Whoever comes there sees a picture and copies two blocks, which a phone shows without scrolling."""
    page = (DOCS / "index.md").read_text()
    blocks = re.findall(r"^```\w+\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert blocks[0] == "pip install fxremat\n"
    assert "fxremat.compile(" in blocks[1]
    assert max(len(line) for block in blocks for line in block.splitlines()) <= 44
    pictures = re.findall(r'(?:src|srcset)="(.*?)"', page)
    assert len(pictures) == 2
    assert all((DOCS / picture).is_file() for picture in pictures)
    assert page.index("<picture>") < page.index("\n## ")


@pytest.mark.long
def test_the_site_builds_and_fetches_nothing(tmp_path: Path) -> None:
    if importlib.util.find_spec("material") is None or importlib.util.find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs-material and mkdocstrings-python are not installed: they are in the extra `docs`")
    # Without --quiet, which drops the warnings before --strict counts them.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    built = {path.relative_to(tmp_path).with_suffix(".md").as_posix() for path in tmp_path.rglob("*.html")}
    assert set(PAGES) <= built
    assert {path.name for path in DOCS.rglob("*.svg")} <= {path.name for path in tmp_path.rglob("*.svg")}
    fetched = r"""<(?:script|link|img|iframe)[^>]*(?:src|href)=["']?(?:https?:)?//[^>]*>"""
    assert [found for path in tmp_path.rglob("*.html") for found in re.findall(fetched, path.read_text())] == []
