"""Keep everything: Fall1 .. Falln Bn .. B1, each block with its fastest option. Nothing is faster."""

from fxremat.chains.chain import Block, Chain
from fxremat.chains.schedule import Backward, Forward, Keep, Schedule


def schedules(chain: Chain) -> list[Schedule]:
    """Return the only schedule of this solver, in a list."""
    forwards = [
        Forward(number, Keep.ALL, fastest(block)) for number, block in enumerate(chain.blocks, start=1)
    ]
    return [Schedule((*forwards, *(Backward(number) for number in range(len(chain), 0, -1))))]


def fastest(block: Block) -> int:
    """Return the number of the option with the fastest backward; of equally fast ones, the one that saves least."""
    options = enumerate(block.choices)
    return min(options, key=lambda entry: (entry[1].backward_time, entry[1].saved_bytes))[0]
