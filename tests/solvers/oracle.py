"""The fastest schedule by brute force: Dijkstra over the states of the simulator's rules, for tiny chains.

State: (stored values with their options, phase). Moves: every forward, the backward, every drop.
"""

import heapq
import itertools

from fxremat.chains.chain import Chain


def fastest(chain: Chain, mem: int, *, persistent: bool = False) -> float | None:
    """The least time of any schedule within `mem` bytes, None if there is none.

    With `persistent`, a stored value is never dropped except by the operations that consume it.
    """
    n, out, grad, phases = len(chain), chain.output_sizes, chain.grad_sizes, chain.phase_sizes

    def size(value: tuple[str, int, int]) -> int:
        kind, number, option = value
        return out[number] if kind == "a" else chain.blocks[number - 1].choices[option].saved_bytes

    start = (frozenset({("a", 0, 0)}), n)
    queue, best, order = [(0.0, 0, start)], {start: 0.0}, itertools.count(1)
    while queue:
        time, _, state = heapq.heappop(queue)
        if time > best[state]:
            continue
        stored, phase = state
        used = phases[phase] + sum(map(size, stored))
        if phase == 0:
            if used <= mem:
                return time
            continue
        moves = []
        entered = {number for _, number, _ in stored}
        for number in range(1, n + 1):
            if number - 1 not in entered:
                continue
            block = chain.blocks[number - 1]
            if ("a", number, 0) not in stored and used + out[number] + block.forward_scratch <= mem:
                after = stored | {("a", number, 0)}
                moves.append((block.forward_time, after, phase))
                moves.append((block.forward_time, after - {("a", number - 1, 0)}, phase))
            if not any(kind == "A" and other == number for kind, other, _ in stored):
                for index, option in enumerate(block.choices):
                    if used + option.saved_bytes + option.save_scratch <= mem:
                        moves.append((block.forward_time, stored | {("A", number, index)}, phase))
        if phase - 1 in entered:
            for kind, number, index in stored:
                if (kind, number) == ("A", phase):
                    option = chain.blocks[phase - 1].choices[index]
                    if used + grad[phase - 1] + option.backward_scratch <= mem:
                        after = stored - {("A", phase, index), ("a", phase - 1, 0)}
                        moves.append((option.backward_time, after, phase - 1))
        if not persistent:
            moves += [(0.0, stored - {value}, phase) for value in stored]
        for cost, after, then in moves:
            state = (after, then)
            if time + cost < best.get(state, float("inf")):
                best[state] = time + cost
                heapq.heappush(queue, (time + cost, next(order), state))
    return None
