"""Forward hooks of transformers and PEFT at which tracing stops: they are installed before the call, or left out.

    transformers 5         the hooks that collect hidden states, attentions and router logits are installed at the first
                           call, under a lock, by `transformers.utils.output_capturing.maybe_install_capturing_hooks`
    transformers, PEFT     hooks that call `requires_grad_` on the output of frozen embeddings. Only
                           `torch.utils.checkpoint(..., use_reentrant=True)` needs them, so they are left out
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from fxremat.torch_private import forward_hooks_of


def set_up(model: nn.Module, place: str) -> bool:
    """Install transformers' capturing hooks, if tracing stopped at the line of code that would install them.

    Return False if `place`, where tracing stopped, is another line, or all hooks are installed.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if capturing is None or "maybe_install_capturing_hooks" not in place:
        return False
    models = [*_models_in(model)]
    hooked = {id(module) for module in models if getattr(module, "_output_capturing_hooks_installed", False)}
    found = False
    for module in models:  # outer modules come first, since their hooks also install those of inner modules
        if hooked.isdisjoint(id(inner) for inner in module.modules()):
            capturing.maybe_install_capturing_hooks(module)
            hooked |= {id(inner) for inner in module.modules()}
            found = True
    return found


def of_transformers(model: nn.Module) -> bool:
    """Tell whether a model is one of transformers, or has one inside."""
    return any(True for _ in _models_in(model))


def groups_heads(model: nn.Module) -> bool:
    """Tell whether a transformers model uses PyTorch's attention with heads that share keys and values (GQA).

    Gradients of such attention round differently with a mask that masks nothing than without a mask.
    """
    models = _models_in(model)
    return any(_groups_heads(each.config) and each.config._attn_implementation == "sdpa" for each in models)


def _models_in(model: nn.Module) -> Iterator[Any]:
    """Yield the models of transformers among a model and its modules, outer ones first."""
    library = sys.modules.get("transformers")
    if library is not None:
        yield from (module for module in model.modules() if isinstance(module, library.PreTrainedModel))


def _groups_heads(config: Any) -> bool:
    heads = getattr(config, "num_attention_heads", None)
    return isinstance(heads, int) and getattr(config, "num_key_value_heads", heads) != heads


def only_requires_grad(hook: Any) -> bool:
    """Tell whether a hook only calls `requires_grad_` on its arguments, by the names that its code uses.

    >>> only_requires_grad(lambda module, inputs, output: output.requires_grad_(True))
    True
    >>> only_requires_grad(lambda module, inputs, output: output.detach().requires_grad_(True))
    False
    """
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_names == ("requires_grad_",) and not code.co_freevars


def requires_grad_hooks(model: nn.Module) -> list[dict[int, Any]]:
    """Return the model's dictionaries of forward hooks that contain a hook which only calls `requires_grad_`."""
    tables = (table for m in model.modules() for table in forward_hooks_of(m))
    return [table for table in tables if any(map(only_requires_grad, table.values()))]


@contextlib.contextmanager
def without_requires_grad_hooks(model: nn.Module) -> Iterator[None]:
    """Within this context, remove the model's forward hooks that only call `requires_grad_`."""
    tables = [(table, dict(table)) for table in requires_grad_hooks(model)]
    for table, hooks in tables:
        for number in [number for number, hook in hooks.items() if only_requires_grad(hook)]:
            del table[number]
    try:
        yield
    finally:
        for table, hooks in tables:
            table.clear()
            table.update(hooks)
