"""Print what fxremat decided for a ResNet, and the code that runs because of it.

A plan prints itself; its schedule is text that can be read back; its graphs are torch.fx graphs.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat


class Block(nn.Module):
    """Two convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Four stages of two blocks; returns the loss."""

    def __init__(self, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        self.blocks = nn.Sequential()
        for inputs, outputs in pairwise(widths):
            self.blocks.append(Block(inputs, outputs, stride=1 if inputs == outputs else 2))
            self.blocks.append(Block(outputs, outputs, stride=1))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = self.blocks(self.stem(images)).mean((2, 3))
        return F.cross_entropy(self.head(features), labels)


def show(title: str, graph: torch.fx.GraphModule, first: str, lines: int = 16) -> None:
    """Some lines of the graph's code, from the first that has `first` in it."""
    code = graph.print_readable(print_output=False).splitlines()
    start = next((number for number, line in enumerate(code) if first in line), 0)
    print(f"\n--- {title}, lines {start + 1} to {start + lines} of {len(code)}")
    for line in code[start : start + lines]:
        print(line[:150])


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    images, labels = torch.randn(16, 3, 64, 64), torch.randint(10, (16,))

    plan = fxremat.capture(ResNet(), (images, labels)).plan("65%")  # looks, and does not run the model
    print(plan)

    print("\n--- a schedule is text, and text is a schedule")
    assert fxremat.Schedule.parse(str(plan.schedule)) == plan.schedule
    blocks = range(1, len(plan.chain.blocks) + 1)
    keep_all = " ".join([*(f"Fall{i}" for i in blocks), *(f"B{i}" for i in reversed(blocks))])
    for name, schedule in (("the plan", plan.schedule), ("keep all", fxremat.Schedule.parse(keep_all))):
        timeline = fxremat.simulate(plan.chain, schedule)
        print(f"{name}: {timeline.peak / 2**20:5.1f} MiB in {timeline.time * 1e3:4.0f} ms")

    show("the forward graph", plan.forward_graph, first="convolution")
    show("the backward graph where something is computed again", plan.backward_graph, first="__r1")


if __name__ == "__main__":
    main()
