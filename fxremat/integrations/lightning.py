"""A callback of `lightning.Trainer` that trains the trainer's module within a memory budget."""

from __future__ import annotations

import logging
from typing import Any, Unpack

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from fxremat.integrations.in_place import InPlace, with_optimizer
from fxremat.options import CompileOptions, options_of

log = logging.getLogger(__name__)


class Remat(Callback):  # type: ignore[misc]
    """Train a `LightningModule` within a memory budget.

        lightning.Trainer(callbacks=[Remat(mem="4GiB")])

    The module's `training_step` runs as a planned step from the beginning of `fit` to its end, with the loss inside.
    Validation, testing and checkpoints are those of the plain module. Losses and gradients have the bits of training
    without fxremat.

    Args:
        mem: the budget of a training step, in the forms that `fxremat.compile` takes.
        network: the name of a part of the module, such as "net": only its calls are planned, and the loss is outside.
            None: the whole `training_step`.
        options: further options of `fxremat.compile`, such as device_mem instead of `mem`: the state of the trainer's
            optimizer is counted, if it has one.

    Raises:
        FxrematError: an option is unknown or has no such value; or, when training begins, what `fxremat.compile`
            raises.
    """

    def __init__(
        self, mem: int | str | None = None, *, network: str | None = None, **options: Unpack[CompileOptions]
    ) -> None:
        options_of(mem=mem, **options)  # refused here, not after the model was loaded
        self.mem, self.network, self.options = mem, network, options
        self.inside: InPlace | None = None

    @property
    def plan(self) -> Any:
        """The latest plan; None before the first step."""
        return self.inside.plan if self.inside else None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the planned step into the module."""
        self.teardown(trainer, pl_module, "fit")
        options = with_optimizer(self.options, trainer.optimizers[0] if len(trainer.optimizers) == 1 else None)
        if self.network is not None:
            self.inside = InPlace(pl_module.get_submodule(self.network), self.mem, **options)
        else:
            whole: CompileOptions = {"method": "training_step", **options}
            self.inside = InPlace(pl_module, self.mem, **whole)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the plan."""
        if self.plan is not None:
            log.info("%s", self.plan.headline)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the planned step out of the module, after an exception too; `plan` stays."""
        if self.inside is not None:
            self.inside.remove()
