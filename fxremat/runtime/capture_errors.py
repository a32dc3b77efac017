"""Errors of capture, rephrased so that users know what to do.

CaptureError: the model is not one graph: tracing stops at net.py:12 in forward: if x.sum() > 0: (Data-dependent
branching). Keep what depends on the values of tensors (branches, .item(), sizes) out of forward, or compile a
submodule instead
"""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import fx, nn

from fxremat.errors import CaptureError, FxrematError
from fxremat.graphs.captured import Captured
from fxremat.graphs.names import place_of
from fxremat.torch_private import (
    UNKNOWN_LINE,
    backend_failure,
    backward_hooks_of,
    graph_break_place,
    needs_data,
    planning_error,
)

# (regular expression for the source line and reason where capture stopped, what to do); the first match counts
ADVICE = (
    ("layerdrop", "Set layerdrop to 0 in the model's config (encoder_layerdrop, decoder_layerdrop)"),
    (r"requires_grad_\(", "Call requires_grad_() on the input before the call"),
    (
        r"gradient_checkpointing|requires_grad = True",
        "Call model.gradient_checkpointing_disable() (the plan decides what runs again), or set no requires_grad",
    ),
    (
        r"isfinite|isnan|isinf|raise |assert |\.max\(\) >|\.any\(\)|torch\.any",
        "It checks values: switch that off, or do it before the call (for labels: compute the loss outside)",
    ),
    (
        r"Unsupported context manager|register_buffer|register_\w*hook|setattr",
        "If it is done at the first call only, call the uncompiled model once before compiling it",
    ),
    ("wrap sparse", "No graph takes sparse tensors: multiply by them before the call, or pass indices and values"),
    (r"[Ss]parse", "Use dense gradients (sparse=False)"),
    (r"manual_seed|[gs]et_rng_state|Generator", "Seed before the call, and draw from the default generator"),
    (r"print\(|Logger|reorderable", "Leave messages out of forward"),
    (
        r"[Dd]ata-dependent|\.item\(|\.tolist\(|nonzero",
        "Keep what depends on the values of tensors (branches, .item(), sizes) out of forward",
    ),
)
"""Patterns for the source line come before patterns for the reason that tracing gives."""


LEAF = "returning intermediate with requires_grad_()"
"""The reason of dynamo to capture nothing of a forward whose results depend on a leaf of autograd that it makes."""


OF_ARGUMENTS = r"bind arguments|device mismatch|when making fake tensor call|Observed exception"
"""A pattern that matches dynamo's reasons to stop at an op or a call that may reject its arguments."""


def advice(trouble: str) -> str:
    """Return what to do about a failed capture, as one sentence without a full stop.

    Args:
        trouble: the source line at which tracing stopped, and its reason.

    >>> advice("if dropout_probability < self.layerdrop: (Data-dependent branching)")[:20]
    'Set layerdrop to 0 i'
    """
    fitting = (what for pattern, what in ADVICE if re.search(pattern, trouble))
    return f"{next(fitting, 'Move it out of forward')}, or compile a submodule instead"


def refuse_without_gradients(joint: Captured) -> None:
    """Raise `CaptureError` if neither a parameter nor an input gets a gradient, so that there is no backward.

    AOTAutograd returns None as the gradient of an input that autograd does not reach. That is normal for frozen
    or unused inputs, but if no input gets a gradient, the plan would consist of the forward alone.
    """
    if any(isinstance(gradient, fx.Node) for gradient in joint.backward_outputs):
        return
    raise CaptureError(
        "the captured step has no backward: none of the model's parameters and inputs gets a gradient, although an "
        "output requires one. Some op has no gradient on this device (on the meta device many have none, such as "
        "cross_entropy), or gives none: capture on a CPU or CUDA device, or plan a model without data with "
        'fxremat.plan(..., costs="estimate")'
    )


def submodule_error(model: nn.Module, error: Exception) -> CaptureError | None:
    """Return an error that names the submodule because of which capture failed; None if the cause is not a submodule.

    Possible causes are a backward hook of a submodule, and a BatchNorm with momentum=None. The error's `place` names
    both.
    """
    if "FloatTrueDiv(1.0" in str(error):
        for name, module in model.named_modules():
            if hasattr(module, "num_batches_tracked") and getattr(module, "momentum", 0.1) is None:
                which = f"{name!r} ({type(module).__name__})"
                return CaptureError(
                    f"{which} has momentum=None: it averages over all batches so far, whose number is data, which no "
                    "captured graph computes with as this does. Give it a momentum, or update its statistics under "
                    "torch.no_grad(), as torch.optim.swa_utils.update_bn does",
                    place=f"{which}, which has momentum=None",
                )
    if "backwards hooks" not in str(error):
        return None
    parts = [(name, module) for name, module in model.named_modules() if name]
    hooks = ((name, module, hook) for name, module in parts for hook in backward_hooks_of(module))
    name, module, hook = next(hooks, ("", model, None))
    if hook is None:
        place = "a backward hook of all modules"
        cause = f"there is {place}"
    else:
        which, what = f"{name!r} ({type(module).__name__})", getattr(hook, "__qualname__", hook)
        place = f"{which}, which has the backward hook {what}"
        cause = f"{what} is a backward hook of the submodule {which}"
    return CaptureError(
        f"{cause}, and no captured graph calls it: remove it, or compile the submodules around it instead; those of "
        "the compiled module itself are called",
        place=place,
    )


def explained(error: Exception, plain_error: Callable[[], Exception | None]) -> Exception | None:
    """Translate an error that came through dynamo to one that users can act on; None: show the original.

    Args:
        plain_error: returns the error that the plain model raises at this call, or None; called only if tracing
            stopped at an op or a call that rejects its arguments: it runs the user's forward, which may have effects.
    """
    if isinstance(error, FxrematError):
        return error
    if (cause := planning_error(error)) is not None:
        return cause
    if (inner := backend_failure(error)) is not None:
        what = f"{type(inner).__name__}: {_first_line(inner)}"
        text = f"the model's graph cannot be differentiated or planned: {what}. {advice(what)}"
        error = CaptureError(text, place=f"{UNKNOWN_LINE} ({what})")
        error.__cause__ = inner
        return error
    place = graph_break_place(error)
    if needs_data(error):
        where = f" at {place}" if place else ""
        return CaptureError(
            f"the model is not one graph: what it does depends on the values of tensors{where} "
            f"({_first_line(error)}). Keep branches and sizes that depend on values out of forward, or compile a "
            "submodule instead"
        )
    if place is None:
        return None
    own = _own_error(error)
    if (own is not None or re.search(OF_ARGUMENTS, _first_line(error))) and (plain := plain_error()) is not None:
        return plain
    if own is not None:
        return CaptureError(
            f"the model fails on these inputs at {place}: {own}. Check that the plain model takes these inputs, or "
            "compile a submodule instead"
        )
    where = f"{place} ({_first_line(error)})"
    if LEAF in where:  # dynamo finds it at the end, and tells no line
        where = "requires_grad_() on a tensor that forward makes, and on which its results depend"
    text = f"the model is not one graph: tracing stops at {where}. {advice(where)}"
    return CaptureError(text, place=where if place == UNKNOWN_LINE else "")


CHECKS = (torch.ops.aten._assert_scalar.default, torch.ops.aten._assert_async.msg)
"""Ops that check data; their second argument is the text of the error."""


def note_failed_check(error: Exception, captured: Captured) -> bool:
    """Add the line of the model to an error of a captured step, if it is a check of data that failed there.

    Return whether it is; a text that several checks have names no line.
    """
    checks = [node for node in captured.nodes if node.target in CHECKS and node.args[1] == str(error)]
    if len(checks) == 1:
        computed = [*checks]
        while not place_of(computed[-1]) and (inputs := computed[-1].all_input_nodes):
            computed.append(inputs[0])
        error.add_note(f"What the model checks is computed at {place_of(computed[-1]) or UNKNOWN_LINE}")
    return bool(checks)


def is_not_one_graph(error: Exception) -> bool:
    """Tell whether to capture a model as several graphs, after capture as one graph ended with this error."""
    if isinstance(cause := planning_error(error) or error, FxrematError):
        return isinstance(cause, CaptureError)
    return backend_failure(error) is not None or needs_data(error) or graph_break_place(error) is not None


def _own_error(error: BaseException) -> str | None:
    """Return, as text like `ValueError: ...`, the error that the model itself raises; None if tracing failed instead.

    Dynamo reports an op that rejects its inputs as a failure on fake tensors, and an exception that the model
    raises and does not catch as "raised exception".
    """
    text = str(error)
    if inside := re.search(r"fake tensors: .* got (\w+)\(['\"](.*)['\"]\)", text):
        return f"{inside[1]}: {inside[2]}".rstrip(".")
    if raised := re.search(r"raised exception (\w+)\(\[.*?: ['\"](.*?)['\"]\)", text):
        return f"{raised[1]}: {raised[2]}".rstrip(".")
    line = _first_line(error)
    return line.rstrip(".") if re.match(r"(Runtime|Type|Index|Value)Error: ", line) else None


def _first_line(error: BaseException) -> str:
    """Return the first line of an error, without torch's names of symbols.

    For torch 2.15's "Unsupported function call (delayed)" it is its reason.
    """
    text = str(error).strip()
    if "Could not guard on data-dependent expression" in text.partition("\n")[0]:
        return "Data-dependent branching"
    if text.startswith("Unsupported function call (delayed)") and (reason := re.search(r"Reason: ([^.\n]+)", text)):
        return reason[1]
    return text.splitlines()[0] if text else type(error).__name__
