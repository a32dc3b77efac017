"""A reproduced figure: its curves, and what the paper says about them next to what we find."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "papers"
PICTURES = ROOT / "docs" / "papers"
MOST_ROWS = 12

Point = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves over one pair of axes; a curve has no point where it has no answer."""

    title: str
    x: str
    y: str
    curves: Mapping[str, Sequence[Point]]

    def table(self) -> str:
        """The curves as a Markdown table, thinned out where they are long."""
        xs = sorted({x for curve in self.curves.values() for x, _ in curve})
        step = -(-len(xs) // MOST_ROWS)
        lines = [f"| {self.x} | " + " | ".join(self.curves) + " |", "|---" * (len(self.curves) + 1) + "|"]
        for x in sorted({*xs[::step], *xs[-1:]}):
            cells = [next((f"{y:.3g}" for at, y in curve if at == x), "-") for curve in self.curves.values()]
            lines.append(f"| {x:.3g} | " + " | ".join(cells) + " |")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence of a paper in our words, and what our run shows."""

    claim: str
    paper: str
    ours: str
    holds: bool


@dataclass(frozen=True, kw_only=True)
class Figure:
    """All panels of a figure."""

    name: str  # such as "thesis-1.8"
    title: str
    panels: Sequence[Panel]
    claims: Sequence[Claim] = ()

    def save(self) -> None:
        """Write the numbers as JSON and the curves as a picture."""
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / f"{self.name}.json").write_text(
            json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8"
        )
        self._draw()

    @classmethod
    def load(cls, name: str) -> Figure:
        """Read back a figure that was saved under this name."""
        data = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
        return cls(
            name=data["name"],
            title=data["title"],
            panels=[Panel(**panel) for panel in data["panels"]],
            claims=[Claim(**claim) for claim in data["claims"]],
        )

    def _draw(self) -> None:
        import matplotlib as mpl

        mpl.use("svg")
        mpl.rcParams["svg.hashsalt"] = self.name  # the same picture for the same numbers
        from matplotlib import pyplot as plt

        columns = min(3, len(self.panels))
        rows = -(-len(self.panels) // columns)
        figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, 3.2 * rows), squeeze=False)
        for ax in axes.flat[len(self.panels) :]:
            ax.set_axis_off()
        for ax, panel in zip(axes.flat, self.panels, strict=False):
            for label, curve in panel.curves.items():
                if curve:
                    ax.plot(*zip(*curve, strict=True), marker=".", markersize=4, linewidth=1, label=label)
            ax.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
            ax.grid(alpha=0.3)
            ax.legend(fontsize=7)
        figure.tight_layout()
        PICTURES.mkdir(parents=True, exist_ok=True)
        figure.savefig(PICTURES / f"{self.name}.svg", metadata={"Date": None})
        plt.close(figure)
