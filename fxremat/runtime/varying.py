"""The user's option `dynamic` for input sizes: mark dimensions for dynamo, or warn that sizes are taken as fixed."""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxremat.errors import FxrematError
from fxremat.options import Options
from fxremat.torch_private import mark_dynamic
from fxremat.units import did_you_mean

log = logging.getLogger(__name__)

FIXED = "sizes are taken as fixed, and each combination is captured and planned by itself: "
HOST = f"{FIXED}what waits on the host is planned for one size"
SLICES = f"{FIXED}slices are planned for one size"


def positional(forward: Callable[..., Any]) -> Sequence[str]:
    """Return the names of a function's inputs that may be passed by position; () if its signature cannot be read."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


def by_name(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name.

    Args:
        names: the names of the inputs that may be passed by position, in order.
    """
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def mark(
    options: Options,
    names: Sequence[str],
    forward: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> None:
    """Mark the dimensions that the option `dynamic` names on the tensors of a call, so that dynamo makes them symbolic.

    Args:
        names: the names of the inputs of `forward` that may be passed by position.

    Raises:
        FxrematError: `dynamic` names an unknown input, one that is not a tensor, or a dimension that it does not
            have.
    """
    if not options.ranges:
        return
    given = by_name(names, args, kwargs)
    for name, sizes in options.ranges.items():
        if name not in given:
            _check_known(name, given, forward)
            continue
        tensor = given[name]
        most = tensor.dim() if isinstance(tensor, torch.Tensor) else 0
        if not isinstance(tensor, torch.Tensor) or not all(0 <= dim < most for dim in sizes):
            raise FxrematError(
                f"dynamic names dimensions {', '.join(map(str, sizes))} of {name!r}, which "
                + (f"has {most}" if isinstance(tensor, torch.Tensor) else f"is a {type(tensor).__name__}")
            )
        if options.resizable:
            mark_dynamic(tensor, sizes)


def _check_known(name: str, given: Mapping[str, Any], forward: Callable[..., Any]) -> None:
    """Raise `FxrematError` if `name`, which was not passed, is not an input of `forward`."""
    with contextlib.suppress(TypeError, ValueError):  # raised for a function without a readable signature
        parameters = inspect.signature(forward).parameters.values()
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        known = dict.fromkeys((*(p.name for p in parameters if p.kind not in kinds), *given))
        if name not in known:
            raise FxrematError(
                f"dynamic names {name!r}{did_you_mean(name, known)}; the model's inputs are {', '.join(known)}"
            )


def warn_of_fixed(options: Options, reason: BaseException | None = None) -> None:
    """Report that sizes are taken as fixed: by a warning if the user asked for dynamic ones, else in the log.

    Args:
        reason: the error because of which sizes cannot change; None: an option needs fixed sizes.
    """
    text = SLICES if options.slicing else HOST
    if reason is not None:
        first = (str(reason).strip() or type(reason).__name__).splitlines()[0]
        text = (
            "sizes are taken as fixed from now on, and each combination is captured and planned by itself: the model "
            f"cannot be captured for sizes that change ({first})"
        )
    if options.dynamic:
        warnings.warn(text, stacklevel=2)
    else:
        log.info(text)
