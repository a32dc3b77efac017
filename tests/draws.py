"""The number of examples that random tests of algorithms draw."""

from __future__ import annotations

import os


def everyday(examples: int) -> int:
    """A fifth of so many examples; all of them with HYPOTHESIS_PROFILE=wide, as `make test-long` has it."""
    return examples if os.environ.get("HYPOTHESIS_PROFILE") == "wide" else max(5, examples // 5)
