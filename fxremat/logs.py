"""Turns on logging of the topics in the environment variable FXREMAT_LOG, separated by commas, such as `passes`."""

from __future__ import annotations

import logging
import os

TOPICS = {"passes": "how each pass changes a captured graph"}


def is_logged(topic: str) -> bool:
    """Tell whether FXREMAT_LOG names a topic; if so, enable its logger, on stderr if no handler is set up."""
    if topic not in os.environ.get("FXREMAT_LOG", "").split(","):
        return False
    logger = logging.getLogger(f"fxremat.{topic}")
    logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    return True
