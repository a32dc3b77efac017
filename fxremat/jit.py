"""Compiles kernels with numba and caches them on disk; the cache may be missing, unwritable or damaged.

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

_FunctionCache: Any = caching.FunctionCache  # numba has no type annotations
_Function = TypeVar("_Function", bound=Callable[..., Any])


def jit(function: _Function) -> _Function:
    """Compile `function` with numba, once for all processes if the disk cache can be written.

    Its static type is unchanged.
    """
    options: Any = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
    compiled: Any = numba.njit(**options)(function)
    with contextlib.suppress(RuntimeError):  # raised if no cache folder can be written to
        # `Dispatcher.enable_caching` of numba 0.59 to 0.68 sets the same attribute
        compiled._cache = _cache_of(function)
    return cast(_Function, compiled)


def _cache_of(function: Any) -> Any:
    """Return numba's disk cache for a function. Raises `RuntimeError` if no folder can be written to."""
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
    """Return monotonic seconds, not counting the time in which kernels are compiled.

    With a limit in these seconds, a search in the first run has as much time as in later runs.
    """
    return time.monotonic() - _compilations.seconds


def cache_marker(kernels: Iterable[Any]) -> Path | None:
    """Return the path of a marker file, which exists if the compiled code of all these kernels is cached next to it.

    None if numba is disabled, or if no folder can be written to. The process that compiles the kernels creates
    the file. Its name contains a hash of what the code depends on: sources, and the versions of numba, Python
    and processor.
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
    """Sums up the seconds in which kernels are compiled; nested compilations count once."""

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
    """Numba's disk cache of one function; reading and writing it never raise errors."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # unpickling a truncated or foreign file may raise anything
            with contextlib.suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(Exception):  # e.g. the disk is full, the folder is gone, or the index cannot be read
            super().save_overload(sig, data)

    def _index_key(self, sig: Any, codegen: Any) -> tuple[Any, ...]:
        # kernels read named tuples by position, so the field names are part of the key
        records = tuple(getattr(argument, "fields", None) for argument in sig)
        return (*super()._index_key(sig, codegen), records, _digest(self._py_func))


@cache
def _digest(function: Any) -> str:
    """Return a hash of the source files of a kernel and of the kernels it calls, and of the global constants they read.
    """
    kernels, constants = [function], set()
    for kernel in kernels:  # the loop appends the kernels that it finds to the list
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
    """Yield (name, value) of each global that a function reads, and of module attributes such as `rows.least`.

    Variables of its closure are yielded with the name "".
    """
    names = _names(function.__code__)
    values = {name: function.__globals__[name] for name in names if name in function.__globals__}
    for module in [value for value in values.values() if isinstance(value, ModuleType)]:
        values |= {name: getattr(module, name) for name in names if hasattr(module, name)}
    yield from values.items()
    for cell in function.__closure__ or ():
        yield "", cell.cell_contents


def _names(code: CodeType) -> set[str]:
    """Return the names that a function's code, or a function nested in it, reads from globals or as attributes."""
    inner = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*inner)
