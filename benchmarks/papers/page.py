"""docs/papers.md: claim by claim what the papers say and what we find, from the saved figures."""

from __future__ import annotations

from benchmarks.papers.figure import PICTURES, RESULTS, ROOT, Figure

PAGE = ROOT / "docs" / "papers.md"
ORDER = (
    "thesis-1.8",
    "thesis-1.9",
    "rr9273-10",
    "thesis-2.4",
    "thesis-2.5",
    "thesis-3.5",
    "thesis-3.6",
    "thesis-4.2",
    "thesis-4.3",
    "thesis-4.4",
    "thesis-4.5",
    "headline",
    "beyond-pofo",
)
INTRODUCTION = """# What the papers claim, and what we find

Figures of A. Shilova's thesis (*Memory Saving Strategies for Deep Neural Network Training*, 2021) and of RR-9273
(*Optimal Memory-aware Backpropagation of Deep Join Networks*), reproduced by `python -m benchmarks.papers`.
Everything here is simulated. The networks are plain-torch implementations, captured on fake tensors: their sizes
are exact, their times are roofline estimates for a V100, where the papers measured. Absolute numbers therefore
differ; the estimates are kind to networks of many small operations (DenseNet), whose forwards then leave the link
less time than they did in the papers. POFO is run as published, one table of 50 slots with sizes rounded up;
"ours" is what `fxremat.solve` finds in ten seconds, on the same chains, with one way to save a block.

This page is written by that command from `benchmarks/results/papers/`; where a claim does not hold, it says so.
"""


def write_page() -> None:
    """Write the page from the figures that have been saved."""
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page in Markdown: a table of all claims, then a section for each figure."""
    figures = [Figure.load(name) for name in ORDER if (RESULTS / f"{name}.json").exists()]
    rows = ["| | claim | paper | ours | holds |", "|---|---|---|---|---|"]
    rows += [
        f"| [{figure.name}](#{figure.name.replace('.', '')}) | {claim.claim} | {claim.paper} | {claim.ours} | "
        f"{'yes' if claim.holds else '**no**'} |"
        for figure in figures
        for claim in figure.claims
    ]
    sections = [_section(figure) for figure in figures]
    return "\n".join([INTRODUCTION, *rows, "", *sections])


def _section(figure: Figure) -> str:
    picture = (PICTURES / f"{figure.name}.svg").relative_to(PAGE.parent).as_posix()
    tables = "\n\n".join(f"**{panel.title}**\n\n{panel.table()}" for panel in figure.panels)
    return (
        f"## {figure.name}\n\n{figure.title}\n\n![{figure.title}]({picture})\n\n"
        f"<details><summary>numbers</summary>\n\n{tables}\n\n</details>\n"
    )
