"""What went wrong while a model was captured, as an error that a user can act on.

CaptureError: the model is not one graph: tracing stops at net.py:12 in forward: if x.sum() > 0: (Data-dependent
branching). Keep what depends on the values of tensors (branches, .item(), sizes) out of forward, or compile a
submodule instead
"""

from __future__ import annotations

import re

from fxremat._torch import backend_failure, graph_break_place, planning_error
from fxremat.errors import CaptureError, FxrematError

ADVICE = (  # a pattern of the place and the reason, and what to do; the first that fits is given
    ("layerdrop", "Set layerdrop to 0 in the model's config (encoder_layerdrop, decoder_layerdrop)"),
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
    (r"RNN, GRU, or LSTM", "Write it as a loop over cells (nn.LSTMCell)"),
    (r"[Ss]parse", "Use dense gradients (sparse=False)"),
    (r"manual_seed|[gs]et_rng_state|Generator", "Seed before the call, and draw from the default generator"),
    (r"print\(|Logger|reorderable", "Leave messages out of forward"),
    (r"\b(Runtime|Type|Index|Value)Error: ", "Check that the plain model takes these inputs"),
    (
        r"[Dd]ata-dependent|\.item\(|\.tolist\(|nonzero",
        "Keep what depends on the values of tensors (branches, .item(), sizes) out of forward",
    ),
)
"""Tried in this order, since a line of code says more than the reason that tracing gives."""


def advice(trouble: str) -> str:
    """What to do about it, in one sentence without a full stop.

    >>> advice("if dropout_probability < self.layerdrop: (Data-dependent branching)")[:20]
    'Set layerdrop to 0 i'
    """
    fitting = (what for pattern, what in ADVICE if re.search(pattern, trouble))
    return f"{next(fitting, 'Move it out of forward')}, or compile a submodule instead"


def explained(error: Exception) -> FxrematError | None:
    """The error that a user can act on, in place of the one that came through dynamo; None: show that one."""
    if isinstance(error, FxrematError):
        return error
    if (cause := planning_error(error)) is not None:
        return cause
    if (inner := backend_failure(error)) is not None:
        what = f"{type(inner).__name__}: {_first_line(inner)}"
        error = CaptureError(f"the model's graph cannot be differentiated or planned: {what}. {advice(what)}")
        error.__cause__ = inner
        return error
    if (place := graph_break_place(error)) is not None:
        where = f"{place} ({_first_line(error)})"
        return CaptureError(f"the model is not one graph: tracing stops at {where}. {advice(where)}")
    return None


def _first_line(error: BaseException) -> str:
    """Of the message; of the error inside, where an op cannot work on inputs of these shapes."""
    text = str(error).strip()
    if inside := re.search(r"fake tensors: .* got (\w+)\(['\"](.*)['\"]\)", text):
        return f"{inside[1]}: {inside[2]}"
    return text.splitlines()[0] if text else type(error).__name__
