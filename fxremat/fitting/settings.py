"""The settings of `fxremat.fits`, each checked when it is made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypedDict

import torch

from fxremat.errors import FxrematError
from fxremat.units import did_you_mean, shortened

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "autocast": torch.float32}  # of the weights
OPTIMIZERS = ("adamw", "adamw8bit", "sgd", "adafactor", "muon")
RANK = 16  # of LoRA's matrices, if no rank is given
SHARDS = ("fsdp", "ddp", "tp")


class TrainingSettings(TypedDict, total=False):
    """The fields of `Training` as keyword arguments."""

    batch: int
    length: int | None
    image: int | None
    dtype: str
    train: str
    optimizer: str
    accumulate: int
    devices: int
    shard: str | None


@dataclass(frozen=True, kw_only=True)
class Training:
    """The settings of a training step.

    Args:
        batch: examples in one forward and backward, on each device.
        length: tokens of an example; None: what the model's configuration suggests.
        image: pixels along a side of an image; None: what the configuration says.
        dtype: "bf16": weights, gradients and optimizer state in bfloat16; "fp32": in float32; "autocast": weights in
            float32, and a forward under torch.autocast in bfloat16.
        train: "full", or "lora" with a rank, such as "lora:16": adapters of PEFT in all linear layers; "qlora:16": the
            same with the weights of those layers in 4 bits, by bitsandbytes.
        optimizer: one of `OPTIMIZERS`.
        accumulate: backwards before each step of the optimizer.
        devices: devices that train together; their batches add up.
        shard: "fsdp" splits weights, gradients and optimizer state among them, "ddp" copies all to each, "tp" splits
            attention heads, columns of MLPs and the vocabulary of a model of transformers; with "tp" all devices have
            the same batch.

    Raises:
        FxrematError: a setting has a value that it cannot have, or two do not go together.
    """

    batch: int = 1
    length: int | None = None
    image: int | None = None
    dtype: str = "bf16"
    train: str = "full"
    optimizer: str = "adamw"
    accumulate: int = 1
    devices: int = 1
    shard: str | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "length", "image", "accumulate", "devices"):
            given = getattr(self, name)
            if given is None and name in ("length", "image"):
                continue
            if not isinstance(given, int) or isinstance(given, bool) or given < 1:
                raise FxrematError(f"{name} is {shortened(given)}; it is a number, 1 or more")
        _one_of("dtype", self.dtype, tuple(DTYPES))
        _one_of("optimizer", self.optimizer, OPTIMIZERS)
        self._check_train()
        self._check_shard()

    @property
    def rank(self) -> int | None:
        """The rank of LoRA's matrices; None where all parameters are trained."""
        if self.train == "full":
            return None
        return int(self.train.partition(":")[2] or RANK)

    @property
    def in_four_bits(self) -> bool:
        """True if the weights of linear layers are in 4 bits."""
        return self.train.startswith("qlora")

    @property
    def weights(self) -> torch.dtype:
        """The type of the model's parameters."""
        return DTYPES[self.dtype]

    def _check_train(self) -> None:
        if not re.fullmatch(r"full|q?lora(:[1-9]\d*)?", self.train):
            raise FxrematError(
                f'train is {shortened(self.train)}; it is "full", "lora", "lora:16" (a rank), "qlora" or "qlora:16"'
            )

    def _check_shard(self) -> None:
        if self.shard == "tp" and self.train != "full":
            raise FxrematError(f'shard="tp" is answered for train="full"; train is {self.train!r}')
        if self.shard is not None:
            _one_of("shard", self.shard, SHARDS)
        if (self.devices > 1) != (self.shard is not None):
            raise FxrematError('devices and shard go together: devices=8, shard="fsdp"')


def training_of(settings: Mapping[str, Any]) -> Training:
    """Return the settings that a user passed by name. Raises `FxrematError` for an unknown one, and `Training`'s."""
    known = [field.name for field in fields(Training)]
    for name in settings:
        if name not in known:
            near = did_you_mean(name, known)
            raise FxrematError(f"unknown setting {shortened(name)}{near}; there are {', '.join(known)}")
    return Training(**settings)


def _one_of(name: str, given: object, known: tuple[str, ...]) -> None:
    if given not in known:
        raise FxrematError(f"{name} is {shortened(given)}; it is one of {', '.join(known)}")
