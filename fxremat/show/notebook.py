"""Shows a plan in a notebook: its page in an iframe, and its text where iframes are not displayed."""

from __future__ import annotations

from html import escape

HEIGHT = 720  # height of the frame in pixels; longer pages scroll


def framed(page: str, text: str) -> str:
    """Return HTML with a page in a sandboxed iframe: its scripts run, but cannot access the notebook.

    Args:
        page: a complete HTML page.
        text: shown where iframes are not displayed.
    """
    style = f"width: 100%; height: {HEIGHT}px; border: 1px solid #ccc;"
    frame = f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" style="{style}" title="fxremat plan"></iframe>'
    return f"{frame}\n<details><summary>as text</summary><pre>{escape(text)}</pre></details>"
