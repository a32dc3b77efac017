"""Adapters of LoRA, put into a model by the PEFT library; all other parameters are frozen."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

from torch import nn

from fxremat.fitting.from_diffusers import Denoiser
from fxremat.fitting.loaded import META, Loaded, needs

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]  # the layers that diffusers' examples train adapters for


def with_adapters(loaded: Loaded, rank: int) -> Loaded:
    """Return the model with adapters of this rank in all linear layers but the head; of diffusers, in its attention."""
    try:
        import peft
    except ImportError:
        raise needs("peft", f'train="lora:{rank}"') from None
    inside = loaded.model.model if isinstance(loaded.model, Denoiser) else loaded.model
    target: Any = ATTENTION if loaded.library == "diffusers" else "all-linear"
    if loaded.library not in ("transformers", "diffusers"):
        target = _linear_layers(inside)
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=target)
    with META, contextlib.redirect_stdout(None):
        adapted = peft.get_peft_model(inside, config)
    model = Denoiser(adapted) if isinstance(loaded.model, Denoiser) else adapted
    shown = f'"{target}"' if isinstance(target, str) else str(target)
    line = f"model = peft.get_peft_model(model, peft.LoraConfig(r={rank}, target_modules={shown}))"
    return replace(loaded, model=model.train(), code=(*loaded.code, line))


def _linear_layers(model: nn.Module) -> list[str]:
    """Return the names of the linear layers but the last one, which is the head."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)][:-1]
