"""Checkpointing of unequal chains that meet in a trunk or a loss, by dynamic programming over canonical schedules.

In a schedule of the canonical form, the part of a branch that is postponed first is finished last. The form is
optimal for uniform joins, whose blocks are all alike; here each block has its own seconds and bytes. a_p is the
output of block p of a branch, A_p all that its backward reads.

    cost[p, f, m]   least recomputation to run all that is right of a_{p_k} on each branch k, forward and backward,
                    in m bytes; a_{p_k} is stored and counted in m if f_k = 1, and part of A_{p_k}, counted
                    outside, if f_k = 0

    all at their ends       the loss, or the trunk as a chain of its own
    cut branch k after i    forward(s..i) + cost[p_k <- i, f_k <- 1, m - a] + C_k(s, i, rest)            i >= s
    save s of branch k      extra(s) + cost[p_k <- s, f_k <- 0, m - a - saved(s)], then B_s
    save i, lose its input  forward(s..i-1) + extra(i) + cost[p_k <- i, f_k <- 0, m - a - saved(i)] + D_k(s, i, rest)

    s = p_k + 1;  a = a_{p_k} where f_k = 1;  rest = m - a - the gradients and what else the other branches hold at p

C_k and D_k are the rows of input_drop on branch k: a part that is left for later is finished last, alone, as in Theorem
3. No gradient exists before the forward/backward split. Each branch keeps its d_0 to the end. Costs do not count the
first run of any op. Not proven optimal: with unequal costs, branches may gain by alternating in the backward.

The table is in slots, the schedule is read off in bytes, as in persistent.py. States: prod 2 (n_k + 1).

After Beaumont et al., Optimal Memory-aware Backpropagation of Deep Join Networks (RR-9273), Theorem 3.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from fxremat.chains.chain import Chain, Join
from fxremat.chains.join_schedule import JoinOp, JoinSchedule, Loss, On
from fxremat.chains.schedule import Backward, Drop, Forward, Keep, Op, Value
from fxremat.errors import BudgetTooSmall, FxrematError
from fxremat.jit import jit
from fxremat.progress import progress
from fxremat.solvers.joins.tails import Tails, tails
from fxremat.solvers.rows import least
from fxremat.solvers.sizes import Floats, Ints

_NEVER = 1 << 60
_ENTRIES = 1 << 27  # maximum number of costs in a table: 8 bytes each, 1 GiB
_STEP = 256  # number of states filled between two moments at which an interrupt can be handled


class BranchSteps(NamedTuple):
    """All steps that branches may take; those of branch k from block p on are first[k, p] .. first[k, p + 1] - 1.

    Memory is in bytes or in slots.
    """

    first: Ints
    to: Ints  # block at which the branch is after the step
    own: Ints  # 1 if the output of block `to` is then stored by itself, 0 if it is part of what block `to` saved
    need: Ints  # memory needed by the step's forwards, beyond all inputs
    take: Ints  # memory of what block `to` saves, if the step saves it; else 0
    base: Floats  # seconds of recomputation
    low: Ints  # least memory of the ops that finish the step's blocks in the backward


class HeldBytes(NamedTuple):
    """Memory in use in addition to what a step itself needs, in bytes or in slots."""

    lengths: Ints  # number of blocks of each branch
    out: Ints  # [k, l]: output of block l of branch k
    phase: Ints  # [k, t]: memory in use by branch k between its backwards t + 1 and t
    ends: int  # memory of the last blocks of all branches before the first backward
    before: int  # `ends` plus the gradient of the trunk: in use while the branches run forward
    after: int  # weight gradients of the trunk (the blocks that join the branches), in use after its backward
    turn: int  # gradients that the loss writes; 0 if the branches end in further blocks (a trunk) instead
    trunk_low: int  # least memory of the trunk (the blocks after the branches)


class BranchStep(NamedTuple):
    """A step of a branch: run blocks s..to, and save the last one with `option`, an index over all blocks.

    option = -1: do not save it.
    """

    s: int
    to: int
    option: int


@dataclass(frozen=True, kw_only=True)
class CanonicalTable:
    """Least recomputation time of a join for every budget up to `mem` bytes, which are divided into `slots` levels."""

    join: Join
    mem: int
    slots: int
    least: int  # smallest budget in bytes with a schedule
    curve: Floats  # [k]: seconds of recomputation within k slots; infinite if nothing fits
    # returns a schedule, given (budget in bytes, bytes that all slots stand for)
    read: Callable[[int, int], JoinSchedule]

    def schedule(self, budget: int, *, full: int | None = None) -> JoinSchedule:
        """Return the fastest schedule that fits into `budget` bytes; `full` is explained at `Table.schedule`.

        Raises `BudgetTooSmall` if there is none.
        """
        if budget < self.least:
            raise BudgetTooSmall(minimum=self.least, budget=budget)
        return self.read(budget, full or self.mem)


def build(join: Join, mem: int, slots: int) -> CanonicalTable:
    """Build the table of costs for every budget up to `mem` bytes. Raises `FxrematError` if it would be too large."""
    states = int(np.prod([2 * (len(branch) + 1) for branch in join.branches], dtype=object))
    if states * (slots + 1) > _ENTRIES:
        raise FxrematError(
            f"{len(join.branches)} branches with {states} states in {slots} slots make too large a table; "
            f"{_ENTRIES} costs are practical"
        )
    solved = [tails(branch, mem, slots) for branch in join.branches]
    trunk = None if join.trunk is None else tails(_trunk(join, join.trunk), mem, slots)
    kinds = [kind for chain in join.branches for kind in _kinds(chain)]
    exact, exact_held = _steps(solved, exact=True), _held(join, trunk, 1, 1)
    steps, held = _steps(solved, exact=False), _held(join, trunk, slots, mem)
    after = np.array([_costs(solved[k], kind) for k, kind in _numbered(join)])
    last = np.zeros(slots + 1) if trunk is None else trunk.costs(1, len(trunk.chain))
    lows = np.full(states, _NEVER)
    costs = np.full((states, slots + 1), np.inf)
    for end in progress(range(states, 0, -_STEP), "joins"):
        _fill_lows(lows, exact, exact_held, max(0, end - _STEP), end)
        _fill(costs, steps, held, after, last, max(0, end - _STEP), end)
    start = int(
        _code(
            np.zeros(len(join.branches), dtype=np.int64),
            np.ones(len(join.branches), dtype=np.int64),
            exact_held.lengths,
        )
    )
    reader = _Reader(join, solved, trunk, kinds, exact, exact_held, lows, costs, slots)
    return CanonicalTable(
        join=join, mem=mem, slots=slots, least=int(lows[start]), curve=costs[start], read=reader.schedule
    )


def _trunk(join: Join, trunk: Chain) -> Chain:
    """Return the trunk (the blocks after the branches) as a chain whose input is the outputs of all branches."""
    ends = [branch.blocks[-1] for branch in join.branches]
    return replace(
        trunk,
        input_bytes=sum(block.output_bytes for block in ends),
        input_grad_bytes=sum(block.grad_bytes for block in ends),
    )


def _numbered(join: Join) -> list[tuple[int, BranchStep]]:
    return [(k, kind) for k, chain in enumerate(join.branches) for kind in _kinds(chain)]


def _kinds(chain: Chain) -> list[BranchStep]:
    """Return all steps that a branch may take, sorted by their first block."""
    numbers = np.cumsum([0, *(len(block.choices) for block in chain.blocks)]).tolist()
    return [
        kind
        for s in range(1, len(chain) + 1)
        for to in range(s, len(chain) + 1)
        for kind in (
            BranchStep(s, to, -1),
            *(
                BranchStep(s, to, numbers[to - 1] + option)
                for option in range(len(chain.blocks[to - 1].choices))
            ),
        )
    ]


def _row(chain: Chain, kind: BranchStep) -> tuple[int, int]:
    """Return the index of the row, in the branch's own table, of the ops that finish a step's blocks in the backward.
    """
    return kind.s, kind.to if kind.option < 0 else len(chain) + 1 + kind.option


def _costs(solved: Tails, kind: BranchStep) -> Floats:
    """Return the seconds of recomputation to finish a step's blocks, for each number of memory slots from 0 to `slots`.

    The step's input is stored in addition.
    """
    if kind.option >= 0 and kind.s == kind.to:
        need = solved.sizes.phase[kind.s] + solved.sizes.back[kind.option]
        return np.where(np.arange(solved.slots + 1) >= need, 0.0, np.inf)
    return solved.costs(*_row(solved.chain, kind))


def _steps(solved: list[Tails], *, exact: bool) -> BranchSteps:
    """Return the steps of all branches, with memory in bytes if `exact`, else in slots."""
    longest = max(len(one.chain) for one in solved)
    first = np.zeros((len(solved), longest + 2), dtype=np.int64)
    entries = []
    for k, one in enumerate(solved):
        sizes, n = one.exact if exact else one.sizes, len(one.chain)
        for kind in _kinds(one.chain):
            s, j, o = kind
            if o < 0:
                need, take, base = sizes.run[s, j], 0, sizes.forward[j] - sizes.forward[s - 1]
            elif s == j:
                need, take, base = sizes.save[o], sizes.saved[o], sizes.extra[o]
            else:
                need, take = max(sizes.run[s, j - 1], sizes.save_next[o]), sizes.saved[o]
                base = sizes.forward[j - 1] - sizes.forward[s - 1] + sizes.extra[o]
            entries.append((j, int(o < 0), need, take, base, one.low[_row(one.chain, kind)]))
            first[k, s] = len(entries)  # for now, the end of the steps from block s - 1
        first[k, n:] = len(entries)
        first[k, 0] = first[k - 1, -1] if k else 0
    to, own, needs, takes, base, low = (np.array(column) for column in zip(*entries))
    return BranchSteps(first, to, own, needs, takes, base.astype(np.float64), low)


def _held(join: Join, trunk: Tails | None, slots: int, mem: int) -> HeldBytes:
    """Return the sizes that add to each step's own memory, rounded up to slots of mem / slots bytes."""
    longest = max(map(len, join.branches))
    limit = 2 * slots + 2 if slots != mem else _NEVER

    def units(size: int) -> int:
        return min(-(-size * slots // mem), limit)

    out = np.zeros((len(join.branches), longest + 1), dtype=np.int64)
    phase = np.zeros_like(out)
    for k, chain in enumerate(join.branches):
        out[k, : len(chain) + 1] = [units(size) for size in chain.output_sizes]
        phase[k, : len(chain) + 1] = [units(size) for size in chain.phase_sizes]
    ends = [chain.blocks[-1] for chain in join.branches]
    held = sum(block.held_bytes for block in ends)
    return HeldBytes(
        lengths=np.array([len(chain) for chain in join.branches], dtype=np.int64),
        out=out,
        phase=phase,
        ends=units(held),
        before=units(held + (trunk.chain.phase_sizes[-1] if trunk else 0)),
        after=units(sum(block.weight_grad_bytes for block in join.trunk.blocks) if join.trunk else 0),
        turn=0 if trunk else units(sum(block.grad_bytes for block in ends)),
        trunk_low=int(trunk.low[1, len(trunk.chain)]) if trunk else 0,
    )


@jit
def _code(place: Ints, own: Ints, lengths: Ints) -> int:
    """Return the integer code of a state, that is the block and `own` flag of each branch.

    It grows as branches advance.
    """
    code = 0
    for k in range(lengths.size):
        code = code * 2 * (lengths[k] + 1) + 2 * place[k] + (1 - own[k])
    return code


@jit
def _state(code: int, lengths: Ints) -> tuple[Ints, Ints]:
    """Decode a state: the block that each branch has reached, and whether its output is stored by itself."""
    place, own = np.zeros_like(lengths), np.zeros_like(lengths)
    for k in range(lengths.size - 1, -1, -1):
        digit = code % (2 * (lengths[k] + 1))
        code //= 2 * (lengths[k] + 1)
        place[k], own[k] = digit // 2, 1 - digit % 2
    return place, own


@jit
def _memory(held: HeldBytes, place: Ints, own: Ints) -> tuple[int, int]:
    """Return the memory of outputs stored by themselves, and the memory of all branches after the first backward."""
    inputs, phases = 0, held.after
    for k in range(place.size):
        inputs += own[k] * held.out[k, place[k]]
        phases += held.phase[k, place[k]]
    return inputs, phases


@jit
def _fill_lows(lows: Ints, steps: BranchSteps, held: HeldBytes, first: int, end: int) -> None:
    """Compute the least memory in bytes of the states first..end-1, given that of all later states."""
    for code in range(end - 1, first - 1, -1):
        place, own = _state(code, held.lengths)
        inputs, phases = _memory(held, place, own)
        before = inputs + held.before
        if np.all(place == held.lengths):
            lows[code] = max(inputs + held.ends + max(held.turn, held.trunk_low), phases)
            continue
        for k in range(place.size):
            p, f = place[k], own[k]
            given = f * held.out[k, p]
            others = phases - held.phase[k, p]
            for step in range(steps.first[k, p], steps.first[k, p + 1]):
                place[k], own[k] = steps.to[step], steps.own[step]
                then = given + steps.take[step] + lows[_code(place, own, held.lengths)]
                last = given + others + steps.low[step]
                lows[code] = min(lows[code], max(before + steps.need[step], then, last))
            place[k], own[k] = p, f


@jit
def _fill(
    costs: Floats, steps: BranchSteps, held: HeldBytes, after: Floats, trunk: Floats, first: int, end: int
) -> None:
    """Fill the table rows of the states first..end-1, given the rows of all later states."""
    width = costs.shape[1]
    for code in range(end - 1, first - 1, -1):
        place, own = _state(code, held.lengths)
        inputs, phases = _memory(held, place, own)
        before, row = inputs + held.before, costs[code]
        if np.all(place == held.lengths):
            for m in range(max(inputs + held.ends + held.turn, phases), width):
                row[m] = trunk[m - inputs - held.ends]
            continue
        for k in range(place.size):
            p, f = place[k], own[k]
            given = f * held.out[k, p]
            others = given + phases - held.phase[k, p]
            for step in range(steps.first[k, p], steps.first[k, p + 1]):
                place[k], own[k] = steps.to[step], steps.own[step]
                rest, last = costs[_code(place, own, held.lengths)], after[step]
                taken, base = given + steps.take[step], steps.base[step]
                for m in range(max(before + steps.need[step], taken, others), width):
                    row[m] = least(row[m], base + rest[m - taken] + last[m - others])
            place[k], own[k] = p, f


@dataclass(frozen=True)
class _Reader:
    """Reads schedules off a filled table; memory is in bytes."""

    join: Join
    solved: list[Tails]
    trunk: Tails | None
    kinds: list[BranchStep]
    steps: BranchSteps
    held: HeldBytes
    lows: Ints
    costs: Floats
    slots: int

    def schedule(self, m: int, full: int) -> JoinSchedule:
        """Return a schedule that fits into m bytes; all slots together stand for `full` bytes."""
        ops: list[JoinOp] = []
        tails_left: list[tuple[int, tuple[Op, ...]]] = []
        place = np.zeros_like(self.held.lengths)
        own = np.ones_like(place)
        while not np.all(place == self.held.lengths):
            k, step = self._choose(place, own, m, full)
            kind, (_, phases) = self.kinds[step], _memory(self.held, place, own)
            given = int(own[k] * self.held.out[k, place[k]])
            rest = m - given - int(phases - self.held.phase[k, place[k]])
            ops += [On(k + 1, op) for op in _forwards(self.join.branches[k], kind)]
            tails_left.append((k, self._tail(k, kind, rest, full)))
            m -= given + int(self.steps.take[step])
            place[k], own[k] = self.steps.to[step], self.steps.own[step]
        if self.trunk is None:
            ops.append(Loss())
        else:
            inputs, _ = _memory(self.held, place, own)
            n = len(self.trunk.chain)
            ops += [On(0, op) for op in self.trunk.ops(1, n, n, m - int(inputs) - self.held.ends, full)]
        for k, tail in reversed(tails_left):
            ops += [On(k + 1, op) for op in tail]
        return JoinSchedule(tuple(ops))

    def _tail(self, k: int, kind: BranchStep, rest: int, full: int) -> tuple[Op, ...]:
        """Return the ops that finish a step's blocks in the backward within `rest` bytes."""
        if kind.option >= 0 and kind.s == kind.to:
            return (Backward(kind.s),)
        s, c = _row(self.join.branches[k], kind)
        return self.solved[k].ops(s, kind.to, c, rest, full)

    def _choose(self, place: Ints, own: Ints, m: int, full: int) -> tuple[int, int]:
        """Return which branch runs next, and which of its steps: the fastest, by the table, that fits into m bytes."""
        inputs, phases = map(int, _memory(self.held, place, own))
        found = []
        for k in range(place.size):
            p = int(place[k])
            given = int(own[k] * self.held.out[k, p])
            others = given + phases - int(self.held.phase[k, p])
            then_place, then_own = place.copy(), own.copy()
            for step in range(self.steps.first[k, p], self.steps.first[k, p + 1]):
                then_place[k], then_own[k] = self.steps.to[step], self.steps.own[step]
                then = int(_code(then_place, then_own, self.held.lengths))
                left, last = m - given - int(self.steps.take[step]), m - others
                if (
                    inputs + self.held.before + self.steps.need[step] <= m
                    and self.lows[then] <= left
                    and self.steps.low[step] <= last
                ):
                    cost = self.steps.base[step] + self._guess(then, left * self.slots // full)
                    cost += self._guess_tail(k, step, last * self.slots // full)
                    found.append((cost, k, step))
        _, k, step = min(found)
        return k, step

    def _guess(self, code: int, m: int) -> float:
        """Return the seconds of a state within m memory slots.

        A high but finite number if it fits only without rounding.
        """
        return _dearly(self.costs[code], m)

    def _guess_tail(self, k: int, step: int, m: int) -> float:
        return _dearly(_costs(self.solved[k], self.kinds[step]), m)


def _dearly(costs: Floats, m: int) -> float:
    """Return costs[m].

    If that is infinite, a number above all finite costs that grows with the number of missing slots.
    """
    cost = float(costs[min(m, len(costs) - 1)])
    if cost < np.inf:
        return cost
    finite = np.flatnonzero(costs < np.inf)
    return 1e12 + 1e6 * (finite[0] - m if finite.size else 2 * len(costs))


def _forwards(chain: Chain, kind: BranchStep) -> list[Op]:
    """Return the forwards of a step.

    The input of block s is kept; if the step saves its last block, the input of that block is freed.
    """
    s, to, option = kind
    end = to if option < 0 else to - 1
    ops: list[Op] = [
        Forward(block, Keep.CHECKPOINT if block == s else Keep.NONE) for block in range(s, end + 1)
    ]
    if option >= 0:
        before = sum(len(block.choices) for block in chain.blocks[: to - 1])
        ops.append(Forward(to, Keep.ALL, option - before))
        if to > s:
            ops.append(Drop(Value("a", to - 1)))
    return ops
