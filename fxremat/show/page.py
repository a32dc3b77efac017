"""Makes the HTML page of a plan: one self-contained file with an interactive picture.

    assets/page.html, page.css     the frame
    assets/step.js                 the allocations on the device at each moment, in the order in which they are stacked
    assets/picture.js              memory over the step, on a canvas
    assets/tables.js, frontier.js  modules, largest values, time against memory
    assets/main.js                 one state, drawn again whenever it changes

The page's data (`page_data`) is JSON from which no name can break out: characters with a meaning in HTML are escaped,
and scripts insert texts as text.
"""

from __future__ import annotations

import json
from functools import cache
from html import escape
from importlib.resources import files

from fxremat.planned_step import PlannedStep
from fxremat.show.page_data import Data, page_data
from fxremat.show.text import describe

SCRIPTS = ("step.js", "picture.js", "tables.js", "frontier.js", "main.js")
_ESCAPES = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}


def page(plan: PlannedStep) -> str:
    """Return the HTML page of a plan."""
    return page_of(page_data(plan), describe(plan, full=True))


def page_of(data: Data, text: str) -> str:
    """Return the HTML page that shows some data.

    Args:
        data: what `page_data` returns.
        text: the plan as text, for readers without scripts.
    """
    pieces, after = [], asset("page.html")
    parts = {
        "@TITLE@": escape(data.get("title", "")),
        "@STYLE@": asset("page.css"),
        "@HEADLINE@": escape(data.get("headline", "")),
        "@ABOUT@": escape(data.get("about", "")),
        "@TEXT@": escape(text),
        "@DATA@": json.dumps(data, separators=(",", ":"), allow_nan=False).translate(_ESCAPES),
        "@SCRIPT@": '(() => {\n"use strict";\n' + "\n".join(map(asset, SCRIPTS)) + "})();",
    }
    for mark, filled in parts.items():
        between, _, after = after.partition(mark)
        pieces += [between, filled]
    return "".join((*pieces, after))


@cache
def asset(name: str) -> str:
    """Return the text of a file in `assets`."""
    return (files("fxremat.show") / "assets" / name).read_text(encoding="utf-8")
