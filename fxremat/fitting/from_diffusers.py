"""Models of the diffusers library from their configuration, without data, and the inputs of a training call."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxremat.errors import FxrematError
from fxremat.fitting.loaded import META, Loaded, building, needs, no_setting, numbers
from fxremat.fitting.settings import Training

PIXELS = 8  # along a side for one number of the latents
PATCH = 2  # patch size of Flux: a token covers PATCH x PATCH positions of the latent image
WORDS = 77  # tokens of the text encoders of Stable Diffusion
FLUX_WORDS = 512  # tokens of Flux's text encoder
FLUX_IMAGE = 1024  # pixels

Sized = tuple[dict[str, Any], int]  # inputs, and pixels along a side of the image


class Denoiser(nn.Module):
    """A denoising model with the mean squared error of its prediction."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, target: Tensor, **inputs: Any) -> Tensor:
        """Return the loss of predicting `target`."""
        (predicted,) = self.model(**inputs, return_dict=False)
        return F.mse_loss(predicted.float(), target.float())


def from_config(settings: Mapping[str, Any], training: Training, name: str, added: Sequence[str] = ()) -> Loaded:
    """Return the model that a configuration of diffusers describes.

    Raises:
        FxrematError: diffusers is missing or does not know the model or a setting in `added` (by the user), it cannot
            make a model of these settings, or the inputs of the model are not known here.
    """
    try:
        import diffusers
    except ImportError:
        raise needs("diffusers", f"{name}, a model of the diffusers library,") from None
    kind = str(settings["_class_name"])
    if kind not in _INPUTS or not hasattr(diffusers, kind):
        raise FxrematError(
            f"{name}: the inputs of diffusers' {kind} are not known here, but those of {', '.join(_INPUTS)}; write a "
            "function that returns the model and its inputs, and name it as package.module:function"
        )
    logging.getLogger("diffusers").setLevel(logging.ERROR)  # of modules to keep in float32: none
    known = inspect.signature(getattr(diffusers, kind).__init__).parameters
    for key in added:
        if key not in known:
            raise no_setting(name, key, known)
    with building(name), META:
        model = getattr(diffusers, kind).from_config(dict(settings)).to(training.weights)
    inputs, side = _INPUTS[kind](model.config, training)
    source, part = str(settings.get("_name_or_path") or name), "unet" if kind.startswith("UNet") else "transformer"
    code = (
        f'model = diffusers.{kind}.from_pretrained("{source}", subfolder="{part}", torch_dtype={training.weights})',
        "model = fxremat.fitting.from_diffusers.Denoiser(model)  # returns the mean squared error",
    )
    return Loaded(
        model=Denoiser(model).train(),
        inputs=inputs,
        name=name,
        library="diffusers",
        sizes={"batch": training.batch, "image": side},
        code=code,
        layers_known=True,
    )


def _of_unet(config: Any, training: Training) -> Sized:
    batch, side = training.batch, training.image or PIXELS * config.sample_size
    latents = _floats(training, batch, config.in_channels, side // PIXELS, side // PIXELS)
    inputs: dict[str, Any] = {
        "sample": latents,
        "timestep": numbers(batch),
        "encoder_hidden_states": _floats(training, batch, WORDS, config.cross_attention_dim),
        "target": latents,
    }
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - 6 * config.addition_time_embed_dim
        inputs["added_cond_kwargs"] = {
            "text_embeds": _floats(training, batch, pooled),
            "time_ids": _floats(training, batch, 6),
        }
    return inputs, side


def _of_flux(config: Any, training: Training) -> Sized:
    batch, side = training.batch, training.image or FLUX_IMAGE
    tokens = (side // PIXELS // PATCH) ** 2
    latents = _floats(training, batch, tokens, config.in_channels)
    inputs: dict[str, Any] = {
        "hidden_states": latents,
        "encoder_hidden_states": _floats(training, batch, FLUX_WORDS, config.joint_attention_dim),
        "pooled_projections": _floats(training, batch, config.pooled_projection_dim),
        "timestep": _floats(training, batch),
        "img_ids": _floats(training, tokens, 3),
        "txt_ids": _floats(training, FLUX_WORDS, 3),
        "target": latents,
    }
    if config.guidance_embeds:
        inputs["guidance"] = _floats(training, batch)
    return inputs, side


_INPUTS = {"UNet2DConditionModel": _of_unet, "FluxTransformer2DModel": _of_flux}


def _floats(training: Training, *shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=training.weights, device=META)
