"""The fastest schedule of a join by brute force: Dijkstra over the states of simulate_join, for tiny joins.

State: (stored values as (branch, kind, number, option), phases of trunk and branches; -1 before the turn).
"""

import heapq
import itertools

from fxremat.chains.chain import Join


def fastest(join: Join, mem: int) -> float | None:
    """The least time of any schedule within `mem` bytes, None if there is none."""
    chains = dict(enumerate(join.branches, start=1)) | ({0: join.trunk} if join.trunk else {})
    branches = range(1, len(join.branches) + 1)
    ends = [(b, len(chains[b])) for b in branches]
    first = 0 if join.trunk else 1
    turn_bytes = sum(chains[b].grad_sizes[-1] for b in branches)

    def size(value):
        branch, kind, number, option = value
        chain = chains[branch]
        return (
            chain.output_sizes[number]
            if kind == "a"
            else chain.blocks[number - 1].choices[option].saved_bytes
        )

    def constant(phases):
        total = 0
        for branch, chain in chains.items():
            phase = phases[branch - first]
            if phase < 0:
                total += chain.blocks[-1].held_bytes
            elif branch == 0 and phase == 0:
                total += chain.phase_sizes[0] - chain.input_grad_bytes
            else:
                total += chain.phase_sizes[phase]
        return total

    start_phases = tuple(len(chains[b]) if b == 0 else -1 for b in range(first, len(branches) + 1))
    start = (frozenset((b, "a", 0, 0) for b in branches), start_phases)
    queue, best, order = [(0.0, 0, start)], {start: 0.0}, itertools.count(1)
    while queue:
        time, _, state = heapq.heappop(queue)
        if time > best[state]:
            continue
        stored, phases = state
        used = constant(phases) + sum(map(size, stored))
        if used > mem:
            continue
        if not any(phases):
            return time
        there = {(branch, number) for branch, _, number, _ in stored}

        def has_input(branch, number):
            if branch == 0 and number == 1:
                return all(end in there for end in ends)  # noqa: B023
            return (branch, number - 1) in there  # noqa: B023

        def less_input(values, branch, number):
            if branch == 0 and number == 1:
                return values - {(b, "a", end, 0) for b, end in ends}
            return values - {(branch, "a", number - 1, 0)}

        turned = tuple(0 if b == 0 else len(chains[b]) for b in range(first, len(branches) + 1))
        moves = [(0.0, stored - {value}, phases) for value in stored]
        if (
            not join.trunk
            and phases[0] < 0
            and all(end in there for end in ends)
            and used + turn_bytes <= mem
        ):
            moves.append((0.0, less_input(stored, 0, 1), turned))
        for branch, chain in chains.items():
            for number, block in enumerate(chain.blocks, start=1):
                if not has_input(branch, number):
                    continue
                if used + block.output_bytes + block.forward_scratch <= mem:
                    moves.append((block.forward_time, stored | {(branch, "a", number, 0)}, phases))
                bare = frozenset(v for v in stored if v[:3] != (branch, "A", number))
                for index, option in enumerate(block.choices):
                    if used + option.saved_bytes + option.save_scratch <= mem:
                        moves.append((block.forward_time, bare | {(branch, "A", number, index)}, phases))
                    saved = (branch, "A", number, index)
                    if phases[branch - first] == number and saved in stored:
                        last = branch == 0 and number == 1
                        written = turn_bytes if last else chain.grad_sizes[number - 1]
                        if used + written + option.backward_scratch <= mem:
                            then = list(phases)
                            then[branch - first] -= 1
                            after = less_input(stored - {saved}, branch, number)
                            moves.append((option.backward_time, after, turned if last else tuple(then)))
        for cost, after, then in moves:
            state = (after, then)
            if time + cost < best.get(state, float("inf")):
                best[state] = time + cost
                heapq.heappush(queue, (time + cost, next(order), state))
    return None
