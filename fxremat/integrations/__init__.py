"""Doors for other programs: callbacks that let trainers train within a memory budget the models that they make.

    fxremat.integrations.transformers.RematCallback(mem="4GiB")    Trainer, Seq2SeqTrainer, the trainers of TRL
    fxremat.integrations.lightning.Remat(mem="4GiB")               lightning.Trainer

Each puts the planned step into the trainer's own model while training lasts: the trainer keeps its reference to the
model, and saves and evaluates it as ever. `training_steps` measures any program's steps, for the plugin of pytest.
"""

from importlib import import_module
from typing import Any

_MODULES = ("lightning", "transformers")  # each needs the library of its name


def __getattr__(name: str) -> Any:
    """Import a module that needs another library when its name is first used."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
