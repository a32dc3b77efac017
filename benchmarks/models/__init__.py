"""The models that fxremat is measured on, each in two sizes.

    case = get("resnet", "small")
    model, batch = case.model(), case.batch(0)
    model(*batch).backward()

`full` is what the tables report, `small` the same structure with fewer and narrower layers, for tests.
Every model returns its loss, so that the whole training step is inside it.
"""

from __future__ import annotations

from collections.abc import Callable

from . import convnets, gpt, mixer, more, unet
from .case import Case, Size

__all__ = ["ALL", "MAIN", "Case", "Size", "get"]

_FACTORIES: dict[str, Callable[[Size], Case]] = {
    "gpt": gpt.gpt,
    "gpt_padded": gpt.gpt_padded,
    "resnet": convnets.resnet,
    "unet": unet.unet,
    "deep_chain": mixer.deep_chain,
    "mixer": mixer.mixer,
    "encoder_decoder": more.encoder_decoder,
    "inception": more.inception,
    "siamese": more.siamese,
    "densenet": convnets.densenet,
}

ALL = tuple(_FACTORIES)
MAIN = ALL[:6]
"""The models that every promise is tested on; the others are reported."""


def get(name: str, size: Size = "full") -> Case:
    """The named case. Raises KeyError with the known names."""
    if name not in _FACTORIES:
        raise KeyError(f"no model {name!r}; known: {', '.join(ALL)}")
    return _FACTORIES[name](size)
