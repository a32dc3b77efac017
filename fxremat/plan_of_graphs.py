"""Plans of models that are several graphs, which print as text."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from fxremat.errors import FxrematError
from fxremat.planned_graphs import PlannedGraphs
from fxremat.show.graphs import page, snapshot
from fxremat.show.notebook import framed
from fxremat.show.snapshot import write


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PlanOfGraphs(PlannedGraphs):
    """The plan for a model that is several graphs, on the path of the last step, which shows itself as text and a page.

    Bytes are above what was allocated when the model's forward began. Other sequences of calls, such as the
    other side of a branch, are planned too (`paths`).
    """

    def to_html(self) -> str:
        """Return an HTML page that shows the plan, with its memory over the step as a picture."""
        return page(self)

    def snapshot(self) -> dict[str, Any]:
        """Return the planned memory as a memory snapshot of PyTorch; what a call saves, or needs, is one block of it.
        """
        return snapshot(self)

    def save_snapshot(self, path: str | os.PathLike[str]) -> None:
        """Write the planned memory to a file that pytorch.org/memory_viz and `torch.cuda._memory_viz` open."""
        write(self.snapshot(), path)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Raise `FxrematError`: only plans of models that are one graph are saved."""
        raise FxrematError(
            f"{os.fspath(path)} is not written: a plan of several graphs, or of several calls before one backward, "
            "belongs to the calls of this process; that of a model which is one graph (fullgraph=True) and is called "
            "once can be saved"
        )

    def __str__(self) -> str:
        return self.describe()

    def __repr__(self) -> str:
        return f"<fxremat plan: {self.headline}>"

    def _repr_html_(self) -> str:
        return framed(self.to_html(), str(self))
