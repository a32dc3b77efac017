"""Peak against time, a panel a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from .rows import Measured, Record
from .strategies import FAMILIES

COLUMNS = 3
MOST_TIME = 2.6  # times plain's; slower points are left out of the picture
COLOURS = ("tab:blue", "tab:cyan", "tab:purple", "tab:olive", "tab:orange", "tab:brown")
OURS = "tab:red"


def draw(records: Sequence[Record], path: Path) -> None:
    """Write the picture. Needs matplotlib."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = path.stem  # the same picture for the same numbers
    from matplotlib import pyplot as plt

    lines = max(1, -(-len(records) // COLUMNS))
    figure, axes = plt.subplots(lines, COLUMNS, figsize=(4.2 * COLUMNS, 3.4 * lines + 0.6), squeeze=False)
    for ax in axes.flat[len(records) :]:
        ax.set_axis_off()
    for ax, record in zip(axes.flat, records, strict=False):
        _panel(ax, record)
    figure.tight_layout(rect=(0, 0.6 / (3.4 * lines + 0.6), 1, 1))
    handles = {label: handle for ax in axes.flat for handle, label in zip(*ax.get_legend_handles_labels())}
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=5, fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _panel(ax: Any, record: Record) -> None:
    """Hollow where gradients or buffers are wrong, faint where only a rough time was taken."""
    ax.plot(100, 1, "k*", markersize=9, label="plain PyTorch")
    for family, colour in zip(FAMILIES, COLOURS, strict=True):
        _dots(ax, record, [got for point, got in record.working if point.family == family], family, colour)
    ours = sorted((got for _, got in record.running), key=lambda got: got.peak)
    ax.plot(*_xy(record, ours), "o-", color=OURS, markersize=4, linewidth=1.2, label="fxremat", zorder=3)
    if record.floor is not None:
        ax.axvline(record.share(record.floor), color="grey", linestyle=":", linewidth=1, label="floor")
    ax.set(title=record.model, xlabel="peak, % of plain", ylabel="time / plain", xlim=(0, 112))
    ax.grid(alpha=0.3)


def _dots(ax: Any, record: Record, every: Iterable[Measured], label: str, colour: str) -> None:
    shown = [got for got in every if record.slowdown(got) <= MOST_TIME]
    ax.plot([], [], ".", color=colour, label=label)
    for got in shown:
        wrong = "wrong" in (got.gradients, got.buffers)
        ax.plot(
            *_xy(record, [got]), "o", color=colour, markersize=4, fillstyle="none" if wrong else "full",
            alpha=0.35 if got.seconds is None else 1.0,
        )  # fmt: skip


def _xy(record: Record, every: Sequence[Measured]) -> tuple[list[float], list[float]]:
    return [record.share(got.peak) for got in every], [record.slowdown(got) for got in every]
