"""Turn a step graph that is cut into blocks, with the costs of its ops, into a Chain that solvers can plan.

The scratch of a block's operation is the most memory that it allocates beyond what the chain model already
counts while the operation runs. It is measured by an exact replay of the block by itself (`step.liveness`). The
model counts

    F      a_l (or A_l[o]) + scratch          B      A_l[o] + a_{l-1} + d_l, then d_{l-1} + scratch

where a_l is the output of block l, A_l[o] what its option o saves for its backward, d_l the gradient of a_l.
Values that cross many boundaries are counted once for each block and phase, in `held_bytes`: values kept until
their last reader whatever the plan, gradients that outlive a block whose ops do not read them, and the model's
outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from fxremat.chains.chain import Block, Chain, Option
from fxremat.chains.schedule import Keep
from fxremat.step.costs import Costs
from fxremat.step.layout import Layout
from fxremat.step.liveness import Sizes, live_bytes
from fxremat.step.order import Replay
from fxremat.step.program import Recorder
from fxremat.step.step_graph import Origin, StepGraph, bits_of


def chain_of(layout: Layout, costs: Costs) -> Chain:
    """Return the chain for a layout: sizes and times of its blocks. O(blocks * options * ops of a block)."""
    return _Builder(layout, costs).chain()


@dataclass
class _Builder:
    layout: Layout
    costs: Costs
    _kept: dict[int, set[int]] = field(default_factory=dict)  # what `_kept_whatever` returned

    def chain(self) -> Chain:
        blocks = tuple(self._block(number) for number in range(len(self.layout.blocks)))
        return Chain(blocks=blocks, input_bytes=0, input_grad_bytes=0)

    @property
    def graph(self) -> StepGraph:
        return self.layout.graph

    @cached_property
    def block_of(self) -> dict[int, int]:
        """Index of a backward op -> index of the block that it belongs to."""
        return {op: number for number, block in enumerate(self.layout.blocks) for op in block.backward}

    @cached_property
    def gradients(self) -> dict[int, tuple[int, int]]:
        """Gradient -> (block that computes it, last block that reads it), for gradients that another block reads.

        Gradients that the step returns are left out.
        """
        last: dict[int, int] = {}
        for op in self.graph.backward_ops:
            for value in op.reads:
                if self.graph.values[value].origin is Origin.BACKWARD:
                    last[value] = min(self.block_of[op.index], last.get(value, len(self.layout.blocks)))
        found = {}
        for value, reader in last.items():
            producer = self.graph.values[value].producer
            assert producer is not None
            if self.block_of[producer] > reader and value not in self.graph.returned:
                found[value] = (self.block_of[producer], reader)
        return found

    def _size(self, values: Iterable[int]) -> int:
        return sum(self.costs.sizes.values[value] for value in values)

    @cached_property
    def _entering(self) -> list[set[int]]:
        """d_l, the gradient of each block's output: values that the next block's backward computes for it alone."""
        found = [set[int]() for _ in self.layout.blocks]
        for value, (made, read) in self.gradients.items():
            if made == read + 1:
                found[read].add(value)
        return found

    def _held(self, block: int) -> int:
        """Return the bytes alive during a block's backward that no other size counts.

        They are values that every plan keeps until their last use, gradients that wait for other blocks, and what a
        loss keeps.
        """
        passing = {v for v, (made, read) in self.gradients.items() if read <= block < made}
        alive = {value for value in self.layout.held if self._first_reader[value] <= block}
        # weight gradients count as scratch memory of the last block's backward
        last = block == len(self.layout.blocks) - 1
        tangents = {t for t, reader in self._tangents.items() if reader <= block and not last}
        loss = 0 if last else self.costs.sizes.root
        return self._size(passing - self._entering[block]) + self._size(alive) + self._size(tangents) + loss

    @cached_property
    def _tangents(self) -> dict[int, int]:
        """Gradient that the caller passes in -> lowest block whose backward reads it; 0 if the caller keeps it alive.
        """
        readers: dict[int, int] = {}
        for op in self.graph.backward_ops:
            for value in op.reads:
                readers[value] = min(self.block_of[op.index], readers.get(value, len(self.layout.blocks)))
        tangents = [v.index for v in self.graph.values if v.origin is Origin.TANGENT]
        return {t: 0 if t in self.graph.held_tangents else readers.get(t, 0) for t in tangents}

    @cached_property
    def _first_reader(self) -> dict[int, int]:
        """For each value that every plan keeps until its last use (a held value), the lowest block that reads it.

        The value is freed after that block's backward.
        """
        first = dict.fromkeys(self.layout.held, len(self.layout.blocks))
        for number, block in enumerate(self.layout.blocks):
            for index in (*block.forward, *block.backward):
                for value in (*self.graph.ops[index].reads, *self.graph.ops[index].writes):
                    if value in first:
                        first[value] = min(first[value], number)
        forever = self.graph.pinned
        return {value: 0 if value in forever else block for value, block in first.items()}

    def _block(self, number: int) -> Block:
        place = self.layout.blocks[number]
        seconds, scratch = self._forward(number, Keep.CHECKPOINT, 0, place.boundary & place.made)
        options = [self._option(number, option) for option in range(len(place.saved))]
        returned = {v for op in place.backward for v in self.graph.ops[op].writes} & self.graph.returned
        reads = {value for index in place.forward for value in self.graph.ops[index].reads}
        return Block(
            name=self.layout.names[number],
            forward_time=seconds,
            backward_time=options[0].backward_time,
            output_bytes=self._size(place.boundary),
            saved_bytes=options[0].saved_bytes,
            grad_bytes=self._size(self._entering[number]),
            forward_scratch=scratch,
            backward_scratch=options[0].backward_scratch,
            weight_bytes=sum(self._primals[value] for value in self._primals.keys() & reads),
            weight_grad_bytes=self._size(returned),
            held_bytes=self._held(number),
            save_scratch=options[0].save_scratch or 0,
            options=tuple(options[1:]),
        )

    @cached_property
    def _primals(self) -> dict[int, int]:
        """Value -> bytes, for parameters, buffers and inputs of the step."""
        return {v.index: v.bytes for v in self.graph.values if v.origin is Origin.PRIMAL}

    def _option(self, number: int, option: int) -> Option:
        place = self.layout.blocks[number]
        saved = place.saved[option]
        _, save_scratch = self._forward(number, Keep.ALL, option, saved)
        seconds, backward_scratch = self._backward(number, option)
        return Option(
            saved_bytes=self._size(saved | place.boundary),
            backward_time=seconds,
            backward_scratch=backward_scratch,
            save_scratch=save_scratch,
        )

    @cached_property
    def _sizes(self) -> Sizes:
        """Sizes for simulating one block alone.

        Values that every plan keeps count as 0 bytes, as they are counted elsewhere.
        """
        values = list(self.costs.sizes.values)
        for value in self.layout.held:
            values[value] = 0
        return Sizes(values=values, workspace=self.costs.sizes.workspace, seed=self.costs.sizes.seed)

    def _forward(self, number: int, keep: Keep, option: int, kept: frozenset[int]) -> tuple[float, int]:
        """Return the seconds of a block's forward, and its peak in bytes besides the values in `kept`."""
        near = self.layout.bits[number].near_forward
        elsewhere = {v for v in self.layout.held - self.layout.blocks[number].made if near >> v & 1}
        at_hand = self.layout.boundary_before(number) | elsewhere
        recorder = Recorder(self.layout)
        for value in at_hand:
            recorder.give(value)
        replay = Replay(self.layout, bits_of(at_hand))
        replay.forward(number, keep, option)
        recorder.follow(replay.ops, replay.blocks)
        program = recorder.program(len(replay.ops))
        memory = live_bytes(program, self._sizes, at_hand={}, kept=kept)
        return self.costs.time(program), max(0, max(memory.during, default=0) - self._size(kept))

    def _backward(self, number: int, option: int) -> tuple[float, int]:
        """Return the seconds of a block's backward from what a save option kept, and its scratch in bytes."""
        place = self.layout.blocks[number]
        recorder = Recorder(self.layout, set(_span_of(place.forward)))
        stored = place.saved[option] | place.boundary | self.layout.boundary_before(number)
        entering = self._entering[number]
        at_hand = {recorder.give(value): self.costs.sizes.values[value] for value in sorted(stored | entering)}
        others = self._kept_whatever(number)
        for value in sorted(others - stored - entering):
            at_hand[recorder.give(value)] = 0
        replay = Replay(self.layout, bits_of(stored | entering | others), (1 << self.graph.forward_count) - 1)
        replay.backward(number)
        order = replay.order()
        recorder.follow(order.ops, order.blocks)
        program = recorder.program(0)
        written = {value for index in place.backward for value in self.graph.ops[index].writes}
        stays = (written & self._leaving) | self.layout.boundary_before(
            number
        )  # the block's input may also be among the values saved for the block before
        memory = live_bytes(program, self._sizes, at_hand=at_hand, kept=stays)
        leaving = self._size(self._entering[number - 1]) if number else 0
        peak = max(memory.during, default=0)
        if number == len(self.layout.blocks) - 1:
            tangents = self._size(self._tangents) + self.costs.sizes.root
            peak = max(peak + tangents, self._size(stored) + max(tangents, self.costs.sizes.outside))
        counted = self._size(stored) + self._size(entering) + leaving
        return self.costs.time(program), max(0, peak - counted)

    def _kept_whatever(self, number: int) -> set[int]:
        """Return values that a block's backward may read, and that are in memory then whatever the plan saves."""
        if number not in self._kept:
            near = self.layout.bits[number].near_backward
            passing = {v for v, (made, read) in self.gradients.items() if read <= number < made}
            kept = self.layout.held | passing | self._returned_before(number)
            self._kept[number] = {value for value in kept if near >> value & 1}
        return self._kept[number]

    def _returned_before(self, number: int) -> set[int]:
        """Return gradients of later blocks that the step returns and that this block's backward reads."""
        ops = [self.graph.ops[index] for index in self.layout.blocks[number].backward]
        read = {value for op in ops for value in op.reads}
        made = {value for op in ops for value in op.writes}
        return (read & self.graph.returned) - made

    @cached_property
    def _leaving(self) -> set[int]:
        return set(self.gradients) | self.graph.returned


def _span_of(ops: Sequence[int]) -> range:
    """Return the numbers from the first to the last of these ops, which are in ascending order."""
    return range(ops[0], ops[-1] + 1) if ops else range(0)
