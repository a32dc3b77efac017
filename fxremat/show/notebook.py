"""A plan in a notebook: its page in a frame of its own, and its text for where frames are not shown."""

from __future__ import annotations

from html import escape

HEIGHT = 720  # pixels; the page scrolls within


def framed(page: str, text: str) -> str:
    """HTML of a page inside of another one: it may run its scripts, but reach nothing around it.

    Args:
        page: HTML, complete in itself.
        text: what to show where frames are not.
    """
    style = f"width: 100%; height: {HEIGHT}px; border: 1px solid #ccc;"
    frame = f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" style="{style}" title="fxremat plan"></iframe>'
    return f"{frame}\n<details><summary>as text</summary><pre>{escape(text)}</pre></details>"
