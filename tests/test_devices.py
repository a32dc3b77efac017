"""A step is planned for one device that fxremat can measure; others are refused in a line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses import FakeTensor, FakeTensorMode

from fxremat.errors import FxrematError
from fxremat.runtime.devices import check_devices


def joint(*devices: str, scalars: tuple[str, ...] = (), frozen: tuple[str, ...] = ()) -> Any:
    """A graph of trained inputs on these devices, of numbers, and of inputs that take no gradient."""
    graph, mode = fx.Graph(), FakeTensorMode()
    primals = []
    for device, shape in [*((d, (2,)) for d in devices), *((d, ()) for d in scalars), *((d, (2,)) for d in frozen)]:
        node = graph.placeholder(f"primals_{len(primals) + 1}")
        node.meta["val"] = FakeTensor(mode, torch.empty(shape, device="meta"), torch.device(device))
        primals.append(node)
    gradients = (*primals[: len(devices)], *(None for _ in (*scalars, *frozen)))
    return SimpleNamespace(
        module=SimpleNamespace(graph=graph), primals=tuple(primals), backward_outputs=gradients
    )


@pytest.mark.parametrize(
    "fine",
    [
        joint("cpu", "cpu"),
        joint("cuda:1", "cuda:1"),
        joint("cuda:0", scalars=("cpu",)),
        joint("cuda:0", frozen=("cpu",)),
        joint("mps:0"),
        joint("xpu:0", scalars=("cpu",)),
    ],
    ids=["cpu", "a GPU", "a number beside it", "a mask beside it", "mps", "xpu"],
)
def test_one_device(fine: Any) -> None:
    check_devices(fine)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (joint("cuda:0", "cuda:1"), r"2 devices \(cuda:0, cuda:1\)"),
        (joint("hpu:0"), "hpu:0.*plans for CPU, CUDA, XPU, MPS"),
        (joint("meta"), r'meta device.*costs="estimate"'),
        (joint("cuda:0", "cpu"), r"Offload\(weights=True\)"),
    ],
    ids=["two GPUs", "a kind that is not known", "shapes alone", "a parameter on the host"],
)
def test_other_devices_are_refused(wrong: Any, says: str) -> None:
    with pytest.raises(FxrematError, match=says) as error:
        check_devices(wrong)
    assert "\n" not in str(error.value)
