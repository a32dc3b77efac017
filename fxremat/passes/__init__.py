"""Rewrites of graphs, one per file, and lowering: from a program to the two graphs that run.

For other compilers there are passes that plan a graph which another tool captured, and return it rewritten:

    partitioner(mem)            a partition function of AOTAutograd, which AutoParallel and torch_xla take too
    InductorPartitioner(mem)    for `torch._inductor.config.custom_partitioner_fn`
    step_pass(mem)              for the graph of a full training step
    tag(graph, plan)            marks nodes as kept or recomputed, for executors that read such marks
    as_emitted                  a compiler that runs a graph as it is
    to_text(graph), from_text   a captured graph as text, which `fxremat opt` plans
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxremat.compilers.inductor import InductorPartitioner
    from fxremat.compilers.partition import Partitioner, as_emitted, partitioner
    from fxremat.compilers.tags import tag
    from fxremat.compilers.text import from_text, to_text
    from fxremat.compilers.whole_step import StepPass, step_pass

__all__ = [
    "InductorPartitioner",
    "Partitioner",
    "StepPass",
    "as_emitted",
    "from_text",
    "partitioner",
    "step_pass",
    "tag",
    "to_text",
]

_PASSES = {  # names of passes that plan, and the modules that they are imported from on first use
    "InductorPartitioner": "fxremat.compilers.inductor",
    "Partitioner": "fxremat.compilers.partition",
    "StepPass": "fxremat.compilers.whole_step",
    "as_emitted": "fxremat.compilers.partition",
    "from_text": "fxremat.compilers.text",
    "partitioner": "fxremat.compilers.partition",
    "step_pass": "fxremat.compilers.whole_step",
    "tag": "fxremat.compilers.tags",
    "to_text": "fxremat.compilers.text",
}


def __getattr__(name: str) -> Any:
    """Import a pass that plans on its first use, since importing planning here would be circular."""
    if name in _PASSES:
        return getattr(import_module(_PASSES[name]), name)
    raise AttributeError(f"module 'fxremat.passes' has no attribute {name!r}")
