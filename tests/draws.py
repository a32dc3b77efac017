"""The number of examples that random tests of algorithms draw."""

from __future__ import annotations

import os


def everyday(examples: int, least: int = 5) -> int:
    """A fifth of so many examples, `least` or more; all with HYPOTHESIS_PROFILE=wide, as `make test-long` has it."""
    return examples if os.environ.get("HYPOTHESIS_PROFILE") == "wide" else max(least, examples // 5)
