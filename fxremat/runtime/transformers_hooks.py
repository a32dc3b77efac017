"""What a library's model does at its first call and no trace can follow: done ahead of it, where tracing met it.

transformers 5   the hooks that collect hidden states, attentions and router logits are put in place under a lock, by
                 `transformers.utils.output_capturing.maybe_install_capturing_hooks`
"""

from __future__ import annotations

import sys

from torch import nn


def set_up(model: nn.Module, place: str) -> bool:
    """Do what the code at `place`, where tracing stopped, would have done at a plain call. False: nothing to do."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if capturing is None or "maybe_install_capturing_hooks" not in place:
        return False
    base = sys.modules["transformers"].PreTrainedModel
    models = [module for module in model.modules() if isinstance(module, base)]
    hooked = {id(module) for module in models if getattr(module, "_output_capturing_hooks_installed", False)}
    found = False
    for module in models:  # the outermost comes first and sees to those inside
        if hooked.isdisjoint(id(inner) for inner in module.modules()):
            capturing.maybe_install_capturing_hooks(module)
            hooked |= {id(inner) for inner in module.modules()}
            found = True
    return found
