"""Models at the sizes that people train, on the pretended device: nothing is computed, and hardly any memory touched.

Each returns its loss. The benchmarks' own models are looked at beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import models

DEVICE = torch.device("cuda")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on the device, with a batch for it."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, ...]]

    def made(self) -> tuple[nn.Module, tuple[Any, ...]]:
        """The model in training mode, and the batch."""
        with DEVICE:
            return self.build().to(DEVICE).train(), self.batch()


class Autocast(nn.Module):
    """A model under autocast in bfloat16; returns the loss of its output."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return self.loss(self.model(x, *rest[:-1]), rest[-1])


class Loss(Autocast):
    """The same without autocast, for models whose parameters are in bfloat16."""

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        return self.loss(self.model(x, *rest[:-1]), rest[-1])


class LanguageModel(nn.Module):
    """A model of transformers that returns its loss alone."""

    def __init__(self, model: nn.Module, autocast: bool) -> None:
        super().__init__()
        self.model, self.autocast = model, autocast

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=self.autocast):
            return self.model(input_ids=tokens, labels=tokens, use_cache=False).loss


def gpt2_medium() -> nn.Module:
    """GPT-2 of 355 million parameters, in float32 under autocast."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return LanguageModel(GPT2LMHeadModel(GPT2Config(n_layer=24, n_embd=1024, n_head=16)), autocast=True)


def gpt2_small() -> nn.Module:
    """GPT-2 of 124 million parameters, in float32 under autocast."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return LanguageModel(GPT2LMHeadModel(GPT2Config()), autocast=True)


def llama_1b() -> nn.Module:
    """A Llama of the sizes of Llama 3.2 1B, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128256,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    )
    return LanguageModel(LlamaForCausalLM(config).bfloat16(), autocast=False)


# --- ResNet-50 ----------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut (He et al., 2015; the stride is at the second, as in torchvision)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = [(inputs, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        self.layers = nn.ModuleList(_conv_bn(*size) for size in sizes)
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same else _conv_bn(inputs, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers[:-1]:
            y = F.relu(layer(y), inplace=True)
        return F.relu(self.layers[-1](y) + self.shortcut(x), inplace=True)


def _conv_bn(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Module:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs))


def resnet_50() -> nn.Module:
    """ResNet-50, in float32 under autocast."""
    blocks: list[nn.Module] = [_conv_bn(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for number in range(count):
            blocks.append(Bottleneck(inputs, width, stride if number == 0 else 1))
            inputs = 4 * width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000)]
    return Autocast(nn.Sequential(*blocks, *head), F.cross_entropy)


# --- a UNet of the sizes of Stable Diffusion XL's -----------------------------------------------------------


class Residual(nn.Module):
    """Two convolutions with group norms, to which the time is added in the middle."""

    def __init__(self, inputs: int, outputs: int, times: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, inputs), nn.SiLU(), nn.Conv2d(inputs, outputs, 3, padding=1))
        self.time = nn.Sequential(nn.SiLU(), nn.Linear(times, outputs))
        self.second = nn.Sequential(nn.GroupNorm(32, outputs), nn.SiLU(), nn.Conv2d(outputs, outputs, 3, padding=1))
        self.shortcut = nn.Identity() if inputs == outputs else nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.first(x) + self.time(time)[:, :, None, None]
        return self.second(y) + self.shortcut(x)


class Attention(nn.Module):
    """Attention of image tokens to themselves or to a text, with heads of 64."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(context, width, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        parts = (self.query(x), self.key(context), self.value(context))
        heads = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Self-attention, attention to the text, and a gated feed-forward."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.own, self.cross = Attention(width, width), Attention(width, context)
        self.wide, self.narrow = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        y = self.norms[0](x)
        x = x + self.own(y, y)
        x = x + self.cross(self.norms[1](x), context)
        value, gate = self.wide(self.norms[2](x)).chunk(2, dim=-1)
        return x + self.narrow(value * F.gelu(gate))


class Spatial(nn.Module):
    """Some transformers on the pixels of an image."""

    def __init__(self, width: int, context: int, depth: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, width)
        self.into, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.ModuleList(Transformer(width, context) for _ in range(depth))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        tokens = self.into(self.norm(x).flatten(2).transpose(1, 2))
        for block in self.blocks:
            tokens = block(tokens, context)
        return x + self.out(tokens).transpose(1, 2).unflatten(2, x.shape[2:])


class Level(nn.Module):
    """A residual block with transformers, or without where their depth is 0."""

    def __init__(self, inputs: int, outputs: int, depth: int, times: int, context: int) -> None:
        super().__init__()
        self.residual = Residual(inputs, outputs, times)
        self.spatial = Spatial(outputs, context, depth) if depth else None

    def forward(self, x: Tensor, time: Tensor, context: Tensor) -> Tensor:
        x = self.residual(x, time)
        return x if self.spatial is None else self.spatial(x, context)


class DiffusionUNet(nn.Module):
    """A UNet whose lower levels have transformers, as in Podell et al., SDXL, 2023."""

    def __init__(self, widths: Sequence[int], depths: Sequence[int], context: int) -> None:
        super().__init__()
        times, rest = 4 * widths[0], (4 * widths[0], context)
        self.into = nn.Conv2d(4, widths[0], 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        skips, inputs = [widths[0]], widths[0]
        for level, (width, depth) in enumerate(zip(widths, depths, strict=True)):
            for _ in range(2):
                self.down.append(Level(inputs, width, depth, *rest))
                inputs = width
                skips.append(inputs)
            if level < len(widths) - 1:
                self.down.append(nn.Conv2d(inputs, inputs, 3, stride=2, padding=1))
                skips.append(inputs)
        self.middle = nn.ModuleList([Level(inputs, inputs, depths[-1], *rest), Level(inputs, inputs, 0, *rest)])
        for level, (width, depth) in reversed(list(enumerate(zip(widths, depths, strict=True)))):
            for _ in range(3):
                self.up.append(Level(inputs + skips.pop(), width, depth, *rest))
                inputs = width
            if level:
                self.up.append(nn.Sequential(nn.Upsample(scale_factor=2.0), nn.Conv2d(inputs, inputs, 3, padding=1)))
        self.out = nn.Sequential(nn.GroupNorm(32, inputs), nn.SiLU(), nn.Conv2d(inputs, 4, 3, padding=1))
        self.time = nn.Sequential(nn.Linear(widths[0], times), nn.SiLU(), nn.Linear(times, times))

    def forward(self, latents: Tensor, steps: Tensor, context: Tensor) -> Tensor:
        time, x = self.time(steps), self.into(latents)
        skips = [x]
        for module in self.down:
            x = module(x, time, context) if isinstance(module, Level) else module(x)
            skips.append(x)
        for level in self.middle:
            x = level(x, time, context)
        for module in self.up:
            x = module(torch.cat([x, skips.pop()], 1), time, context) if isinstance(module, Level) else module(x)
        return self.out(x)


def sdxl() -> nn.Module:
    """A UNet of the sizes of SDXL's, with 2 and 4 transformers a level instead of 2 and 10, in bfloat16."""
    return Loss(DiffusionUNet((320, 640, 1280), (0, 2, 4), 2048).bfloat16(), F.mse_loss)


def _tokens(batch: int, length: int, vocabulary: int) -> Callable[[], tuple[Tensor]]:
    return lambda: (torch.randint(vocabulary, (batch, length)),)


def _latents() -> tuple[Tensor, ...]:
    shapes = [(2, 4, 128, 128), (2, 320), (2, 77, 2048), (2, 4, 128, 128)]
    return tuple(torch.randn(shape, dtype=torch.bfloat16) for shape in shapes)


REAL = (
    Case(name="SDXL's UNet, 2 x 128 px", build=sdxl, batch=_latents),
    Case(name="GPT-2 medium, 8 x 1024", build=gpt2_medium, batch=_tokens(8, 1024, 50257)),
    Case(name="Llama 1B, 4 x 2048", build=llama_1b, batch=_tokens(4, 2048, 128256)),
    Case(
        name="ResNet-50, 96 x 224 px",
        build=resnet_50,
        batch=lambda: (torch.randn(96, 3, 224, 224), torch.randint(1000, (96,))),
    ),
    Case(name="GPT-2 small, 7 x 1000", build=gpt2_small, batch=_tokens(7, 1000, 50257)),
)


def _benchmark(name: str) -> Case:
    """A model of the benchmarks in full size."""
    case = models.get(name)

    def batch() -> tuple[Tensor, ...]:
        with torch.device("cpu"):  # whose generator draws it
            return tuple(tensor.to(DEVICE) for tensor in case.batch())

    return Case(name=name, build=case.model, batch=batch)


GROUPS = (*((case,) for case in REAL), tuple(_benchmark(name) for name in models.ALL))
"""The models that one process looks at; `__main__.GROUPS` of them."""
