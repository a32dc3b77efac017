"""Chains of the papers' networks: `python -m benchmarks.papers.chains` writes benchmarks/papers/chains/*.json.

Traced on fake tensors, so that no machine is too small: sizes are exact for the image and batch, times are the
roofline estimate for a V100, the device of the papers. Boundaries are those that one value crosses; blocks offer
their save sets as options. Takes a few minutes.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from benchmarks.capture import capture
from benchmarks.papers.networks import NETWORKS
from fxremat.chains.chain import Chain
from fxremat.cost.estimate import DEVICES, estimate
from fxremat.linearize.chain_of import chain_of
from fxremat.linearize.crossings import crossings
from fxremat.linearize.lay_out import lay_out
from fxremat.linearize.save_sets import add_options

FOLDER = Path(__file__).parent / "chains"
DEVICE = DEVICES["V100"]


def chain_of_model(model: nn.Module, *inputs: torch.Tensor, name: str) -> Chain:
    """The chain of one training step, by its single-value boundaries, on `DEVICE`."""
    joint = capture(model, *inputs)
    costs = estimate(joint, DEVICE)
    layout = lay_out(joint, crossings(joint).cuts(frozenset()))
    with_options = add_options(layout, costs.seconds, costs.sizes.values)
    return replace(chain_of(with_options, costs), name=name)


def read(name: str) -> Chain:
    """A committed chain, such as "resnet101_500x16"."""
    return Chain.from_json((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def as_in_the_papers(chain: Chain) -> Chain:
    """One way to save a block, and activations only: parameter gradients are counted elsewhere."""
    blocks = (replace(block, options=(), weight_grad_bytes=0) for block in chain.blocks)
    return replace(chain, blocks=tuple(blocks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("networks", nargs="*", default=list(NETWORKS), help="default: all")
    FOLDER.mkdir(exist_ok=True)
    for network in parser.parse_args().networks:
        for side, batch in NETWORKS[network].batches:
            name = f"{network}_{side}x{batch}"
            model = NETWORKS[network].build().train()
            chain = chain_of_model(model, *NETWORKS[network].draw(side, batch), name=name)
            (FOLDER / f"{name}.json").write_text(chain.to_json() + "\n", encoding="utf-8")
            print(f"{name}: {len(chain)} blocks, {sum(b.saved_bytes for b in chain.blocks) / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
