"""Answer whether a model trains on a device: `fits`.

    loaded    = load(model)                  on the meta device, from a configuration, a name or a function
    captured  = captured_for(loaded)         a few of its equal layers, which are repeated; once for several devices
    step      = captured.on(device)          with its estimated costs there
    resident  = resident_of(loaded, step)    weights, optimizer state and all else that is there the whole time
    frontier  = frontier_of(step)            what memory buys
    way       = the fastest that fits: all on the device, else with activations, else with weights on the host

Nothing is allocated on a device, and no weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack, overload

from torch import nn

from fxremat.cost.devices import Device
from fxremat.errors import FxrematError
from fxremat.fitting.answer import Answer, Answers
from fxremat.fitting.ledger import Resident, total_of
from fxremat.fitting.loaded import Loaded
from fxremat.fitting.loading import load
from fxremat.fitting.resident import planned_step, resident_of
from fxremat.fitting.settings import Training, TrainingSettings, training_of
from fxremat.fitting.steps import CapturedModel, EstimatedStep, captured_for
from fxremat.fitting.ways import (
    Room,
    Way,
    frontier_of,
    on_the_device,
    with_activations_on_host,
    with_weights_on_host,
)
from fxremat.search.survey import least_of
from fxremat.units import format_bytes, parse_bytes, shortened

QUICK = 1000  # captured ops: of a larger step no second batch is tried


@overload
def fits(  # type: ignore[overload-overlap]  # a text is a sequence of texts
    model: str | nn.Module,
    *,
    on: str | Device,
    device_mem: int | str | None = None,
    inputs: Any = None,
    config: Mapping[str, Any] | None = None,
    **settings: Unpack[TrainingSettings],
) -> Answer: ...
@overload
def fits(
    model: str | nn.Module,
    *,
    on: Sequence[str | Device],
    device_mem: int | str | None = None,
    inputs: Any = None,
    config: Mapping[str, Any] | None = None,
    **settings: Unpack[TrainingSettings],
) -> Answers: ...
def fits(
    model: str | nn.Module,
    *,
    on: str | Device | Sequence[str | Device],
    device_mem: int | str | None = None,
    inputs: Any = None,
    config: Mapping[str, Any] | None = None,
    **settings: Unpack[TrainingSettings],
) -> Answer | Answers:
    """Tell whether a model trains on a device, and with which memory; no data is allocated.

        print(fxremat.fits("llama-3-8b", on="H200", length=4096))
        print(fxremat.fits("llama-3-8b", on=["RTX-4090", "A100-80GB", "H200"]))

    Most of its time is capturing and planning; docs/fits.md has the seconds that it takes for public models.

    Args:
        model: a configuration of transformers or diffusers (its folder or file, or a name on the hub), a name that timm
            knows, "package.module:factory", the name of a configuration that comes with fxremat, or a model that goes
            with `inputs`.
        on: a device by name, such as "RTX-4090": `fxremat devices` lists them. Several in a list: the model is
            captured once, and the answers are returned together.
        device_mem: what the process may have on the device, such as "20GiB"; None: all that it has.
        inputs: those of a training call, where `model` is a module; they may be on the meta device.
        config: settings of the configuration that differ, such as {"num_hidden_layers": 16}.
        settings: what is trained and how, the fields of `fxremat.fitting.settings.Training`:

            batch       examples in one forward and backward, on each device: 1
            length      tokens of an example; None: what the configuration suggests
            image       pixels along a side of an image; None: what the configuration says
            dtype       "bf16", "fp32" or "autocast"
            train       "full", or "lora:16", "qlora:16" with a rank
            optimizer   "adamw", "adamw8bit", "sgd", "adafactor" or "muon"
            accumulate  backwards before each step of the optimizer: 1
            devices     devices that train together: 1
            shard       "fsdp", "ddp" or "tp", for several devices

    Raises:
        CaptureError: the model is not one graph.
        FxrematError: a setting has a value that it cannot have, a library is missing, or what is asked for is not
            answered yet; the message says what would be.
    """
    training = training_of(settings)
    if not isinstance(on, str | Device | Sequence):
        raise FxrematError(f"on is {shortened(on)}; it is the name of a device, a Device, or a list of these")
    if config is not None and not isinstance(config, Mapping):
        raise FxrematError(f'config is {shortened(config)}; it maps names of settings to values: {{"n_layer": 16}}')
    names = [on] if isinstance(on, str | Device) else [*on]
    if not names:
        raise FxrematError("`on` is an empty list: name a device, such as on=['RTX-4090']")
    cards = [device_with_memory(name, device_mem) for name in names]
    if len({card.torch_device.type for card in cards}) > 1:
        raise FxrematError(f"{', '.join(map(str, cards))} run different kernels: ask for each kind of device alone")
    loaded = load(model, inputs, training, config or {})
    captured = captured_for(loaded, cards[0])
    answers = [_answer(loaded, captured, training, card, limited=device_mem is not None) for card in cards]
    if not isinstance(on, str | Device):
        return Answers(answers=tuple(answers))
    (answer,) = answers
    quick = isinstance(model, str) and answer.room.step.captured_ops <= QUICK
    if not quick or answer.way is None or answer.way.how:
        return answer
    return replace(answer, larger=_larger(model, training, config or {}, cards[0]))


def _answer(loaded: Loaded, captured: CapturedModel, training: Training, device: Device, *, limited: bool) -> Answer:
    planned, resident = _planned(loaded, captured, training, device)
    room = Room(device=device, step=planned, resident=resident, frontier=frontier_of(planned))
    way: Way | str | None = on_the_device(room) or with_activations_on_host(room)
    if way is None:
        way = with_weights_on_host(room, loaded, training)
    found, reason = (way, "") if isinstance(way, Way) else (None, way)
    return Answer(
        loaded=loaded, training=training, device=device, room=room, way=found, reason=reason, limited=limited
    )


def _planned(
    loaded: Loaded, captured: CapturedModel, training: Training, device: Device
) -> tuple[EstimatedStep, Resident]:
    """Return the step that is planned on a device, and what the device holds besides."""
    step = captured.on(device)
    return planned_step(step, training), resident_of(loaded, step, training, device)


def device_with_memory(on: str | Device, device_mem: int | str | None = None) -> Device:
    """Return a device whose memory is known, with `device_mem` of it where that is given.

    Raises `FxrematError` if the memory is not known, or `device_mem` is more than the device has.
    """
    device = Device.named(on)
    if device_mem is not None:
        size = parse_bytes(device_mem)
        if device.memory is not None and size > device.memory:
            raise FxrematError(
                f"device_mem is {format_bytes(size)}, and {device} has {format_bytes(device.memory)}: "
                "give that, or less"
            )
        return replace(device, memory=size)
    if device.memory is None:
        raise FxrematError(
            f'the memory of {device} is not stated: give device_mem="20GiB", or a device whose memory is known; '
            "`fxremat devices` lists them"
        )
    return device


def needed(model: str, training: Training, config: Mapping[str, Any], device: Device) -> int:
    """Return the least bytes of a device's memory that training a model takes, with everything on the device."""
    loaded = load(model, None, training, config)
    planned, resident = _planned(loaded, captured_for(loaded, device), training, device)
    return total_of(least_of(planned.graph, planned.costs).peak, resident)


def _larger(model: Any, training: Training, config: Mapping[str, Any], device: Device) -> int | None:
    """Return twice the batch if that fits too, else None."""
    twice = replace(training, batch=2 * training.batch)
    return twice.batch if needed(model, twice, config, device) <= (device.memory or 0) else None
