"""Decompositions, for Inductor, of fxremat's own ops that may be part of a compiled region."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fxremat.graphs import batch_norm
from fxremat.ops import seeded

DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {**seeded.DECOMPOSITIONS, **batch_norm.DECOMPOSITIONS}
