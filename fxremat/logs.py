"""Topics that the environment asks to be logged: FXREMAT_LOG, names with commas between, such as `passes`."""

from __future__ import annotations

import logging
import os

TOPICS = {"passes": "how each pass changes a captured graph"}


def is_logged(topic: str) -> bool:
    """Tell whether the environment asks for a topic; its logger then shows it, on stderr where no handler is set up."""
    if topic not in os.environ.get("FXREMAT_LOG", "").split(","):
        return False
    logger = logging.getLogger(f"fxremat.{topic}")
    logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    return True
