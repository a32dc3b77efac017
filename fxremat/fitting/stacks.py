"""Stacks of equal layers in a model, which need not be captured as often as they occur.

    for stack in stacks(model): print(stack.path, stack.period, stack.count)     model.layers 1 32
    with shortened(model, stacks(model)) as kept: ...                            a model with a few layers of each

Layers are equal if their modules, the settings of these and the shapes of their tensors are. What the model around them
decides by a layer's number is read from its lists of settings: those with an entry for each layer (`layer_types`), and
those of layer numbers (`fullatt_block_indexes`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fxremat.fitting.repeat import Windows

CAPTURED = (4, 5)  # periods of a stack that are captured: three equal ones, and an end that may differ; then both ends
LONGEST_PERIOD = 12  # layers
NUMBERS = ("layer_idx", "layer_id", "layer_index", "layer_number", "block_idx")  # attributes with a layer's number


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Equal layers, or equal groups of layers, that follow one another in a list of modules.

    Layers of several kinds have the same modules and tensors, and other settings.
    """

    path: str  # the list that holds the layers, such as "model.layers"
    first: int  # number of the first of them
    period: int  # layers in a group
    kinds: tuple[int, ...]  # of each group
    head: int  # groups that are captured, and stay at the beginning
    tail: int  # groups that are captured after these, and stay at the end: the last groups are of the same kinds

    @property
    def left_out(self) -> int:
        """The number of groups that need not be captured."""
        return max(0, len(self.kinds) - self.head - self.tail)

    @property
    def windows(self) -> Windows:
        """The layers of the shortened model that repeat."""
        return Windows(
            path=self.path,
            first=self.first,
            period=self.period,
            kinds=self.kinds[: self.head + self.tail],
            before=self.head,
            copies=self.kinds[self.head : self.head + self.left_out],
        )


def stacks(model: nn.Module, captured: int = CAPTURED[0], *, mixed: bool = True) -> tuple[Stack, ...]:
    """Return the stacks of equal layers that are worth shortening; a stack inside of another one's layers is none.

    Args:
        captured: the number of groups that are left of each; more, where there are several kinds.
        mixed: layers of several kinds may be in a stack.
    """
    found: list[Stack] = []
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{other.path}.") for other in found)
        if isinstance(module, nn.ModuleList | nn.Sequential) and len(module) > captured and not inside:
            stack = _stack(path, module, _lists(model, path, len(module)), captured, mixed=mixed)
            found += [stack] if stack.left_out else []
    return tuple(found)


def _stack(
    path: str,
    layers: nn.ModuleList | nn.Sequential,
    settings: Sequence[Sequence[object]],
    captured: int,
    *,
    mixed: bool,
) -> Stack:
    """Return the run of equal groups in a list of layers that saves the most layers."""
    shown = [(_outline(layer), *of) for layer, of in zip(layers, settings, strict=True)]
    tail = captured // 2
    best = Stack(path=path, first=0, period=1, kinds=(), head=captured - tail, tail=tail)
    for period in range(1, min(LONGEST_PERIOD, len(shown) // 2) + 1):
        for first, length in _runs(shown, period):
            run = replace(best, first=first, period=period, kinds=(0,) * (length // period), head=captured - tail)
            best = max(best, run, key=lambda stack: stack.left_out * stack.period)
    for first, length in _runs([_tensors(layer) for layer in layers], 1) if mixed else ():
        run = _of_kinds(replace(best, first=first, period=1), shown[first : first + length], captured - tail)
        best = max(best, run, key=lambda stack: stack.left_out * stack.period)
    return best


def _of_kinds(stack: Stack, shown: Sequence[object], least: int) -> Stack:
    """Return the stack of layers of several kinds. Its first layers have all kinds, and end as the last ones do.

    The first ones are captured, since a model may decide by the number of a layer what it does with it.
    """
    numbers: list[object] = []
    for one in shown:
        numbers += [] if one in numbers else [one]
    kinds = tuple(numbers.index(one) for one in shown)
    tail, last = stack.tail, kinds[len(kinds) - stack.tail :]
    heads = range(least, len(kinds) - tail)
    complete = (h for h in heads if set(kinds[2 : h + 1]) == set(kinds) and kinds[h : h + tail] == last)
    return replace(stack, kinds=kinds, head=next(complete, len(kinds)))


def _runs(shown: Sequence[object], period: int) -> Iterator[tuple[int, int]]:
    """Yield (first layer, number of layers) of the runs in which each layer equals the one a period before."""
    start = 0
    for number in range(period, len(shown) + 1):
        if number == len(shown) or shown[number] != shown[number - period]:
            yield start, number - start
            start = number - period + 1


def _outline(layer: nn.Module) -> list[object]:
    """Return what decides the ops of a layer: its modules, their settings, and the shapes of their tensors."""
    found: list[object] = [_tensors(layer)]
    for module in layer.modules():
        settings = ((key, value) for key, value in vars(module).items() if not key.startswith("_"))
        found.append([(key, repr(value)) for key, value in settings if _is_plain(value) and key not in NUMBERS])
    return found


def _tensors(layer: nn.Module) -> list[object]:
    """Return the modules of a layer, and the shapes of their tensors."""
    return [
        (
            name,
            type(module),
            [(key, _shown(tensor)) for key, tensor in (*module._parameters.items(), *module._buffers.items())],
        )
        for name, module in layer.named_modules()
    ]


def _shown(tensor: torch.Tensor | None) -> object:
    return None if tensor is None else (tensor.dtype, tuple(tensor.shape), tensor.requires_grad)


def _is_plain(value: object) -> bool:
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, int | float | str | torch.dtype)


def _lists(model: nn.Module, path: str, count: int) -> list[tuple[object, ...]]:
    """Return, for each layer of a stack, what lists of settings around the stack say of its number."""
    lists = list(_settings_around(model, path))
    each = [values for values in lists if len(values) == count]
    chosen = [
        values
        for values in lists
        if len(values) < count and all(type(value) is int and 0 <= value < count for value in values)
    ]
    return [
        (*(repr(values[number]) for values in each), *(number in values for values in chosen))
        for number in range(count)
    ]


def _settings_around(model: nn.Module, path: str) -> Iterator[Sequence[Any]]:
    """Yield the lists among the settings of all modules that contain the stack, and of their configurations."""
    parts = path.split(".")
    for depth in range(len(parts)):
        around = model.get_submodule(".".join(parts[:depth]))
        yield from _lists_in(vars(around))
        config = getattr(around, "config", None)
        yield from _lists_in(config if isinstance(config, Mapping) else getattr(config, "__dict__", {}))


def _lists_in(settings: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
    for value in settings.values():
        if isinstance(value, list | tuple) and value and _is_plain(value):
            yield value


@contextlib.contextmanager
def shortened(model: nn.Module, of: Sequence[Stack]) -> Iterator[nn.Module]:
    """Leave out the groups of each stack that need not be captured, inside this context."""
    kept: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []
    try:
        for stack in of:
            layers = model.get_submodule(stack.path)
            kept.append((layers, dict(layers._modules)))
            until = stack.first + (stack.head + stack.tail) * stack.period
            rest = until + stack.left_out * stack.period
            left = [layer for number, layer in enumerate(layers._modules.values()) if not until <= number < rest]
            layers._modules.clear()
            layers._modules.update({str(number): layer for number, layer in enumerate(left)})
        yield model
    finally:
        for layers, modules in kept:
            layers._modules.clear()
            layers._modules.update(modules)
