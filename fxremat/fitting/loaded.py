"""A model to train, without data, and the inputs of one training call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxremat.errors import FxrematError
from fxremat.units import did_you_mean, shortened

META = torch.device("meta")


@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """A model on the meta device, and the inputs with which training calls it."""

    model: nn.Module  # what is captured: it returns its loss
    inputs: Any
    name: str  # of the model, for people
    library: str  # "transformers", "diffusers", "timm"; "": code of the user's
    sizes: Mapping[str, int]  # of the inputs: batch, length, image; those that the model has
    code: tuple[str, ...] = ()  # the lines of Python that make the model
    notes: tuple[str, ...] = ()  # what is not part of the step, and why
    layers_known: bool = False  # what the model does with its layers is decided by its modules and configuration alone


class UnderAutocast(nn.Module):
    """A model whose forward runs under autocast in bfloat16."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model under autocast."""
        with torch.autocast("cpu", torch.bfloat16):
            return self.model(*args, **kwargs)


def numbers(*shape: int) -> Tensor:
    """Return whole numbers, such as those of tokens, without data."""
    return torch.zeros(*shape, dtype=torch.long, device=META)


def needs(library: str, what: str, extra: str = "") -> FxrematError:
    """Return the error that a library is missing; `what` it is needed for."""
    return FxrematError(f"{what} needs {library}: pip install {library}{extra}")


def no_setting(name: str, key: str, known: Iterable[str]) -> FxrematError:
    """Return the error that the configuration of a model has no setting of this name."""
    return FxrematError(f"config changes {shortened(key)}{did_you_mean(key, known)}; {name} has no such setting")


@contextlib.contextmanager
def building(name: str) -> Iterator[None]:
    """Raise what a library raises where it makes a model of settings, as an error that says so."""
    try:
        yield
    except FxrematError:
        raise
    except Exception as error:  # whatever the library does with these settings
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise FxrematError(f"{name}: no model can be made of these settings: {reason}") from error
