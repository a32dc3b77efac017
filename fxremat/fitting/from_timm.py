"""Models of the timm library by name, without data, and the inputs of a training call."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxremat.fitting.loaded import META, Loaded, numbers
from fxremat.fitting.settings import Training


class Classifier(nn.Module):
    """A model that scores classes, with the cross entropy of its scores."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of images of shape (batch, channels, side, side) with labels of shape (batch)."""
        return F.cross_entropy(self.model(images).float(), labels)


def is_known(name: str) -> bool:
    """Tell whether timm is installed and has a model of this name."""
    try:
        import timm
    except (ImportError, RuntimeError):  # RuntimeError: a torchvision that is not made for this torch
        return False
    return bool(timm.is_model(name))


def from_name(name: str, training: Training) -> Loaded:
    """Return the model of this name."""
    import timm

    with META:
        model: Any = timm.create_model(name).to(training.weights)
    channels, side = model.default_cfg["input_size"][:2]
    side = training.image or side
    images = torch.zeros(training.batch, channels, side, side, dtype=training.weights, device=META)
    code = (
        f'model = timm.create_model("{name}", pretrained=True).to({training.weights})',
        "model = fxremat.fitting.from_timm.Classifier(model)  # returns the cross entropy",
    )
    return Loaded(
        model=Classifier(model).train(),
        inputs={"images": images, "labels": numbers(training.batch)},
        name=name,
        library="timm",
        sizes={"batch": training.batch, "image": side},
        code=code,
        layers_known=True,
    )
