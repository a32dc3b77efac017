"""Models of the transformers library from their configuration, without data, and the inputs of a training call."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fxremat.errors import FxrematError
from fxremat.fitting.loaded import META, Loaded, building, needs, no_setting, numbers
from fxremat.fitting.settings import Training
from fxremat.fitting.tensor_parallel import part_of_one

LENGTH = 2048  # tokens, where neither the user nor the configuration says fewer
IMAGE = 224  # pixels, where neither the user nor the configuration says how many
UNDECLARED = {"head_dim"}  # models read it by `getattr` where the class of their configuration has none
WITH_LOSS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForImageTextToText")


def from_config(settings: Mapping[str, Any], training: Training, name: str, added: Sequence[str] = ()) -> Loaded:
    """Return the model that a configuration describes.

    Args:
        settings: the contents of a `config.json`.
        added: names of settings that the user added to it.

    Raises:
        FxrematError: transformers is missing or does not know the model or an added setting, it cannot make a model of
            these settings, or the inputs of the model are not known here.
    """
    try:
        import transformers
    except ImportError:
        raise needs("transformers", f"{name}, a model of the transformers library,") from None
    kind = str(settings.get("model_type"))
    try:
        config = transformers.AutoConfig.for_model(kind, **{k: v for k, v in settings.items() if k != "model_type"})
    except Exception as error:  # whatever the library does with these settings
        raise FxrematError(f"{name}: transformers {transformers.__version__} cannot read this configuration of "
                           f"{kind!r}: {' '.join(str(error).split())}") from error
    _check_added(config, added, name)
    with building(name):
        model = _model(transformers, config, training, name)
    inputs, sizes, notes = _inputs(model, training, name)
    source = str(settings.get("_name_or_path") or name)
    cut = ', tp_plan="auto"' if training.shard == "tp" else ""
    code = (
        f"model = transformers.{type(model).__name__}.from_pretrained({source!r}, dtype={training.weights}{cut})",
        "model.config.use_cache = False",
    )
    return Loaded(
        model=model, inputs=inputs, name=name, library="transformers", sizes=sizes, code=code, notes=notes,
        layers_known=True,
    )


def _check_added(config: Any, added: Sequence[str], name: str) -> None:
    try:
        default = type(config)()
    except (TypeError, ValueError):  # a class that is only made of settings
        return
    for key in set(added) - UNDECLARED:
        try:
            functools.reduce(getattr, key.split("."), default)
        except AttributeError:
            raise no_setting(name, key, vars(default)) from None


def _model(transformers: Any, config: Any, training: Training, name: str) -> nn.Module:
    architectures: list[str] = list(getattr(config, "architectures", None) or ["AutoModelForCausalLM"])
    kind = getattr(transformers, architectures[0], None)
    if kind is None:
        raise FxrematError(f"{name}: transformers {transformers.__version__} has no {architectures[0]}")
    make = getattr(kind, "_from_config", None) or kind.from_config
    if training.shard == "tp":
        model: Any = part_of_one(lambda one: make(one, dtype=training.weights), config, training.devices, name)
    else:
        with META:
            model = make(config, dtype=training.weights)
    for part in {id(part): part for part in (model.config, model.config.get_text_config())}.values():
        if hasattr(part, "use_cache"):
            part.use_cache = False
    model.train()
    made: nn.Module = model
    return made


def _inputs(model: Any, training: Training, name: str) -> tuple[dict[str, Any], dict[str, int], tuple[str, ...]]:
    """Return the inputs of a training call, their sizes by name, and notes on what they leave out."""
    main, config, batch = model.main_input_name, model.config, training.batch
    if main == "pixel_values" and hasattr(config, "num_labels"):
        side = training.image or int(getattr(config, "image_size", None) or IMAGE)
        pixels = _floats(training, batch, int(getattr(config, "num_channels", 3)), side, side)
        return {"pixel_values": pixels, "labels": numbers(batch)}, {"batch": batch, "image": side}, ()
    if main == "input_features" and hasattr(config, "num_mel_bins"):
        length = training.length or int(config.max_target_positions)
        sound = _floats(training, batch, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": sound, "labels": numbers(batch, length)}, {"batch": batch, "length": length}, ()
    if main == "input_ids":
        return _text(model, training, name)
    raise FxrematError(
        f"{name}: the inputs of {type(model).__name__} ({main}) are not known here; write a function that returns the "
        "model and its inputs, and name it as package.module:function"
    )


def _text(model: Any, training: Training, name: str) -> tuple[dict[str, Any], dict[str, int], tuple[str, ...]]:
    config, batch = model.config.get_text_config(), training.batch
    longest = getattr(config, "max_position_embeddings", None)
    length = training.length or min(LENGTH, longest or LENGTH)
    if longest is not None and length > longest:
        raise FxrematError(f"{name}: length is {length}; the model has positions for {longest} tokens")
    tokens = numbers(batch, length)
    inputs: dict[str, Any] = {"input_ids": tokens}
    sizes, notes = {"batch": batch, "length": length}, ()
    if type(model).__name__.endswith(WITH_LOSS):
        inputs["labels"] = numbers(batch, length)
    elif type(model).__name__.endswith("ForSequenceClassification"):
        inputs["labels"] = numbers(batch)
    else:
        raise FxrematError(
            f"{name}: {type(model).__name__} has no loss that is known here; set architectures to one that has, such "
            'as --config architectures=["LlamaForCausalLM"]'
        )
    vision = getattr(model.config, "vision_config", None)
    if vision is None:
        return inputs, sizes, notes
    takes = inspect.signature(model.forward).parameters
    if "token_type_ids" in takes:
        inputs["token_type_ids"] = numbers(batch, length)
    if "image_grid_thw" in takes or not hasattr(vision, "image_size"):
        if training.image is not None:
            raise FxrematError(
                f"{name}: images of {type(model).__name__} cannot be captured: how they are cut into windows depends "
                "on their values; without image, its text is answered"
            )
        return inputs, sizes, ("texts alone: no image is in the batch, and the tower for images gets no gradient",)
    side = training.image or int(vision.image_size)
    inputs["pixel_values"] = _floats(training, batch, int(getattr(vision, "num_channels", 3)), side, side)
    return inputs, {**sizes, "image": side}, notes


def _floats(training: Training, *shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=training.weights, device=META)
