"""Load, without data, the model that `MODEL` names.

    llama-3-8b                       one of the configurations that come with fxremat (`SHIPPED`)
    folder, config.json              a configuration of transformers or diffusers
    meta-llama/Meta-Llama-3-8B       one on the hub, where there is a network
    vit_base_patch16_224             a name that timm knows
    package.module:factory           a function that returns the model and its inputs
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxremat.errors import FxrematError
from fxremat.factories import made_by
from fxremat.fitting import from_diffusers, from_timm, from_transformers
from fxremat.fitting.adapters import with_adapters
from fxremat.fitting.four_bits import in_four_bits
from fxremat.fitting.loaded import META, Loaded, UnderAutocast
from fxremat.fitting.settings import Training
from fxremat.units import shortened

CONFIGS = Path(__file__).parent / "configs"
SHIPPED = tuple(sorted(path.stem for path in CONFIGS.glob("*.json")))
"""The names of the configurations that come with fxremat: those of public models, without weights."""


def load(model: str | nn.Module, inputs: Any, training: Training, changes: Mapping[str, Any]) -> Loaded:
    """Return the model to train, and the inputs of a training call; neither has data.

    Args:
        model: a name, as above, or a model, which goes with `inputs`.
        changes: settings of the configuration that differ, by name, with dots for those inside of others.

    Raises:
        FxrematError: there is no such model, a library is missing, or the inputs of the model are not known.
    """
    if isinstance(model, nn.Module):
        if inputs is None:
            raise FxrematError(f"{type(model).__name__} goes with inputs: give those of one training call")
        if changes:
            raise FxrematError(f"config changes a configuration, and {type(model).__name__} is a model already")
        loaded = Loaded(model=model, inputs=inputs, name=type(model).__name__, library="", sizes={})
    elif isinstance(model, str):
        loaded = _named(model, training, changes)
    else:
        raise FxrematError(f"model is {shortened(model)}; it is a torch.nn.Module, or a name, such as {SHIPPED[0]!r}")
    _check_sizes(loaded, training)
    if training.shard == "tp" and loaded.library != "transformers":
        raise FxrematError(f'shard="tp" is for models of transformers, which have plans for it; {loaded.name} is none')
    if training.in_four_bits:
        loaded = in_four_bits(loaded)
    if training.rank is not None:
        loaded = with_adapters(loaded, training.rank)
    if training.dtype == "autocast":
        loaded = replace(loaded, model=UnderAutocast(loaded.model).train())
    return loaded


def _check_sizes(loaded: Loaded, training: Training) -> None:
    """Raise `FxrematError` if a size was asked for that the inputs of a model do not have."""
    default = Training()
    for name in ("batch", "length", "image"):
        size = getattr(training, name)
        if size != getattr(default, name) and name not in loaded.sizes:
            told = f"the inputs of {loaded.name} " + (f"have no {name}" if loaded.library else "are those given")
            raise FxrematError(f"{name} is {size}, and {told}: leave {name} out")


def _named(name: str, training: Training, changes: Mapping[str, Any]) -> Loaded:
    settings = _settings(name)
    if settings is not None:
        changed, added = _changed(settings, changes, name)
        if "_class_name" in changed:
            return from_diffusers.from_config(changed, training, name, added)
        if "model_type" in changed:
            return from_transformers.from_config(changed, training, name, added)
        raise FxrematError(f"{name} is no configuration of transformers (model_type) or diffusers (_class_name)")
    if changes:
        raise FxrematError(f"config changes a configuration, and {shortened(name)} has none")
    if ":" in name:
        return _from_factory(name, training)
    return from_timm.from_name(name, training)


def _settings(name: str) -> dict[str, Any] | None:
    """Return the contents of the configuration that a name stands for; None for a factory, and a model of timm."""
    path = Path(name)
    if name in SHIPPED:
        return _read(CONFIGS / f"{name}.json")
    if path.is_dir():
        return _read(path / "config.json")
    if path.suffix == ".json":
        return _read(path)
    if re.fullmatch(r"[\w.]+:[\w.]+", name) or from_timm.is_known(name):
        return None
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return _from_hub(name)
    raise FxrematError(
        f"no model {shortened(name)}: it is a folder or config.json of transformers or diffusers, a name on the hub "
        f"(owner/name), a model of timm where that is installed, package.module:factory, or one of {', '.join(SHIPPED)}"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FxrematError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(found, dict):
        raise FxrematError(f"{path} is no configuration: it holds a {type(found).__name__}")
    return found


def _from_hub(name: str) -> dict[str, Any]:
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise FxrematError(f"{name} on the hub needs huggingface-hub: pip install huggingface-hub") from None
    try:
        return _read(Path(hf_hub_download(name, "config.json")))
    except FxrematError:
        raise
    except Exception as error:  # whatever the network, the hub or its access rights do
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FxrematError(f"cannot get the configuration of {name} from the hub: {reason}") from None


def _changed(
    settings: Mapping[str, Any], changes: Mapping[str, Any], name: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return settings with changes, and the names of those that are new (`text_config.num_hidden_layers` is a name).
    """
    made: dict[str, Any] = json.loads(json.dumps(settings))
    added = []
    for key, value in changes.items():
        *outer, last = key.split(".")
        inner = made
        for part in outer:
            inner = inner.get(part, {})
            if not isinstance(inner, dict) or not inner:
                raise FxrematError(f"{name} has no settings {part!r}, which config changes by {key!r}")
        if last not in inner:
            added.append(key)
        inner[last] = value
    return made, tuple(added)


def _from_factory(name: str, training: Training) -> Loaded:
    """Return the model of a function, which is called with those settings that it has parameters for."""
    module, _, attribute = name.partition(":")
    sys.path.insert(0, "")
    try:
        factory = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the module does when it is imported
        raise FxrematError(f"cannot import {shortened(name)}: {type(error).__name__}: {error}") from error
    if not callable(factory):
        raise FxrematError(f"{name} is a {type(factory).__name__}; it must be a function")
    takes = inspect.signature(factory).parameters
    given = {"batch": training.batch, "length": training.length, "image": training.image}
    asked = {key: value for key, value in given.items() if key in takes and value is not None}
    if missing := [key for key, value in given.items() if key not in takes and value not in (None, 1)]:
        raise FxrematError(f"{name} has no parameter {missing[0]}")
    with META:
        model, inputs = made_by(partial(factory, **asked), name)
    model = model.to(training.weights)
    inputs = pytree.tree_map_only(
        Tensor, lambda t: t.to(META, training.weights) if t.is_floating_point() else t.to(META), inputs
    )
    code = (f"model, inputs = {module}.{attribute}(...)",)
    return Loaded(model=model.train(), inputs=inputs, name=name, library="", sizes=asked, code=code)
