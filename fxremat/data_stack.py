"""Gives Python calls room on the interpreter's data stack, so that none of them has to allocate memory for its frame.

CPython keeps frames in chunks of 16 KiB (3.11 and later). A call whose frame has no room in the last chunk allocates
another one, and frees it when it returns: where a loop happens to call functions at that depth, each call takes some 20
microseconds more. Captures begin deep in the stack of a program, and planning calls small functions millions of times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

ROOM = 1 << 17  # machine words of a frame; its chunk is of twice that size, and what follows is for the calls inside


def with_room_for_calls(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function that runs `function` in a frame so large that frames of the calls inside share its chunk.

    The memory of such a chunk (2 MiB) is taken from the operating system as it is written to: only frames in use count.
    """

    def in_large_frame(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs)

    code: Any = in_large_frame
    code.__code__ = code.__code__.replace(co_stacksize=ROOM)
    return functools.wraps(function)(in_large_frame)
