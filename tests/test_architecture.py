"""The rooms of fxremat and the one direction of dependency between them, as docs/architecture.md draws them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fxremat"
ROOMS = (  # what stands further left may use what stands further right, never back
    *("__main__", "__init__", "integrations", "fitting", "factories", "api", "what_if", "pipelining", "runtime"),
    *("compilers", "planning", "options", "profiles", "plan_of_graphs", "plans", "show", "plan_check", "plan_file"),
    *("planned_step", "planned_graphs", "kernels", "settings"),
    *("cost", "fusion", "slices", "passes", "ops", "graphs", "transfers", "search", "linearize", "step"),
    *("solvers", "chains", "host", "budget", "device"),
    *("agreement", "heartbeat", "torch_inductor", "torch_private", "jit", "progress", "data_stack"),
    *("store", "units", "logs", "errors"),
)


def imports(file: Path) -> set[tuple[str, str]]:
    """The modules of fxremat that a file takes names from, with the names."""
    nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
    return {(n.module or "", a.name) for n in nodes if (n.module or "").startswith("fxremat") for a in n.names}


def room_of(module: str, name: str = "") -> str:
    parts = module.split(".")[1:] or [name if (PACKAGE / f"{name}.py").exists() else "__init__"]
    return parts[0]


FILES = sorted(PACKAGE.rglob("*.py"))
NAMED = {("__main__", "__init__"), ("passes", "compilers")}  # public names, imported on first use


def test_nothing_depends_on_what_stands_above_it() -> None:
    upwards = []
    for file in FILES:
        here = room_of(".".join(("fxremat", *file.relative_to(PACKAGE).with_suffix("").parts)))
        for module, name in imports(file):
            there = room_of(module, name)
            if ROOMS.index(there) < ROOMS.index(here) and (here, there) not in NAMED:
                upwards.append(f"{file.relative_to(PACKAGE)} uses {module}.{name}")
    assert upwards == []


def test_rooms_that_need_no_torch_name_none() -> None:
    """Rooms that plan with numbers work on a machine without PyTorch too, and on graphs that were read from a file."""
    named = {
        str(file.relative_to(PACKAGE))
        for room in ("step", "chains", "solvers", "linearize", "search", "transfers")
        for file in (PACKAGE / room).rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "torch" for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch")
    }
    assert named == set()


def test_no_circle_of_files() -> None:
    name_of = {file: ".".join(("fxremat", *file.relative_to(PACKAGE).with_suffix("").parts)) for file in FILES}
    known = {name.removesuffix(".__init__") for name in name_of.values()}
    uses = {
        name.removesuffix(".__init__"): {
            f"{module}.{item}" if f"{module}.{item}" in known else module for module, item in imports(file)
        }
        for file, name in name_of.items()
    }
    uses["fxremat"] = set()  # public names, some of them used by the command line
    while uses:
        free = {name for name, others in uses.items() if not (others - {name}) & uses.keys()}
        assert free, f"a circle among {sorted(uses)}"
        uses = {name: others for name, others in uses.items() if name not in free}


def test_references_are_asked_by_name_and_compared_with_but_nothing_else_needs_them() -> None:
    for file in FILES:
        inside = file.relative_to(PACKAGE).parts
        if inside[:2] != ("solvers", "references") and inside[-1] != "pipeline.py":
            assert not [m for m, _ in imports(file) if m.startswith("fxremat.solvers.references")], file


def test_the_page_on_architecture_names_files_and_rooms_that_there_are() -> None:
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?|\w+\.py)`", page))
    assert len(named) > 20
    there = [PACKAGE, PACKAGE.parent]
    assert [name for name in sorted(named) if not any((root / name).exists() for root in there)] == []
    rooms = re.search(r"```\n( __main__.*?)```", page, re.DOTALL)
    assert rooms
    drawn = [room.strip("/") for line in rooms[1].splitlines() for room in line[:38].split()]
    assert set(ROOMS) - set(drawn) <= {"budget", "progress"}


@pytest.mark.parametrize("statement", ["import fxremat", "fxremat.solve", "fxremat.Chain", "fxremat.simulate"])
def test_chains_and_solvers_need_no_torch(statement: str) -> None:
    code = f"""
import sys
sys.modules["torch"] = None  # as where it is not installed: importing it raises
import fxremat
{statement}
block = fxremat.Block(forward_time=1.0, backward_time=2.0, output_bytes=4, saved_bytes=9)
chain = fxremat.Chain(blocks=(block, block), input_bytes=4)
if {statement!r} == "fxremat.solve":
    print(fxremat.solve(chain, 25))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    if statement == "fxremat.solve":
        assert done.stdout.strip() == "Fck1 Fall2 B2 Fall1 B1"


def test_public_modules_are_there_after_importing_fxremat() -> None:
    code = """
import fxremat
print(fxremat.passes.InductorPartitioner.__name__, fxremat.integrations.__name__)
for module, name in ((fxremat, "pass_"), (fxremat.integrations, "keras")):
    try:
        getattr(module, name)
    except AttributeError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "InductorPartitioner fxremat.integrations",
        "module 'fxremat' has no attribute 'pass_'",
        "module 'fxremat.integrations' has no attribute 'keras'",
    ]


def test_compiling_imports_neither_pipelines_nor_published_solvers() -> None:
    code = "import sys, fxremat.api; print([m for m in sys.modules if 'fxremat.pipelin' in m or '.references' in m])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_fxremat_imports_neither_torch_nor_kernels() -> None:
    code = "import sys, fxremat; print([m for m in ('torch', 'numba', 'scipy', 'networkx') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
