"""A callback of `transformers.Trainer` that trains the trainer's model within a memory budget."""

from __future__ import annotations

import logging
from typing import Any, Unpack

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from fxremat.errors import FxrematError
from fxremat.integrations.in_place import InPlace, with_optimizer
from fxremat.options import CompileOptions, options_of

log = logging.getLogger(__name__)


class RematCallback(TrainerCallback):  # type: ignore[misc]
    """Train the model of a `Trainer`, `Seq2SeqTrainer` or a trainer of TRL within a memory budget.

        Trainer(model, args, train_dataset=data, callbacks=[RematCallback(mem="4GiB")])

    The trainer may make the model itself, from a name or by `model_init`, with adapters of PEFT or without. The
    model's training calls run planned steps from the beginning of `train()` to its end; evaluation, generation and
    saving are those of the plain model. Losses, gradients and saved checkpoints have the bits of training without
    fxremat. Gradient checkpointing is turned off, since the plan decides what is recomputed.

    Args:
        mem: the budget of a training step, in the forms that `fxremat.compile` takes.
        options: further options of `fxremat.compile`, such as dynamic=True for batches of many lengths, or device_mem
            instead of `mem`: the state of the trainer's optimizer is counted.

    Raises:
        FxrematError: an option is unknown or has no such value; or, when training begins: the arguments have
            torch_compile=True, which compiles the model again; or what `fxremat.compile` raises.
    """

    def __init__(self, mem: int | str | None = None, **options: Unpack[CompileOptions]) -> None:
        options_of(mem=mem, **options)  # refused here, not after the model was loaded
        self.mem, self.options = mem, options
        self.inside: InPlace | None = None
        self._told = False

    @property
    def plan(self) -> Any:
        """The latest plan; None before the first step."""
        return self.inside.plan if self.inside else None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: nn.Module, **given: Any
    ) -> None:
        """Put the planned step into the trainer's model."""
        if args.torch_compile:
            raise FxrematError("torch_compile=True compiles the model a second time; RematCallback goes without it")
        turn_off: Any = getattr(model, "gradient_checkpointing_disable", None)
        if args.gradient_checkpointing and turn_off is not None:
            turn_off()
            log.warning("gradient_checkpointing is turned off: the plan decides what is recomputed")
        self.on_train_end(args, state, control)
        options = with_optimizer(self.options, given.get("optimizer"))
        self.inside, self._told = InPlace(model, self.mem, **options), False

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Log the plan after the first step."""
        if not self._told and self.plan is not None:
            self._told = True
            log.info("%s", self.plan.headline)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Take the planned step out of the model; `plan` stays."""
        if self.inside is not None:
            self.inside.remove()
