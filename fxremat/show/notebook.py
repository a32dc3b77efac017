"""A plan in a notebook: its page in a frame, and its text where frames are not displayed."""

from __future__ import annotations

from html import escape

HEIGHT = 720  # pixels; the page scrolls within


def framed(page: str, text: str) -> str:
    """Return HTML of a page inside of another one: it may run its scripts, but access nothing around it.

    Args:
        page: HTML, complete in itself.
        text: shown where frames are not displayed.
    """
    style = f"width: 100%; height: {HEIGHT}px; border: 1px solid #ccc;"
    frame = f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" style="{style}" title="fxremat plan"></iframe>'
    return f"{frame}\n<details><summary>as text</summary><pre>{escape(text)}</pre></details>"
