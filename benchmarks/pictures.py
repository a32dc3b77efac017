"""The pictures of plans in the README and in docs/gallery.md: `python -m benchmarks.pictures`.

Each is the page of a plan in Chromium (`make browser`), light and dark, as docs/pictures/NAME-light.png and -dark.png.
Plans are for an A100 by estimate, so that they are the same on every machine.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fxremat
from benchmarks.models import get
from benchmarks.models.words import LANGUAGE
from fxremat.errors import FxrematError
from fxremat.settings import Search

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
SIZE = {"width": 1100, "height": 900}
SCALE = 1.25  # pixels of the picture for each of the page
SCHEMES = ("light", "dark")


def _plan(name: str, mem: str, **options: Any) -> str:
    torch.manual_seed(0)
    case = LANGUAGE[name] if name in LANGUAGE else get(name)
    settings: dict[str, Any] = {"search": Search(progress=False), "costs": "A100"} | options
    return fxremat.plan(case.model(), case.batch(0), mem=mem, **settings).to_html()


PLANS: dict[str, Callable[[], str]] = {
    "gpt": lambda: _plan("gpt", "40%"),
    "resnet": lambda: _plan("resnet", "50%"),
    "unet": lambda: _plan("unet", "60%"),
    "gpt-offloaded": lambda: _plan("gpt", "30%", offload=True),
    "gpt-slices": lambda: _plan("gpt_32k", "30%", slices=True),
}


def main(names: list[str]) -> None:
    """Make the pictures with these names, or all."""
    from playwright.sync_api import sync_playwright  # type: ignore[import-not-found, unused-ignore]

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise FxrematError("there is no Chromium; `make browser` installs Debian's")
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as started, tempfile.TemporaryDirectory() as folder:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name in names or PLANS:
            file = Path(folder) / f"{name}.html"
            file.write_text(PLANS[name](), encoding="utf-8")
            for scheme in SCHEMES:
                _photograph(browser, file, scheme, FOLDER / f"{name}-{scheme}.png")


def _photograph(browser: Any, file: Path, scheme: str, picture: Path) -> None:
    """The plan in a sentence, and its memory over the step."""
    page = browser.new_page(viewport=SIZE, color_scheme=scheme, device_scale_factor=SCALE)
    page.goto(file.as_uri())
    box = page.locator("#picture").bounding_box()
    tall = box["y"] + box["height"] + 4
    page.screenshot(path=picture, clip={"x": 0, "y": 0, "width": SIZE["width"], "height": tall})
    page.close()
    print(picture)


if __name__ == "__main__":
    main(sys.argv[1:])
