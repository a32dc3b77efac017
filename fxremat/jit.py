"""Compiled kernels: numba's compiler and its cache on disk, which may be missing, unwritable or damaged.

The cache lies in the `__pycache__` of each source file, or in the user's cache folder if that one is not writable
(`NUMBA_CACHE_DIR` names another), or in the folder that `FXREMAT_CACHE` names if neither is. If none can be written to,
kernels are compiled in every process. Entries that cannot be read are deleted and compiled again; entries that cannot
be written are left out. An entry is valid for the sources it was compiled from: compiled code contains the kernels that
a kernel calls, which other files define.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar, cast

import numba
from numba import config as settings
from numba.core import caching, event, registry
from numba.core.dispatcher import Dispatcher

_FunctionCache: Any = caching.FunctionCache  # numba is not typed
_Function = TypeVar("_Function", bound=Callable[..., Any])


def jit(function: _Function) -> _Function:
    """Compile `function`, once for all processes if a cache can be written; it keeps its type."""
    options: Any = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
    compiled: Any = numba.njit(**options)(function)
    with contextlib.suppress(RuntimeError):  # no folder can be written to
        compiled._cache = _cache_of(function)  # as Dispatcher.enable_caching does, in numba 0.59 to 0.68
    return cast(_Function, compiled)


def _cache_of(function: Any) -> Any:
    """Return the cache of a function's code. Raises `RuntimeError` if no folder can be written to."""
    try:
        return _Cache(function)
    except RuntimeError:
        if not (folder := os.environ.get("FXREMAT_CACHE")):
            raise
    numba_settings: Any = settings
    before, numba_settings.CACHE_DIR = numba_settings.CACHE_DIR, os.path.join(folder, "kernels")
    try:
        return _Cache(function)
    finally:
        numba_settings.CACHE_DIR = before


def running_seconds() -> float:
    """Return monotonic seconds that stand still while kernels are compiled.

    A search with a limit in these seconds gets as much time in its first run as in later ones.
    """
    return time.monotonic() - _compilations.seconds


def cache_marker(kernels: Iterable[Any]) -> Path | None:
    """Return the path of a file that exists if the code of all these kernels is cached; the file lies next to the code.

    None if numba does not compile, or no folder can be written to. The process that compiled the kernels makes the
    file. Its name contains a hash of what the code depends on: sources, numba, Python and processor.
    """
    processor = registry.cpu_target.target_context.codegen().magic_tuple()
    path, parts = None, [numba.__version__, sys.version, repr(processor)]
    for kernel in kernels:
        cache_: Any = getattr(kernel, "_cache", None)
        if not (isinstance(kernel, Dispatcher) and isinstance(cache_, _Cache)):
            return None  # compilation is turned off, or no folder can be written to
        path = Path(cache_.cache_path)
        parts.append(_digest(kernel.py_func))
    return path / f"compiled-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:16]}" if path else None


class _Compilations(event.Listener):
    """The sum of the seconds in which kernels are compiled; nested compilations count once."""

    def __init__(self) -> None:
        self.seconds, self._depth, self._began = 0.0, 0, 0.0

    def on_start(self, _: Any) -> None:
        if not self._depth:
            self._began = time.monotonic()
        self._depth += 1

    def on_end(self, _: Any) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += time.monotonic() - self._began


_compilations = _Compilations()
event.register("numba:compile", _compilations)


class _Cache(_FunctionCache):  # type: ignore[misc]
    """Numba's cache of one function, whose failures are never errors."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # truncated, or not numba's: unpickling may raise anything
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(Exception):  # a full disk, a folder that is gone, an index that cannot be read
            super().save_overload(sig, data)

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        records = tuple(getattr(argument, "fields", None) for argument in sig)  # named tuples, read by position
        return (*super()._index_key(sig, codegen), records, _digest(self._py_func))


@cache
def _digest(function: Any) -> str:
    """Return a hash of the source files of a kernel and of the kernels that it calls, and of the globals they read."""
    kernels, constants = [function], set()
    for kernel in kernels:  # the list grows meanwhile
        for name, value in _globals_read(kernel):
            if isinstance(value, Dispatcher):
                kernels += [value.py_func] if value.py_func not in kernels else []
            elif isinstance(value, int | float | str | tuple):
                constants.add(f"{name} = {value!r}")
            elif hasattr(value, "_fields"):
                constants.add(f"{name}: {value._fields}")
    found = hashlib.sha256("\n".join(sorted(constants)).encode())
    for path in sorted({kernel.__code__.co_filename for kernel in kernels}):
        found.update(Path(path).read_bytes())
    return found.hexdigest()


def _globals_read(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and value of each global that a function reads, also of attributes of modules, as in `rows.least`.

    The values that it closes over come with the name "".
    """
    names = _names(function.__code__)
    values = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for module in [value for value in values.values() if isinstance(value, ModuleType)]:
        values |= {name: getattr(module, name) for name in names if hasattr(module, name)}
    yield from values.items()
    for cell in function.__closure__ or ():
        yield "", cell.cell_contents


def _names(code: CodeType) -> set[str]:
    """Return the global names in a function's code and in the functions inside it."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*inner)
