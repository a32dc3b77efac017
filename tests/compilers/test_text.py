"""Graphs as text: what is written is read back, and `fxremat opt` plans it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fxremat
from fxremat.__main__ import main
from fxremat.compilers.text import from_text, to_text
from fxremat.errors import CaptureError
from fxremat.torch_private import holds_gradients
from tests.compilers.models import EVERY_DAY, case, full_step, inputs_of, joint_graph
from tests.compilers.test_whole_step import run
from tests.passes.test_golden import check

pytestmark = pytest.mark.usefixtures("torch_ready")

QUICK = fxremat.Search(seconds=0.2, progress=False)


@pytest.mark.parametrize("name", EVERY_DAY)
def test_what_is_written_is_read_back(name: str) -> None:
    for graph, outputs in ((joint_graph(case(name)), 1), (full_step(case(name)), None)):
        text = to_text(graph, outputs)
        read = from_text(text)
        assert read.num_fwd_outputs == outputs
        assert to_text(read.module, outputs) == text
    one = case(name)
    given, inputs = full_step(one), inputs_of(one)
    assert all(map(torch.equal, run(from_text(to_text(given)).module, inputs), run(given, inputs)))


@pytest.mark.parametrize(("name", "outputs"), [("gpt", 1), ("resnet", 19)])
def test_a_graph_that_was_read_has_the_plan_of_the_one_that_was_written(name: str, outputs: int) -> None:
    joint = joint_graph(case(name))
    read = from_text(to_text(joint, outputs))
    given = [(each, {"num_fwd_outputs": outputs, "search": QUICK}) for each in (joint, read.module)]
    plans = [fxremat.capture(each, **options).plan("70%") for each, options in given]  # type: ignore[arg-type]
    first, second = ([str(graph.graph) for graph in plan.graphs] for plan in plans)
    assert first == second
    assert [source.module for source in plans[0].graph.sources] == [source.module for source in plans[1].graph.sources]


SMALL = '''# fxremat graph {"num_fwd_outputs": 1, "name": "Net"}
def forward(
    primals_1: "float32[64, 64] cpu",
    primals_2: "float32[64, 64] strides (1, 64) cpu",
    tangents_1: "float32[64, 64] cpu",
):
    mm = torch.ops.aten.mm.default(primals_1, primals_2)
    sin = torch.ops.aten.sin.default(mm)
    cos = torch.ops.aten.cos.default(sin)
    sin_1 = torch.ops.aten.sin.default(sin)
    mul = torch.ops.aten.mul.Tensor(tangents_1, sin_1)
    neg = torch.ops.aten.neg.default(mul)
    cos_1 = torch.ops.aten.cos.default(mm)
    mul_1 = torch.ops.aten.mul.Tensor(neg, cos_1)
    t = torch.ops.aten.t.default(primals_2)
    mm_1 = torch.ops.aten.mm.default(mul_1, t)
    return [cos, mm_1, None]
'''


def test_opt_plans_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config
) -> None:
    file, out = tmp_path / "graph.py", tmp_path / "out.py"
    file.write_text(SMALL)
    assert main(["opt", str(file), "--mem", "min", "--effort", "0"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("def forward(")
    assert "peak" in printed.splitlines()[-1]
    assert main(["opt", str(file), "--mem", "min", "--costs", "H100", "--effort", "0", "-o", str(out)]) == 0
    assert "H100" in capsys.readouterr().out
    if not holds_gradients():  # where autograd holds the output's gradient, recomputing saves nothing here (torch 2.11)
        check("opt", out.read_text(), update=pytestconfig.getoption("--update-golden"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("# fxremat graph", "# a graph"), "line 1 is no graph as to_text writes it: the first line is no"),
        (("aten.neg.default", "aten.nog.default"), "line 12 .*there is no op torch.ops.aten.nog.default here"),
        (("torch.ops.aten.neg.default", "os.system"), "line 12 .*os.system is no op"),
        (("default(mul)", "default(nothing)"), "line 12 .*nothing is not known"),
        (("default(mul)", "default(__import__('os'))"), "line 12 .*is no argument of an op"),
        (('"float32[64, 64] cpu"', '"float31[64, 64] cpu"'), r"line 3 .*'float31\[64, 64\] cpu' is no type"),
        (("mm.default(primals_1, primals_2)", "mm.default(primals_1)"), "line 7 .*mm: RuntimeError: aten::mm"),
        (("    return", "    import os\n    return"), "line 17 .*neither an assignment nor a return"),
        (("def forward(", "def forward"), "is no graph as to_text writes it: "),
    ],
)
def test_what_is_no_graph_is_refused(
    change: tuple[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = SMALL.replace(*change, 1)
    with pytest.raises(CaptureError, match=message):
        from_text(text)
    file = tmp_path / "graph.py"
    file.write_text(text)
    assert main(["opt", str(file), "--mem", "60%"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(message, captured.err)


ARGUMENTS = '''# fxremat graph {"num_fwd_outputs": null, "name": "Net"}
def forward(
    x: "float32[4, 4] cpu",
):
    full = torch.ops.aten.full.default([4], -inf, dtype=torch.float64, device=torch.device("cpu"))
    arange = torch.ops.aten.arange.default(4)
    clone = torch.ops.aten.clone.default(x, memory_format=torch.contiguous_format)
    add = torch.ops.aten.add.Tensor(clone, 2, alpha=3)
    gelu = torch.ops.aten.gelu.default(add, approximate='tanh')
    index = torch.ops.aten.index.Tensor(gelu, [None, arange])
    max_1 = torch.ops.aten.max.dim(index, 1, True)
    getitem = max_1[0]  # {"seq_nr": 3, "partitioner_tag": "is_backward", "module": "layers.0"}
    return {'a': (getitem, None,), 'b': [full]}
'''


def test_arguments_of_every_kind() -> None:
    read = from_text(ARGUMENTS).module
    assert to_text(read) == ARGUMENTS
    found: Any = read(torch.ones(4, 4))
    assert found["b"][0].tolist() == [-torch.inf] * 4
