"""Call functions of the user from the command line, and say in one line how they fail."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from fxremat.errors import FxrematError

_T = TypeVar("_T")


def made_by(factory: Callable[[], Any], name: str) -> tuple[Any, Any]:
    """Call the user's factory and return its (model, example inputs).

    Args:
        name: the factory's name in messages.

    Raises:
        FxrematError: the factory fails, or returns anything else.
    """
    from torch import nn

    if not callable(factory):
        raise FxrematError(f"{name} is a {type(factory).__name__}; it must be a function")
    made = guarded(f"{name}()", factory)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise FxrematError(f"{name}() returned a {type(made).__name__}; it must return (model, example_inputs)")
    return made


def guarded(what: str, work: Callable[[], _T]) -> _T:
    """Call `work`, which runs the user's code, and return its result.

    Args:
        what: the beginning of the message of an error.

    Raises:
        FxrematError: for any error of `work`; the message names the file and line.
    """
    try:
        return work()
    except FxrematError:
        raise
    except Exception as error:
        if _is_of_the_model(error):
            raise FxrematError(f"the model fails on these inputs: {type(error).__name__}: {error}") from error
        frame = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{frame.filename}:{frame.lineno}"
        raise FxrematError(f"{what} failed at {at}: {type(error).__name__}: {error}") from error


def _is_of_the_model(error: Exception) -> bool:
    """Tell whether the model raises this error without fxremat, too; fxremat adds a note to such errors."""
    if not getattr(error, "__notes__", ()):
        return False
    from fxremat.runtime.plain_errors import NOTE

    return NOTE in error.__notes__
