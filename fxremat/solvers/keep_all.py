"""Saves everything and recomputes nothing: all forwards, then all backwards, each block with its fastest option."""

from fxremat.chains.chain import Block, Chain
from fxremat.chains.schedule import Backward, Forward, Keep, Schedule


def schedules(chain: Chain) -> list[Schedule]:
    """Return a list with the only schedule of this solver, which saves everything."""
    forwards = [
        Forward(number, Keep.ALL, fastest(block)) for number, block in enumerate(chain.blocks, start=1)
    ]
    return [Schedule((*forwards, *(Backward(number) for number in range(len(chain), 0, -1))))]


def fastest(block: Block) -> int:
    """Return the index of the option with the fastest backward; among equally fast ones, of the one that saves least.
    """
    options = enumerate(block.choices)
    return min(options, key=lambda entry: (entry[1].backward_time, entry[1].saved_bytes))[0]
