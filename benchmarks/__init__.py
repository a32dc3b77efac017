"""The source of the README's figures: models, a memory meter, a stopwatch, and the tables."""

import os

# Before torch is imported: its profiler reports every start and stop otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
