"""The origin of the ops of a captured step: the module and the line of the model's code.

    sources_of(nodes)    for each op Source("transformer.h.3.mlp.c_fc", Frame("net.py", 31, "forward", "x = ..."))

dynamo records in `meta` which modules were being called (`nn_module_stack`), and AOTAutograd records for an op
of the backward the modules of its forward op (`fwd_nn_module_stack`); both are dicts from a module's id to its
path and class (torch 2.11 and 2.13). Ops in the forward of the model itself have neither, and their module is
"". An addition by which autograd sums gradients of a tensor with several users has no such record either: its
module is the innermost one that contains the ops before and after it.
"""

from __future__ import annotations

import os
import re
from ast import literal_eval
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from fxremat.step.source import Frame, Source, common_module
from fxremat.torch_private import function_resumed, without_dict

# In a module's path, dynamo writes each part as an attribute, or as a key in brackets, quoted as by `repr`.
_KEY = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\d+"""
_PART = re.compile(rf"""\.(?!_modules\[)((?:[^.'"\[]|\[(?!(?:{_KEY})\]))+)|\[({_KEY})\]""")
_GETATTR = re.compile(rf"""getattr\(([^()]*), ({_KEY})\)""")
# keys in the `meta` of a joint graph's inputs: the parameter's name and the model's class
NAME, MODEL = "fxremat_name", "fxremat_model"
# the folders of this library and of PyTorch
_NOT_THE_USERS = tuple(str(path) + os.sep for path in (Path(__file__).parents[1], Path(torch.__file__).parent))
FLOAT = "fxremat_float"  # key in `meta`: True for an input that dynamo makes from a Python float at each call


def frame_of(node: fx.Node) -> Frame | None:
    """Return file, line, function and source code of an op; None if tracing did not record it.

    It is the innermost line outside of PyTorch and of fxremat, which casts and gathers parameters in calls of the
    user's modules.
    """
    frames = re.findall(r'File "(.+)", line (\d+), in (<?\w+>?)\n *(.*)', node.meta.get("stack_trace") or "")
    if not frames:
        return None
    others = (frame for frame in reversed(frames) if not frame[0].startswith(_NOT_THE_USERS))
    file, line, function, code = next(others, frames[-1])
    return Frame(file=file, line=int(line), function=function_resumed(function), code=code)


def place_of(node: fx.Node) -> str:
    """Return the source line of an op, as `model.py:12 in forward: code`; "" if tracing did not record it."""
    frame = frame_of(node)
    return f"{frame.file}:{frame.line} in {frame.function}: {frame.code}" if frame else ""


def source_of(node: fx.Node) -> str:
    """Return the source line of an op behind a comma, for messages; "" if tracing did not record it."""
    return f", {place}" if (place := place_of(node)) else ""


def module_of(node: fx.Node) -> str:
    """Return the submodule of an op, such as "layers.3.up"; for a backward op, that of its forward op; "" if unknown.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return _module_at(str([*stack.values()][-1][0]) if stack else "")


@lru_cache(maxsize=4096)
def _module_at(path: str) -> str:
    """Return a submodule's name, as in `named_modules()`, from its path in dynamo's notation."""
    path, before = without_dict(path), ""
    while path != before:  # dynamo may write getattr(..., 'name') for a name that is not an identifier
        before, path = path, _GETATTR.sub(r"\1[\2]", path)
    # L['self'] is the model, L['forward'] its bound method
    inside = re.sub(r"^L\['\w+'\](\.__self__)?", "", path)
    return ".".join(str(literal_eval(quoted or f"'{plain}'")) for plain, quoted in _PART.findall(inside))


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map the other names of each tied parameter to its name in `named_parameters()`."""
    first = {id(parameter): name for name, parameter in nn.Module.named_parameters(model)}
    names = nn.Module.named_parameters(model, remove_duplicate=False)
    return {name: first[id(parameter)] for name, parameter in names if first[id(parameter)] != name}


def note_names(placeholders: Iterable[tuple[fx.Node, str | None]], model: str) -> None:
    """Record in the `meta` of a joint graph's inputs their parameter names, if any, and the name of the model's class.
    """
    for node, name in placeholders:
        node.meta |= {NAME: name or "", MODEL: model}


def parameter_of(placeholder: fx.Node) -> str:
    """Return the parameter name of an input of a joint graph; "" for inputs that are not parameters."""
    return str(placeholder.meta.get(NAME, ""))


def model_of(placeholders: Iterable[fx.Node]) -> str:
    """Return the name of the model's class, from the inputs of its joint graph."""
    return next((str(node.meta[MODEL]) for node in placeholders if node.meta.get(MODEL)), "model")


def sources_of(nodes: Sequence[fx.Node]) -> tuple[Source, ...]:
    """Return the module and the source line of each op of a step, forward and backward. O(nodes).

    Args:
        nodes: the ops' nodes, in execution order.
    """
    modules = {node: module_of(node) for node in nodes}
    # Ops that are not differentiated repeat the sequence number of the op before them; the first op with a
    # number counts.
    by_number = {_number(node): modules[node] for node in reversed(nodes) if not _is_backward(node)}
    added = [node for node in nodes if _adds_gradients(node)]
    for node in nodes:
        if _is_backward(node) and not _has_stack(node):
            modules[node] = by_number.get(_number(node), "")
    unknown = set(added)
    for node in added:
        modules[node] = _between(node, modules, unknown)
        unknown.discard(node)
    return tuple(Source(module=modules[node], frame=frame_of(node)) for node in nodes)


def _number(node: fx.Node) -> object:
    """Return autograd's sequence number, which an op shares with its backward."""
    return node.meta.get("seq_nr", node)


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def _has_stack(node: fx.Node) -> bool:
    return bool(node.meta.get("fwd_nn_module_stack") or node.meta.get("nn_module_stack"))


def _adds_gradients(node: fx.Node) -> bool:
    """Tell whether a node is an addition by which autograd sums gradients of a tensor with several users.

    AOTAutograd of torch 2.13 records `is_gradient_acc`. Without that, such an addition is recognized by the
    missing record of a forward op in its `meta`.
    """
    meta: dict[str, Any] = node.meta
    if "is_gradient_acc" in meta:
        return bool(meta["is_gradient_acc"])
    return (
        node.target in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
        and _is_backward(node)
        and "fwd_source_fn_stack" not in meta
        and "fwd_nn_module_stack" not in meta
    )


def _between(node: fx.Node, modules: dict[fx.Node, str], unknown: set[fx.Node]) -> str:
    """Return the module of an addition of gradients: the innermost one that contains the ops around it.

    These are the last op that computed one of the added gradients, and the ops that read the sum.

    Args:
        modules: the module of each op.
        unknown: additions whose module is not known yet; they are ignored.
    """
    around = [_ops_behind(parent, modules) for parent in node.all_input_nodes]
    makers = [maker for maker in around if maker is not None and maker not in unknown]
    users = [user for user in _readers(node, modules) if user not in unknown]
    names = [modules[op] for op in (*sorted(makers)[-1:], *users)]  # sorting nodes puts them in execution order
    return common_module(names) if names else ""


def _ops_behind(node: fx.Node, modules: dict[fx.Node, str]) -> fx.Node | None:
    """Return the op that computed the tensor of a view or getitem node; None if it is an input."""
    while node not in modules:
        if not node.all_input_nodes:
            return None
        node = node.all_input_nodes[0]
    return node


def _readers(node: fx.Node, modules: dict[fx.Node, str]) -> list[fx.Node]:
    """Return the ops that read a node's result, directly or through views."""
    found, stack = [], list(node.users)
    while stack:
        user = stack.pop()
        if user in modules:
            found.append(user)
        else:
            stack += user.users
    return found
