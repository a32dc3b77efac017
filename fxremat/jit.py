"""Compiled kernels: numba's compiler and its cache on disk, which may be missing, unwritable or damaged.

The cache lies in the `__pycache__` of each source file, or in the user's cache folder where that one is not
writable (`NUMBA_CACHE_DIR` names another). Where none is, kernels are compiled in every process. Entries that cannot
be read are deleted and compiled again; entries that cannot be written are left out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
from numba.core import caching

_FunctionCache: Any = caching.FunctionCache  # numba is not typed
_Function = TypeVar("_Function", bound=Callable[..., Any])


def jit(function: _Function) -> _Function:
    """Compile `function`, once for all processes where a cache can be written; it keeps its type."""
    compiled: Any = numba.njit(nogil=True, error_model="numpy")(function)
    with contextlib.suppress(RuntimeError):  # no folder that can be written to
        compiled._cache = _Cache(function)  # as Dispatcher.enable_caching does, in numba 0.59 to 0.68
    return cast(_Function, compiled)


class _Cache(_FunctionCache):  # type: ignore[misc]
    """Numba's cache of one function, none of whose failures is an error."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # truncated, or not numba's: unpickling raises anything
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(Exception):  # a full disk, a folder that is gone, an index that cannot be read
            super().save_overload(sig, data)

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        """With fxremat's version: kernels have the code of those they call inside, which other files define."""
        from fxremat import __version__

        return (*super()._index_key(sig, codegen), __version__)
