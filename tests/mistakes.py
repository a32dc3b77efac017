"""Mistakes that the tests of the solvers must notice: each is one edit of one file, and the test that fails on it.

`tests/test_mistakes.py` applies them one by one to a copy of the sources.
"""

from typing import NamedTuple


class Mistake(NamedTuple):
    """Replace `right`, which occurs once in `file`, by `wrong`, and `test` fails."""

    file: str  # below fxremat/
    right: str
    wrong: str
    test: str  # a file below tests/, or file::test


MISTAKES: list[Mistake] = []

MISTAKES += [
    # a cut that gives the right part one block too few
    Mistake(
        "solvers/persistent.py",
        "again, j + 1, sizes.out[j], s, j)",
        "again, j + 2, sizes.out[j], s, j)",
        "solvers/test_tables.py::test_stated_values",
    ),
    # the backward of a saved block does not have to fit
    Mistake(
        "solvers/persistent.py",
        "need = max(phase[t] + sizes.save[o], phase[s] + sizes.back[o], sizes.saved[o] + low[s + 1, t])",
        "need = max(phase[t] + sizes.save[o], sizes.saved[o] + low[s + 1, t])",
        "solvers/test_tables.py::test_schedule_costs_what_the_table_says",
    ),
    # the input that a saved block loses is never rebuilt
    Mistake(
        "solvers/input_drop.py",
        "relax(rows, s, c, need, again + sizes.extra[o], j + 1, saved[o], s, n + 1 + o)",
        "relax(rows, s, c, need, again + sizes.extra[o], j + 1, saved[o], 0, 0)",
        "solvers/test_tables.py::test_schedule_costs_what_the_table_says",
    ),
    # a lost input is paid for with one forward too many
    Mistake(
        "solvers/input_drop.py",
        "again = forward[j - 1] - forward[s - 1]\n"
        "                for o in range(start[j], start[j + 1]):\n                    need",
        "again = forward[j] - forward[s - 1]\n"
        "                for o in range(start[j], start[j + 1]):\n                    need",
        "solvers/test_tables.py::test_stated_values",
    ),
    # scratch memory of the forward that saves is forgotten
    Mistake(
        "solvers/sizes.py",
        "save=units([option.saved_bytes + (option.save_scratch or 0) for _, _, option in options])",
        "save=units([option.saved_bytes for _, _, option in options])",
        "solvers/test_tables.py::test_stated_values",
    ),
    # sizes are rounded down to slots
    Mistake(
        "solvers/sizes.py",
        "min(-(-size * slots // mem), limit)",
        "min(size * slots // mem, limit)",
        "solvers/test_tables.py::test_a_rounded_table_keeps_its_promise",
    ),
    # a move forgets that the old checkpoint gives its memory back
    Mistake(
        "solvers/floating_drop.py",
        "(s + 1) * width + e, out[s] - out[s - 1], 0, 0)",
        "(s + 1) * width + e, out[s], 0, 0)",
        "solvers/test_tables.py::test_checkpoints_that_move",
    ),
    # a floating branch never leaves a saved block behind
    Mistake(
        "solvers/floating_drop.py",
        "if s == rest and e > n:",
        "if s == rest and e > n + 99:",
        "solvers/test_tables.py::test_stated_values",
    ),
    # a cut stops one block short of where it may
    Mistake(
        "solvers/floating_drop.py",
        "for x in range(max(j, rest + 1), t):",
        "for x in range(max(j, rest + 1) + 1, t):",
        "solvers/test_tables.py::test_stated_values",
    ),
    # scratch memory counted twice
    Mistake(
        "solvers/time_bound.py",
        "float(option.saved_bytes + scratch)",
        "float(option.saved_bytes + 2 * scratch + 1)",
        "solvers/test_bound.py::test_nothing_beats_the_bound",
    ),
    # what is on the host costs nothing to fetch
    Mistake(
        "solvers/time_bound.py",
        "return 1 / platform.to_host + 1 / platform.from_host",
        "return 0 / platform.to_host + 0 / platform.from_host",
        "solvers/test_bound.py::test_a_link_can_carry_what_is_not_run_again",
    ),
    # the gradients of the blocks behind are not held
    Mistake(
        "chains/chain.py",
        "weight_grads += block.weight_grad_bytes",
        "weight_grads += 0 * block.weight_grad_bytes",
        "test_chain.py::test_phases_hold_gradients_and_what_crosses",
    ),
]

MISTAKES += [
    # a pass forgets its scratch memory
    Mistake(
        "solvers/exact.py",
        "moves.need[count] = rest + sizes.run[i, i]",
        "moves.need[count] = rest + out[i]",
        "solvers/test_exact.py::test_as_fast_as_plain_dijkstra",
    ),
    # the input of the next backward is never computed anew
    Mistake(
        "solvers/exact.py",
        "if i < k and state[i] != 1:",
        "if i < k - 1 and state[i] != 1:",
        "solvers/test_exact.py::test_stated_optima",
    ),
    # the bound gives up every A where one is too many
    Mistake("solvers/exact.py", "excess -= weight[item]", "excess -= 0", "solvers/test_exact.py"),
    # what boundary 1 holds is never dropped
    Mistake(
        "solvers/exact.py",
        "for i in range(1, state[-1] + 1 if blocked else 0):",
        "for i in range(2, state[-1] + 1 if blocked else 0):",
        "solvers/test_exact.py",
    ),
    # a checkpoint takes no memory
    Mistake(
        "solvers/references/floating.py",
        "again, left, out[j], right, 0)",
        "again, left, 0, right, 0)",
        "solvers/test_floating.py",
    ),
    # forwards of a cut count the gradient of the wrong phase
    Mistake(
        "solvers/references/floating.py",
        "need, again = phase[t] + sizes.run[s, j], forward[j] - forward[s - 1]",
        "need, again = phase[s] + sizes.run[s, j], forward[j] - forward[s - 1]",
        "solvers/test_floating.py",
    ),
    # a move runs its forwards for nothing
    Mistake(
        "solvers/references/floating.py",
        "moved, again = cuts + place(n, r, t, last), forward[r - 1] - forward[s - 1]",
        "moved, again = cuts + place(n, r, t, last), 0.0 * forward[r - 1]",
        "solvers/test_floating.py",
    ),
    # what a checkpoint moves to is no larger
    Mistake(
        "solvers/references/floating.py",
        "moved, moves.more[s, r], 0, 0)",
        "moved, 0, 0, 0)",
        "solvers/test_floating.py",
    ),
    # a cut pays for one forward too many
    Mistake(
        "solvers/references/revolve.py",
        "need, again = phase[t] + sizes.run[s, j], forward[j - 1] - forward[s - 1]",
        "need, again = phase[t] + sizes.run[s, j], forward[j] - forward[s - 1]",
        "solvers/test_revolve.py",
    ),
    # the backward does not have to fit
    Mistake(
        "solvers/references/revolve.py",
        "            need = phase[t] + max(sizes.save[o], sizes.back[o])",
        "            need = phase[t] + sizes.save[o]",
        "solvers/test_revolve.py",
    ),
    # one repetition too few where the binomial is exactly the length
    Mistake(
        "solvers/binomial.py",
        "while comb(s + r, s) <= length:",
        "while comb(s + r, s) < length:",
        "solvers/test_binomial.py",
    ),
    # a checkpoint takes no slot
    Mistake(
        "solvers/binomial.py",
        "todo.append((start + step, length - step, m - 1))",
        "todo.append((start + step, length - step, m))",
        "solvers/test_binomial.py",
    ),
    # the forward has no scratch memory
    Mistake(
        "solvers/references/checkmate.py",
        "weights[_r(n, t, block)] += options[block - 1].save_scratch or 0",
        "weights[_r(n, t, block)] += 0",
        "solvers/test_checkmate.py",
    ),
    # a backward does without its input
    Mistake(
        "solvers/references/checkmate.py", "if block >= t - 1:", "if block >= t:", "solvers/test_checkmate.py"
    ),
    # the backward has no scratch memory
    Mistake(
        "solvers/references/checkmate.py",
        "chain.grad_sizes[t - 1] + options[t - 1].backward_scratch",
        "chain.grad_sizes[t - 1]",
        "solvers/test_checkmate.py",
    ),
    # b of the branch that was cut is not set
    Mistake(
        "solvers/references/joins/uniform.py",
        "code[k] - (code[k] & 1) - 2 * i + 1)",
        "code[k] - 2 * i)",
        "solvers/test_joins.py",
    ),
    # the gradients of the other branches take no slots
    Mistake(
        "solvers/references/joins/uniform.py",
        "child[m - 1] + tail[m - others])",
        "child[m - 1] + tail[m])",
        "solvers/test_joins.py",
    ),
    # the tail of a branch is read off with all slots
    Mistake(
        "solvers/references/joins/uniform.py",
        "tails.append((k, start, i - 1, m - sum(kept) + kept[k]))",
        "tails.append((k, start, i - 1, m))",
        "solvers/test_joins.py",
    ),
    # a tail does not count the input that it starts from
    Mistake(
        "solvers/joins/canonical.py",
        "others = given + phases - held.phase[k, p]",
        "others = phases - held.phase[k, p]",
        "solvers/test_unequal_joins.py",
    ),
    # the gradient of the trunk is not there while the branches run
    Mistake(
        "solvers/joins/canonical.py",
        "before=units(held + (trunk.chain.phase_sizes[-1] if trunk else 0)),",
        "before=units(held),",
        "solvers/test_unequal_joins.py",
    ),
    # the pass before a block that loses its input does not have to fit
    Mistake(
        "solvers/joins/canonical.py",
        "need, take = max(sizes.run[s, j - 1], sizes.save_next[o]), sizes.saved[o]",
        "need, take = sizes.save_next[o], sizes.saved[o]",
        "solvers/test_unequal_joins.py",
    ),
    # the loss writes its gradients into no memory
    Mistake(
        "chains/simulate_join.py",
        "used = self.used + sum(branch.chain.grad_sizes[-1] for branch in self.branches)",
        "used = self.used",
        "solvers/test_unequal_joins.py",
    ),
]

POFO = "solvers/test_pofo.py"
DYNPROG = "solvers/test_offload_dp.py"
MISTAKES += [
    # what leaves the device is gone although an op still reads it
    Mistake(
        "chains/resolved.py",
        "            stored.gone = here + 1\n",
        "            stored.gone = min(stored.gone, here + 1)\n",
        "test_transfers.py::test_like_the_slow_simulator",
    ),
    # a copy is due when the one behind it is needed, not the first of them
    Mistake(
        "chains/resolved.py",
        "due = copy.due = min(due, copy.due)",
        "due = copy.due",
        "test_transfers.py::test_copies_that_are_fetched_in_the_wrong_order_may_deadlock",
    ),
    # a copy from the host takes room that an op before its reader needs
    Mistake(
        "chains/token_clock.py",
        "room = self.limit - float(self.need[self.place : copy.due].max())",
        "room = self.limit - float(self.need[self.place])",
        "test_transfers.py::test_like_the_slow_simulator",
    ),
    # on a shared bus the last in goes first
    Mistake(
        "chains/token_clock.py",
        "for way in sorted((0, 1), key=heads.__getitem__):",
        "for way in sorted((1, 0), key=heads.__getitem__, reverse=True):",
        "test_transfers.py::test_one_bus_takes_one_copy_at_a_time",
    ),
    # values that are copied whole are released in part
    Mistake(
        "chains/token_clock.py",
        "        if not self.fluid:\n            return 0.0\n",
        "",
        "test_transfers.py::test_by_hand",
    ),
    # a copy back does not wait until the value has arrived on the host
    Mistake(
        "chains/token_clock.py",
        "if not queue or not (queue[0].after is None or queue[0].after in self.done):",
        "if not queue:",
        "test_transfers.py::test_like_the_slow_simulator",
    ),
    # what the backward carries beneath idle time is forgotten (Lemma 8)
    Mistake(
        "solvers/offload/pofo.py",
        "early = max(begin + k - after - sent, 0)",
        "early = max(begin + k - sent, 0)",
        POFO,
    ),
    # copies hidden by the right part of a cut are counted twice
    Mistake(
        "solvers/offload/pofo.py",
        "early = max(rest - right_sent - _whole(y, rate), 0)",
        "early = max(rest - left_sent - _whole(x, rate), 0)",
        POFO,
    ),
    # a pass in the forward phase forgets what leaves meanwhile
    Mistake(
        "solvers/offload/pofo.py",
        "early = max(early, later[j] - (out[j - 1] - out[s - 1]))",
        "early = max(early, later[j])",
        POFO,
    ),
    # what comes back beneath a rerun is forgotten
    Mistake(
        "solvers/offload/pofo.py",
        "max(ahead - came, 0)\n\n\nclass PofoStates",
        "ahead\n\n\nclass PofoStates",
        POFO,
    ),
    # the scratch memory of backwards is forgotten
    Mistake(
        "solvers/references/offload/offload_dp.py",
        "idle_back = max(task.run[i] + a + max(b, 0) + size - task.slots, 0)",
        "idle_back = max(task.value[i] + a + max(b, 0) + size - task.slots, 0)",
        DYNPROG,
    ),
    # equation 3.10 as printed: a value may be back before it has been read
    Mistake(
        "solvers/references/offload/offload_dp.py",
        "max(max(f, 0) + size - sent, 0) if goes else f - sent",
        "max(f, 0) + size - sent if goes else f - sent",
        DYNPROG,
    ),
    # at the turn both copies are hidden by each other
    Mistake(
        "solvers/references/offload/offload_dp.py",
        "max(f, 0) * link.slot_out + max(b, 0) * link.slot_in",
        "max(max(f, 0) * link.slot_out, max(b, 0) * link.slot_in)",
        DYNPROG,
    ),
    # of the last op of a trip too much is free
    Mistake(
        "solvers/offload/trips.py",
        "slice(3 * self.start + 3, 3 * self.end + 2)",
        "slice(3 * self.start + 2, 3 * self.end + 2)",
        "solvers/test_offload_simple.py",
    ),
    # the input of a pass is counted only while its first forward runs
    Mistake("solvers/offload/min_memory.py", "kept + int(low[s, t])", "int(low[s, t])", POFO),
    # a worse schedule replaces the best
    Mistake(
        "solvers/offload/local_search.py",
        "_rank(verdict) <= state_rank",
        "_rank(verdict) >= state_rank",
        "solvers/test_local_search.py",
    ),
]

REFINE = "test_refine.py"
MISTAKES += [
    # what is read stays alive before it is written
    Mistake(
        "search/replay.py",
        "        level -= leaving\n",
        "        level -= 0 * leaving\n",
        "test_refine.py::test_a_replay_is_exact_liveness",
    ),
    # outputs that nothing reads take no memory
    Mistake(
        "search/replay.py",
        "elif value < tape.seeds:",
        "elif value < 0:",
        "test_refine.py::test_what_nothing_reads_takes_memory_while_it_is_made",
    ),
    # a replay stops as soon as the bytes are as before, whatever is alive
    Mistake(
        "search/replay.py",
        "if new.levels[page] == old.levels[page] and _equal(new.alive[page], old.alive[page]):",
        "if True:",
        "test_refine.py::test_a_search_makes_no_program_worse",
    ),
    # what the caller holds is freed where it was made again
    Mistake(
        "search/executions.py",
        "[value for value in op.again_writes if value not in pinned],",
        "[*op.again_writes],",
        "test_refine.py::test_a_replay_is_exact_liveness",
    ),
    # the search may exceed the budget
    Mistake(
        "search/replay.py",
        "if more <= 0 and",
        "if",
        "test_refine.py::test_leaving_out_recomputations_exceeds_a_budget_by_no_more_than_before",
    ),
    # what a larger budget's search found serves smaller ones, if it was asked for first
    Mistake(
        "search/refine.py",
        "for rung, candidate in self.found if rung <= budget",
        "for rung, candidate in self.found",
        "test_refine.py::test_more_memory_is_never_slower_whatever_was_asked_for_before",
    ),
    # programs are taken over for sizes however far away
    Mistake(
        "search/replan.py",
        "return 1 / FURTHEST <= grown <= FURTHEST",
        "return True",
        "test_memo.py::test_sizes_far_away_costs_and_settings_are_surveyed_anew",
    ),
    # the lower bound forgets what recomputation itself reads
    Mistake(
        "search/lower_bound.py",
        "room = self.budget - self.fixed[op.index] - sum(",
        "room = self.budget - 3 * self.fixed[op.index] - sum(",
        "test_refine.py::test_nothing_beats_the_lower_bound",
    ),
    # a low point need not be lower than what follows
    Mistake(
        "linearize/crossings.py",
        "if all(cost[level[0]] < bytes_",
        "if any(cost[level[0]] < bytes_",
        "test_refine.py::test_low_points_are_where_fewer_bytes_cross_than_around_them",
    ),
    # towers run forward in the order of the join's schedule
    Mistake(
        "linearize/towers.py",
        "steps[:turn] = sorted(steps[:turn], key=lambda step: (step.branch - 1) % len(parts))",
        "steps[:turn] = list(steps[:turn])",
        "test_towers.py::test_first_runs_keep_the_captured_order",
    ),
    # gradients of shared weights do not wait for the other tower
    Mistake(
        "step/program.py",
        "if self._gradients_missing(index):",
        "if False:",
        "test_towers.py::test_joins_run_with_the_numbers_of_plain_pytorch",
    ),
    # a BatchNorm that runs again is asked for its new running statistics
    Mistake(
        "step/batch_norm.py",
        "return cast(int, shown.args[1]) < RUNNING[op.target]",
        "return True",
        "linearize/test_joint.py::test_running_statistics_are_updates_that_a_second_execution_leaves_alone",
    ),
    # the second half of a BatchNorm scales and shifts what lies otherwise than kernels expect
    Mistake(
        "step/batch_norm.py",
        "if not is_dense(x) or not all(",
        "if not all(",
        "step/test_batch_norm.py::test_the_halves_have_the_bits_of_the_whole",
    ),
    # statistics of half precision
    Mistake(
        "step/batch_norm.py",
        "(typed or not again)",
        "True",
        "passes/test_program.py::test_a_batch_norm_without_parameters_has_its_statistics_in_full_precision_again",
    ),
    # both halves of a BatchNorm run one by one, the first of which runs both
    Mistake(
        "passes/lower.py",
        "found[first] = second",
        "pass",
        "step/test_batch_norm.py::test_steps_that_run_second_halves_again_have_the_bits_of_eager",
    ),
    # the first half is taken to need the time of the whole
    Mistake(
        "cost/measure.py",
        "(*call.args[:-1], False)",
        "call.args",
        "cost/test_cost.py::test_the_first_half_of_a_batch_norm_is_timed_by_itself",
    ),
    # parameters of half precision, whose statistics are rounded
    Mistake(
        "passes/batch_norm.py",
        "return types == {dtype_of_statistics(shown)} and",
        "return",
        "passes/test_rewrites.py::test_a_batch_norm_of_half_precision_stays_whole",
    ),
]

HOST = "runtime/test_host.py"
OFFLOADING = "test_offloading.py::test_the_host_s_limit_is_respected_and_named"
MISTAKES += [
    # a gradient that autograd hands in is overwritten
    Mistake(
        "passes/in_place.py",
        "depending_on(graph, handed_in) - handed_in)",
        "depending_on(graph, handed_in))",
        "linearize/test_in_place.py::test_a_gradient_that_autograd_hands_in_is_left_alone",
    ),
    # what others read is overwritten
    Mistake(
        "passes/in_place.py",
        "set(shower.users) == {reader}",
        "reader in shower.users",
        "linearize/test_in_place.py::test_sums_of_gradients_and_relus_overwrite_the_branch_that_ends_in_them",
    ),
    # an op that overwrites still takes memory for its result
    Mistake(
        "step/costs.py",
        "taken[op.index] = held(sizes[result], device)",
        "pass",
        "linearize/test_in_place.py::test_an_op_that_overwrites_needs_no_memory_for_its_result",
    ),
    # the memory of what left is let go at once
    Mistake(
        "transfers/clock.py",
        "if ends > log.clock[_NOW] and need + log.counts[_BYTES] <= limit:",
        "if False:",
        "passes/test_swap.py::test_the_clock_by_hand",
    ),
    # what is leaving does not count
    Mistake(
        "transfers/clock.py",
        "log.counts[_BYTES] += out.sizes[number]",
        "log.counts[_BYTES] += 0",
        "passes/test_swap.py::test_a_slow_link_makes_ops_wait_where_memory_is_short_and_only_there",
    ),
    # a copy back starts where it does not fit
    Mistake(
        "transfers/clock.py",
        "back.sizes[number] <= limit)",
        "0 <= limit)",
        "passes/test_swap.py::test_a_slow_link_makes_ops_wait_where_memory_is_short_and_only_there",
    ),
    # the backward reads the version that has left
    Mistake(
        "transfers/copies.py",
        "self.renamed.get(v, v) for",
        "v for",
        "passes/test_swap.py::test_the_clock_by_hand",
    ),
    # copies of one direction run at the same time
    Mistake(
        "transfers/clock.py",
        "max(log.clock[_NOW], log.clock[lane], after)",
        "max(log.clock[_NOW], after)",
        "passes/test_swap.py::test_a_slow_link_makes_ops_wait_where_memory_is_short_and_only_there",
    ),
    # memory goes back to the pool while something shows it
    Mistake(
        "host/pool.py",
        "weakref.finalize(owner, self._returned",
        "weakref.finalize(like, self._returned",
        HOST,
    ),
    # nobody waits for the copy out
    Mistake("host/files.py", 'self._lanes["out"].finish(host.data_ptr())', "pass", HOST),
    # the host's limit is not looked at
    Mistake(
        "transfers/offloading.py",
        "if host_mem is not None and there > host_mem:",
        "if False:",
        OFFLOADING,
    ),
]

LATE = "test_late_copies.py"
MISTAKES += [
    # the compute stream waits for no copy
    Mistake(
        "host/pinned.py",
        "torch.cuda.current_stream(self._index).wait_event(copying.event)",
        "pass",
        LATE,
    ),
    # a copy begins before what it reads is computed
    Mistake("host/pinned.py", "self.stream.wait_stream(torch.cuda.current_stream(self._index))", "pass", LATE),
    # nothing holds what is being copied
    Mistake(
        "host/pinned.py",
        "_Copying(key, source, target, event)",
        "_Copying(key, source.new_empty(0), target.new_empty(0), event)",
        LATE,
    ),
    # every copy counts as over
    Mistake("host/pinned.py", "if not copying.event.query():", "if False:", LATE),
    # the event passes before the copy
    Mistake(
        "host/pinned.py",
        "target.data.copy_(source, non_blocking=True)  # .data: autograd may have saved it\n"
        "                event.record(self.stream)",
        "event.record(self.stream)\n                target.data.copy_(source, non_blocking=True)",
        LATE,
    ),
    # the host reads parameters while they are copied home
    Mistake("host/pinned.py", 'for lane in self._lanes_of("out"):', "for lane in ():", LATE),
    Mistake(
        "ops/parameters.py",
        "self.tier.synchronize()  # what reads parameters between steps reads new ones",
        "pass",
        LATE,
    ),
    # after a fault, those that were on their way home
    Mistake(
        "ops/parameters.py",
        "            del self._coming[number]\n        self.tier.synchronize()",
        "            del self._coming[number]",
        LATE,
    ),
]

WEIGHTS = "test_weights.py"
MISTAKES += [
    # a weight that lives on the host takes no memory while it is on the device
    Mistake("step/liveness.py", "if version in program.fetched:", "if False:", WEIGHTS),
    # weights that stay are not counted
    Mistake("step/liveness.py", "start += program.resident", "start += 0", WEIGHTS),
    # what is let go after its update is not what came from the host
    Mistake(
        "transfers/copies.py",
        "(self.renamed.get(what.version, what.version),)",
        "(what.version,)",
        WEIGHTS,
    ),
    # the new weight does not go home
    Mistake("ops/parameters.py", "self.tier.store(weight, self.hosted[number])", "pass", WEIGHTS),
    # the user's learning rate of the moment is not looked at
    Mistake("ops/parameters.py", "single.param_groups[0].update(settings)", "pass", WEIGHTS),
    # a copy back starts where it does not fit
    Mistake(
        "../benchmarks/weight_reference/cycle_clock.py",
        "if staying + op.beside > limit:",
        "if False:",
        "solvers/test_weights.py",
    ),
    # a unit is dropped although the host has an old version
    Mistake(
        "../benchmarks/weight_reference/cycle_clock.py",
        "        if self.hosted[unit]:\n",
        "        if True:\n",
        "solvers/test_weights.py",
    ),
    # every gap pays for its own copy out
    Mistake(
        "../benchmarks/weight_reference/selection.py",
        "        if discount:\n",
        "        if False:\n",
        "solvers/test_weights.py",
    ),
    # optimizer state on the device is not counted
    Mistake("transfers/copies.py", "takes=sign * what.size", "takes=0", WEIGHTS),
    # it stays there after the update
    Mistake("ops/parameters.py", "self._leaving.pop(number, None)", "pass", WEIGHTS),
    # the new state does not go home
    Mistake("ops/parameters.py", "self.tier.store(value, homes[key])", "pass", WEIGHTS),
    # a parameter stays without memory after a failed forward
    Mistake(
        "ops/parameters.py",
        "        finally:\n            for number, data in there.items():",
        "        except OSError:\n            raise\n        else:\n            for number, data in there.items():",
        WEIGHTS,
    ),
    # another shape hosts what it likes
    Mistake(
        "planning/finished.py",
        "            settled=trained.settled,\n",
        "",
        "test_weights.py::test_another_shape_is_planned_for_the_same_hosted_weights",
    ),
]

PIPELINING = "test_pipelining.py"
STAGES = f"{PIPELINING}::test_"
ONE_JOB = f"{PIPELINING}::test_two_processes_of_which_one_has_two_stages"
MISTAKES += [
    # what crosses is overwritten in the buffer that it arrived in
    Mistake(
        "pipelining/stages.py",
        "self.sharing.written.get(shown, -1) < place",
        "True",
        STAGES + "no_cut_before_what_crosses_is_written_in_place",
    ),
    # tied weights are two
    Mistake(
        "pipelining/stages.py",
        "self._shown[node] = first.setdefault(_memory(values[name]), node)",
        "self._shown[node] = node",
        STAGES + "a_tied_weight_stays_with_all_who_read_it",
    ),
    # an input that is needed later does not cross
    Mistake(
        "pipelining/stages.py",
        "crossing: set[fx.Node] = set(self.inputs)",
        "crossing: set[fx.Node] = set()",
        STAGES + "no_cut_where_an_input_is_needed_later",
    ),
    # losses take nothing
    Mistake(
        "pipelining/memory.py",
        "live += spending.returned",
        "live += 0",
        STAGES + "memory_of_two_devices_by_hand",
    ),
    # the gradient that came is counted twice
    Mistake(
        "pipelining/memory.py",
        "live -= spending.kept + held.leaving",
        "live -= spending.kept",
        STAGES + "memory_of_two_devices_by_hand",
    ),
    # the gradient that came is counted until its last reader, and the engine holds on to it
    Mistake("pipelining/profile.py", "kept=joint.tangent_values", "kept=()", ONE_JOB),
    # used buffers stay
    Mistake(
        "pipelining/engine.py",
        'info.buffer = torch.empty_like(info.buffer, device="meta")',
        "info.buffer = info.buffer",
        ONE_JOB,
    ),
    # every micro-batch is compared with the first target
    Mistake("pipelining/engine.py", "self.targets[fwd_chunk_id]", "self.targets[0]", ONE_JOB),
    # a stage is compiled for its fastest program, whatever its way
    Mistake(
        "pipelining/profile.py",
        "if takes.peak_bytes <= way.peak_bytes and takes.kept_bytes <= way.kept_bytes:",
        "if True:",
        STAGES + "a_budget_that_no_plan_keeps_names_one_that_works",
    ),
]

PIPELINE, ANY_PIPELINE = "solvers/test_pipeline.py", "solvers/test_pipeline_any.py"
MISTAKES += [
    # a group never ends
    Mistake(
        "solvers/pipeline/groups.py",
        "group, seconds = group + 1, 0.0",
        "group, seconds = group, 0.0",
        PIPELINE,
    ),
    # an empty slot in k instead of k + 1
    Mistake("solvers/pipeline/groups.py", "group - group // (skip + 1)", "group - group // skip", PIPELINE),
    # one micro-batch fewer is counted
    Mistake(
        "solvers/pipeline/fixed.py",
        "stage.way.bytes(alive(group, skip))",
        "stage.way.bytes(alive(group, skip) - 1)",
        PIPELINE,
    ),
    # copies delay nothing
    Mistake(
        "solvers/pipeline/contiguous.py",
        "after = joined(after, table.copying[i - 1], tick)",
        "after = joined(after, 0.0, tick)",
        PIPELINE,
    ),
    # every border has a link of its own
    Mistake(
        "solvers/pipeline/check.py",
        'f"the link of devices {low} and {high}"',
        'f"the link {span.place} of devices {low} and {high}"',
        ANY_PIPELINE + "::test_the_checker_refuses_a_link_that_carries_two_copies_at_once",
    ),
    # the checker lets devices overflow
    Mistake(
        "solvers/pipeline/check.py",
        "if size > plan.machines.memory * (1 + _TINY):",
        "if size > plan.machines.memory * 2:",
        ANY_PIPELINE + "::test_the_checker_refuses_plans_with_something_wrong",
    ),
    # patterns do not know that borders share a link
    Mistake(
        "solvers/pipeline/tasks.py",
        "link = links.setdefault(pair,",
        "link = links.setdefault((number,),",
        ANY_PIPELINE + "::test_the_checker_refuses_a_link_that_carries_two_copies_at_once",
    ),
    # what a forward earlier in the period keeps is forgotten
    Mistake(
        "solvers/references/pipeline/ilp.py",
        "terms.append((stage.way.kept_bytes, self.first[f, t]))",
        "terms.append((0.0, self.first[f, t]))",
        ANY_PIPELINE + "::test_the_integer_program_finds_the_optimum_of_the_vectors",
    ),
    # all devices together have the memory of one
    Mistake(
        "solvers/pipeline/period_bound.py",
        "job.machines.devices * job.machines.memory - job",
        "job.machines.memory - job",
        ANY_PIPELINE + "::test_plans_hold_and_are_never_slower_than_the_best_contiguous_one",
    ),
    # the special device may work longer than a period
    Mistake(
        "solvers/pipeline/madpipe.py",
        "if busy <= limit and held <= room * limits.share:",
        "if held <= room * limits.share:",
        ANY_PIPELINE + "::test_madpipe_hopes_for_the_period_of_the_vectors_and_plans_are_no_slower",
    ),
    # what is run again takes no time
    Mistake(
        "solvers/pipeline/of_chain.py",
        "repeated += self.forward[end] - self.forward[start]",
        "repeated += 0.0",
        "solvers/test_pipeline_report.py",
    ),
    # the gradient that comes in counts as kept
    Mistake(
        "solvers/pipeline/solved.py",
        "timeline.memory[turn] - stage.phase_sizes[final] - working",
        "timeline.memory[turn] - working",
        "solvers/test_pipeline_report.py",
    ),
    Mistake(
        "solvers/pipeline/moves.py",
        "found.seconds(microbatches) <= best.seconds(microbatches) * ahead",
        "found.period <= best.period * ahead",
        ANY_PIPELINE,
    ),
    Mistake("pipelining/stages.py", "if result is self.ops.loss:", "if False:", PIPELINING),
    Mistake("pipelining/profile.py", "str(list(_shapes(examples)))", "str(len(examples))", PIPELINING),
    Mistake(
        "pipelining/profile.py",
        "2 * self.input_bytes(last + 1) if",
        "0 * self.input_bytes(last + 1) if",
        PIPELINING,
    ),
    Mistake("linearize/chain_of.py", "others |= self._returned_before(number)", "pass", "test_surface.py"),
]

WALK = "cost/test_walk.py"
DROP_IN = "runtime/test_module.py"
MISTAKES += [
    # layouts are not compared before an op overwrites its operand
    Mistake(
        "cost/measure.py",
        "if whole and alike and not self.walk.shares(",
        "if whole and not self.walk.shares(",
        f"{WALK}::test_an_op_that_overwrites_is_put_back_where_real_layouts_differ",
    ),
    # what was put back is forgotten by the next plan
    Mistake(
        "cost/measure.py",
        "cache.keep(layouts, [1.0, *(float(index + 1) for index in refused)])",
        "cache.keep(layouts, [1.0])",
        f"{WALK}::test_what_was_put_back_is_remembered",
    ),
    # bags that happen to be empty are measured so
    Mistake(
        "cost/measure.py",
        "args = [torch.ones_like(value) if k == place else value",
        "args = [value",
        f"{WALK}::test_the_budget_holds_for_bags_that_were_empty_when_it_was_planned",
    ),
    # a walk frees what is read again
    Mistake(
        "cost/walk.py",
        "        needed.update(reads)\n",
        "",
        f"{WALK}::test_a_walk_computes_what_the_model_does_in_any_order_and_frees_what_is_not_read_again",
    ),
    # a part of a storage costs what a whole one does
    Mistake(
        "step/costs.py",
        'f" of {whole} bytes" if whole != value.nbytes else ""',
        '""',
        f"{WALK}::test_keys_tell_subgraphs_devices_and_parts_of_storages_apart",
    ),
    # ops are measured in the captured order, however small the budget
    Mistake(
        "search/survey.py",
        "if budget_in_bytes(budget, everything, joint) >= everything:",
        "if everything:",
        f"{WALK}::test_small_budgets_are_measured_in_an_order_that_fits",
    ),
    # what a custom backward computes from saved tensors counts as forward
    Mistake(
        "step/joint.py",
        "if begun and node not in forward",
        'if node.meta.get("partitioner_tag") == "is_backward" and node not in forward',
        f"{WALK}::test_a_custom_functions_backward_belongs_to_the_backward",
    ),
    # a dropout of everything draws
    Mistake(
        "passes/dropout.py",
        "if node.args[2] and node.args[1] == 1 and tensor_read(node).numel():",
        "if False:",
        f"{WALK}::test_what_plain_pytorch_trains_is_trained_with_its_bits",
    ),
    # all dropouts of a graph have one mask
    Mistake(
        "passes/seeded_dropout.py",
        "aten.select.int, seeds, 0, index)",
        "aten.select.int, seeds, 0, 0)",
        "passes/test_seeded_dropout.py::test_dropouts_are_numbered_on_each_device",
    ),
    # a mask is drawn in the order of dimensions whatever the layout is
    Mistake(
        "passes/seeded_dropout.py",
        "    order = memory_order(tensor_read(node))\n",
        "    order = list(range(tensor_read(node).dim()))\n",
        "passes/test_seeded_dropout.py::test_a_mask_has_the_layout_of_what_is_dropped",
    ),
    # random numbers are compared in single precision whatever the type is
    Mistake(
        "ops/seeded.py",
        "return uniform.to(dtype) > p",
        "return uniform > p",
        "passes/test_seeded_dropout.py::test_compiled_masks_in_half_precision",
    ),
    # a mask depends on what was drawn before
    Mistake(
        "ops/seeded.py",
        "torch.rand(shape, generator=generator, dtype",
        "torch.rand(shape, dtype",
        "passes/test_seeded_dropout.py::test_a_mask_is_a_function_of_its_seed",
    ),
    # Inductor's cache takes code that may overwrite an input for code that may not
    Mistake(
        "torch_inductor.py",
        'kind = "donated" if place in donated else "given"',
        'kind = "given"',
        "fusion/test_region.py::test_code_that_may_overwrite_is_not_mixed_up_with_code_that_may_not",
    ),
    # a region of the backward overwrites what the forward has saved
    Mistake(
        "fusion/joint.py",
        "(made < self.first_late) == (self.group < self.first_late)",
        "True",
        "fusion/test_compiled.py::test_a_backward_may_run_twice",
    ),
    # a region frees what a later one reads
    Mistake(
        "fusion/joint.py",
        "return self.last[node] == self.group and",
        "return",
        "fusion/test_random_cuts.py::test_random_cuts_small",
    ),
    # what ops take in regions is learned anew for each budget
    Mistake(
        "planning/compiled.py",
        "shares = recall(device_of(joint), key, len(joint.ops))",
        "shares = None",
        "fusion/test_compiled.py::test_what_was_learned_and_measured_is_not_asked_for_again",
    ),
    # a ladder on disk is found by other code than it was written by
    Mistake(
        "search/found_files.py",
        'digest = hashlib.sha256(f"{_code()} {key}".encode()).hexdigest()',
        "digest = hashlib.sha256(key.encode()).hexdigest()",
        "test_found_files.py::test_other_code_finds_nothing",
    ),
    # what is no ladder may be called
    Mistake(
        "search/found_files.py",
        "return self._allowed[module, name]",
        "return super().find_class(module, name)",
        "test_found_files.py::test_nothing_but_a_ladder_is_called",
    ),
    # a ladder that was climbed further is not written
    Mistake(
        "search/frontier_cache.py",
        "known is not None and known.climbed == ladder.climbed",
        "known is not None",
        "test_found_files.py::test_it_goes_on_where_the_search_was_left",
    ),
    # costs of functions are kept under where they lie in memory
    Mistake(
        "step/costs.py",
        'return f"{_named(node.target)}({arguments})"',
        'return f"{node.target}({arguments})"',
        "fusion/test_compiled.py::test_costs_are_found_again_whatever_is_called",
    ),
    # a region that is used often is left though it gains enough
    Mistake(
        "fusion/units.py",
        "(sum(gain(ops_of(program, unit)) for unit in kind), kind)",
        "(gain(ops_of(program, kind[0])), kind)",
        "fusion/test_units.py::test_what_gains_little_is_not_compiled",
    ),
    # a kept choice is believed whatever it takes by now
    Mistake(
        "planning/compiled.py",
        "if judged.peak > self._plan.budget or (known.units and not self._runs_within(judged)):",
        "if False:",
        "fusion/test_compiled.py::test_a_kept_choice_that_does_not_fit_any_more_is_made_again",
    ),
    # the other way to cut is tried however long that takes
    Mistake(
        "planning/compiled.py",
        "most = inf if needed else",
        "most = inf if True else",
        "fusion/test_compiled.py::test_the_other_way_to_cut_is_tried_where_that_compiles_quickly",
    ),
    # a cut whose regions are slower than single ops is taken without another look
    Mistake(
        "planning/compiled.py",
        "if judged.time <= FASTER * self._single.time(self._plan.chosen.program()):",
        "if judged.time:",
        "fusion/test_compiled.py::test_where_regions_are_slower_the_other_way_to_cut_is_tried",
    ),
    # steps are compared at every budget
    Mistake(
        "planning/compiled.py",
        "known = recall(device, key, 1)",
        "known = None",
        "fusion/test_compiled.py::test_what_was_learned_and_measured_is_not_asked_for_again",
    ),
    # seconds of regions by themselves are compared with those of single ops in a step
    Mistake(
        "planning/compiled.py",
        "self._options).scaled(self._calibration)",
        "self._options)",
        "fusion/test_compiled.py::test_seconds_in_regions_are_compared_as_those_of_ops_in_a_step_are",
    ),
    # what cannot gain is compiled
    Mistake(
        "planning/compiled.py",
        "if self._fits_op_by_op else inf",
        "if False else inf",
        "fusion/test_compiled.py::test_what_cannot_gain_is_not_compiled",
    ),
    # what takes longer in regions is taken to gain nothing, and to lose nothing
    Mistake(
        "planning/judged.py",
        "share = taken / alone if taken > alone else left if op in fused else 1.0",
        "share = left if op in fused else 1.0",
        "fusion/test_compiled.py::test_what_ops_take_in_regions_is_learned_from_all_that_were_tried",
    ),
    # regions are compiled whether that pays or not
    Mistake(
        "planning/compiled.py",
        "if seconds > STEPS * saved:",
        "if False:",
        "fusion/test_compiled.py::test_regions_are_compiled_where_that_pays_within_a_training",
    ),
    # towers share copies of the weights that they share
    Mistake(
        "passes/channels_last.py",
        "use = read, cast(fx.Node, node.args[activation])",
        "use = read, read",
        "test_towers.py::test_towers_that_share_weights_share_no_copies_of_these_in_another_layout",
    ),
    # what gains little is never compiled, though the budget needs it
    Mistake(
        "planning/compiled.py",
        "for some in dict.fromkeys((worth_compiling(program, units, self._names, self._gain, least), units)):",
        "for some in (worth_compiling(program, units, self._names, self._gain, least),):",
        "fusion/test_compiled.py::test_all_is_compiled_where_the_budget_asks_for_it",
    ),
    # programs that differ in the order of their steps are taken for the same
    Mistake(
        "cost/remembered.py",
        "lines = [f\"{step.role} {step.reads} {step.writes} {keys[step.op]}\" for step in program.executions]",
        "lines = sorted(keys)",
        "test_remembered.py::test_the_same_ops_in_another_order_are_another_program",
    ),
    # the outputs of a region count twice
    Mistake(
        "step/costs.py",
        "taken[op.index] = sum(held(sizes[value], device) for value in op.writes)",
        "pass",
        "fusion/test_units.py::test_the_outputs_of_a_region_are_part_of_its_peak",
    ),
    # a region is measured as if its inputs lived on
    Mistake(
        "cost/measure.py",
        "_copy_of(x) if place in region.dying else x for",
        "_copy_of(x) if place in region.donated else x for",
        "fusion/test_compiled.py::test_the_budget_holds_and_gradients_are_those_of_inductor",
    ),
    # ops that are pulled to an earlier group never stay behind
    Mistake(
        "fusion/units.py",
        "stay |= moved",
        "pass",
        "fusion/test_units.py::test_pulls_stop_where_they_would_not_fit",
    ),
    # an op joins a group before what it reads is made
    Mistake(
        "fusion/units.py",
        "behind = max((writer[version] for version in step.reads if version in writer), default=-1)",
        "behind = -1",
        "fusion/test_units.py::test_an_op_joins_no_group_before_what_it_reads",
    ),
    # saved tensors are donated when the settings of tracing are over
    Mistake(
        "torch_private.py",
        "context.fw_metadata.bw_donated_idxs = []",
        "pass",
        f"{DROP_IN}::test_retain_graph_after_ordinary_steps",
    ),
    # hooks that are registered later are not seen
    Mistake(
        "torch_private.py",
        '"skip_nnmodule_hook_guards": False',
        '"skip_nnmodule_hook_guards": True',
        f"{DROP_IN}::test_hooks_of_the_model_run_once_whenever_they_are_registered",
    ),
    # unused outputs give zeros
    Mistake(
        "runtime/unused.py",
        "    if not unused:\n        return gradients\n",
        "    if True:\n        return gradients\n",
        f"{DROP_IN}::test_what_only_unused_outputs_depend_on_gets_no_gradient",
    ),
    # any unused output is enough
    Mistake(
        "runtime/unused.py",
        "None if needed and needed <= unused else gradient",
        "None if needed & unused else gradient",
        f"{DROP_IN}::test_what_only_unused_outputs_depend_on_gets_no_gradient",
    ),
    # a second part of a broken model is planned with the whole budget
    Mistake(
        "runtime/parts.py",
        "other.settings is self.settings and other.frame != self.frame",
        "False",
        f"{DROP_IN}::test_the_parts_of_a_broken_graph_do_not_each_take_the_budget",
    ),
    # a recurrent use counts as a second part
    Mistake(
        "runtime/parts.py",
        "other.settings is self.settings and other.frame != self.frame",
        "other.settings is self.settings",
        f"{DROP_IN}::test_a_recurrent_use_of_one_graph_is_no_second_part",
    ),
    # the drop-in has a dictionary of its own
    Mistake(
        "runtime/module.py",
        'object.__setattr__(made, "__dict__", model.__dict__)',
        'object.__setattr__(made, "__dict__", dict(model.__dict__))',
        f"{DROP_IN}::test_attributes_set_on_either_are_set_on_both",
    ),
    # a wrapper that a trainer sets on the instance is ignored
    Mistake(
        "runtime/module.py",
        "if own is None or own is training.own:",
        "if True:",
        f"{DROP_IN}::test_a_wrapper_around_forward_set_later_keeps_the_budget",
    ),
    # a flow network is cut on the wrong side
    Mistake(
        "linearize/save_sets.py",
        "left.T.tocsr()",
        "left.tocsr()",
        "linearize/test_layout.py::test_no_choice_of_values_beats_a_save_set_in_both_bytes_and_seconds",
    ),
    # a view that begins at a number of the data shares its base
    Mistake(
        "passes/normalize.py",
        "drop_as_eager, copy_views_by_number, overwrite_gradients)",
        "drop_as_eager, overwrite_gradients)",
        "test_numbers.py::test_a_number_of_the_data_changes_no_bit_and_no_budget[Row-measure]",
    ),
    # numbers are saved among tensors
    Mistake(
        "passes/lower.py",
        "self.saved.sort(key=lambda pair: is_number(pair[0].meta",
        "self.saved.sort(key=lambda pair: 0 and is_number(pair[0].meta",
        "test_numbers.py::test_a_number_of_the_data_changes_no_bit_and_no_budget[Row-measure]",
    ),
]

WHAT_IF = "test_what_if.py"
MISTAKES += [
    # a model without data keeps the fake tensors of its plan
    Mistake(
        "runtime/shapes_alone.py",
        "            holder[name] = tensor\n",
        "            pass\n",
        f"{WHAT_IF}::test_the_model_is_as_it_was",
    ),
    # a graph without gradients is planned as if it were a step
    Mistake(
        "runtime/capture_errors.py",
        "if any(isinstance(gradient, fx.Node) for gradient in joint.backward_outputs):",
        "if True:",
        f"{WHAT_IF}::test_a_step_that_gives_no_gradient_at_all_is_refused",
    ),
    # one parameter without a gradient is enough to refuse a step
    Mistake(
        "runtime/capture_errors.py",
        "if any(isinstance(gradient, fx.Node) for gradient in joint.backward_outputs):",
        "if all(isinstance(gradient, fx.Node) for gradient in joint.backward_outputs):",
        f"{WHAT_IF}::test_a_step_that_gives_no_gradient_at_all_is_refused",
    ),
    # sizes are rounded as on the CPU that the step was captured on
    Mistake(
        "cost/estimate.py",
        'torch.device("cuda" if device.cuda else "cpu")',
        "device_of(joint)",
        "cost/test_devices.py::test_sizes_are_rounded_as_the_devices_allocator_does",
    ),
    # the target's kernels stay after the plan
    Mistake(
        "torch_private.py",
        "            op.py_kernels.pop(of_key, None)\n            op.py_kernels.update(others)\n",
        "            pass\n",
        f"{WHAT_IF}::test_the_kernels_of_the_cpu_are_back_afterwards",
    ),
    # the search for the largest size ends one too early
    Mistake(
        "what_if.py",
        "while high - low > 1:",
        "while high - low > 2:",
        f"{WHAT_IF}::test_the_largest_size_is_found_with_few_trials",
    ),
]

DEVICE_MEMORY, LARGEST = "cost/test_device_memory.py", "test_largest.py"
MISTAKES += [
    # gigabytes of data sheets are taken for decimal
    Mistake(
        "cost/devices.py",
        "return amount * 2**20",
        "return amount * 10**6",
        "cost/test_devices.py::test_memory_is_what_the_driver_reports",
    ),
    # gradients are counted in the peak and beside it
    Mistake(
        "cost/device_memory.py",
        "return self.free - max(peak, self.stepping)",
        "return self.free - peak - self.stepping",
        f"{DEVICE_MEMORY}::test_gradients_are_counted_once",
    ),
    # frozen parameters have optimizer state
    Mistake(
        "cost/device_memory.py",
        "found = [node for node, gradient in pairs if isinstance(gradient, fx.Node)]",
        "found = [node for node, _ in pairs]",
        f"{DEVICE_MEMORY}::test_the_state_is_that_of_pytorchs_optimizer",
    ),
    # mem="auto" forgets the optimizer
    Mistake(
        "cost/device_memory.py",
        "return self.total - self.given - self.state",
        "return self.total - self.given",
        f"{DEVICE_MEMORY}::test_auto_is_what_the_device_has_left",
    ),
    # the planned peak alone decides whether a step fits
    Mistake(
        "cost/device_memory.py",
        "if at_least >= 0:",
        "if at_least > self.total:",
        f"{DEVICE_MEMORY}::test_the_answer_is_about_the_planned_peak_and_about_the_least",
    ),
    # every device is captured by itself
    Mistake(
        "runtime/target_kernels.py",
        'return all(getattr(one, of) == getattr(other, of) for of in ("cuda", "flash", "cudnn_attention"))',
        "return one == other",
        f"{WHAT_IF}::test_devices_that_run_the_same_kernels_share_one_capture",
    ),
    # a number that changes the model is taken for one that changes its inputs
    Mistake(
        "what_if.py",
        "if any(_outline(other) != _outline(model) for other, _ in made[1:]):",
        "if False:",
        f"{LARGEST}::test_sizes_that_a_number_decides",
    ),
    # a mistyped input of `shapes` is passed over
    Mistake(
        "runtime/varying.py",
        "            _check_known(name, given, forward)\n",
        "",
        "test_shapes.py::test_a_dimension_that_is_not_there_is_refused",
    ),
    # no line says what goes on
    Mistake(
        "progress.py",
        "while not done.wait(EVERY):",
        "while not done.wait():",
        "test_progress.py::test_the_command_line_shows_these_lines_without_a_terminal",
    ),
]

SYMBOLIC, OVERWRITING, RESIZED = "step/test_symbolic.py", "step/test_overwriting.py", "cost/test_resized.py"
MISTAKES += [
    # sizes are compared as they are written
    Mistake(
        "step/symbolic.py",
        "(first - second).expand() == 0",
        "first - second == 0",
        f"{SYMBOLIC}::test_sizes_are_equal_where_they_are_at_all_sizes",
    ),
    # a factor that is made of sizes loses its fraction
    Mistake(
        "step/symbolic.py",
        "((torch.SymInt, int), (torch.SymFloat, float), (torch.SymBool, bool))",
        "((torch.SymInt, int), (torch.SymFloat, int), (torch.SymBool, bool))",
        f"{SYMBOLIC}::test_numbers_at_sizes",
    ),
    # a view at given sizes has memory of its own
    Mistake(
        "step/symbolic.py",
        "self._storages.setdefault(storage,",
        "self._storages.setdefault(len(self._storages),",
        f"{SYMBOLIC}::test_views_share_storages_with_what_they_view[conv]",
    ),
    # the graph at given sizes returns a gradient of each size
    Mistake(
        "step/symbolic.py",
        "enumerate(returned) if place not in places]",
        "enumerate(returned)]",
        f"{SYMBOLIC}::test_a_graph_at_sizes_has_the_nodes_of_the_symbolic_one_again",
    ),
    # a sparse value is taken for a dense one
    Mistake(
        "step/symbolic.py",
        "if value.layout is not torch.strided:",
        "if False:",
        f"{SYMBOLIC}::test_a_sparse_value_is_known_for_one_size_alone",
    ),
    # an operand that is a part of a storage is overwritten
    Mistake(
        "ops/overwriting.py",
        "if whole and _alike(",
        "if _alike(",
        f"{OVERWRITING}::test_layouts_decide_whether_an_operand_is_overwritten",
    ),
    # an operand of another layout than the result's is overwritten
    Mistake(
        "ops/overwriting.py",
        "_Layout.of(captured(*given, **rest)) == args[0]",
        "_Layout.of(captured(*given, **rest)).shape == args[0].shape",
        f"{OVERWRITING}::test_layouts_decide_whether_an_operand_is_overwritten",
    ),
    # a new result is made of the operands in the order of overwriting
    Mistake(
        "step/overwriting.py",
        "    if swapped:\n",
        "    if False:\n",
        f"{OVERWRITING}::test_operands_are_handed_over_in_the_order_of_the_capture",
    ),
    # a new result is made without the options of the op
    Mistake(
        "step/overwriting.py",
        "{key: value for key, value in kwargs.items() if key != \"grad_input\"}",
        "{}",
        f"{OVERWRITING}::test_options_are_handed_on",
    ),
    # what took no workspace takes none at larger sizes
    Mistake(
        "cost/resized.py",
        "if grown[op.index] or by_op[op.index].workspace > FEW",
        "if by_op[op.index].workspace > FEW",
        f"{RESIZED}::test_what_took_nothing_is_not_run_for_smaller_sizes",
    ),
    # a result is taken to need what its shape says
    Mistake(
        "cost/resized.py",
        " or not _as_shown(op, known, costs, device)",
        "",
        f"{RESIZED}::test_a_result_in_a_larger_storage_is_noticed",
    ),
    # views inside of torch's own kernels take numbers alone
    Mistake(
        "torch_private.py",
        "return kernels[op](tensor, shape) if symbolic else op._op_dk(key, tensor, shape)",
        "return op._op_dk(key, tensor, shape)",
        f"{SYMBOLIC}::test_a_view_inside_of_an_op_may_have_symbolic_sizes",
    ),
    # workspaces are those of the sizes that were measured
    Mistake(
        "cost/resized.py",
        "        by_op[index] = replace(safe, seconds=by_op[index].seconds)\n",
        "        pass\n",
        f"{RESIZED}::test_bytes_are_those_that_measuring_finds[conv]",
    ),
    # seconds are those of the sizes that were measured
    Mistake(
        "cost/resized.py",
        "costs.seconds[op.index] * now[op.index].seconds / before[op.index].seconds",
        "costs.seconds[op.index]",
        f"{RESIZED}::test_seconds_grow_with_the_sizes[encoder]",
    ),
    # a dimension of size 1 keeps others apart
    Mistake(
        "torch_private.py",
        "while begin and (shape[begin - 1] == 1 or strides[begin - 1] == count * base):",
        "while begin and strides[begin - 1] == count * base:",
        "test_views.py::test_strides_are_those_of_torch",
    ),
    # a size of 1 at the front of a group is left to the one before it
    Mistake(
        "torch_private.py",
        "while left and (viewed < count or left[-1] == 1):",
        "while left and viewed < count:",
        "test_views.py::test_strides_are_those_of_torch",
    ),
    # a backward runs the program that was chosen last
    Mistake(
        "runtime/sized.py",
        "program, numbers = self._program(int(arguments[count])), self._numbers(dims)",
        "program, numbers = self._program(len(self._orders) - 1), self._numbers(dims)",
        "test_shapes.py::test_a_plan_made_between_a_forward_and_its_backward_changes_nothing",
    ),
    # a percentage refers to the sizes that came, however large they were said to become
    Mistake(
        "runtime/sizes.py",
        "return int(GROWTH * dims[place]) if expected else dims[place]",
        "return dims[place]",
        "test_shapes.py::test_percent_refers_to_the_largest_size",
    ),
    # all sizes are of the first dimension
    Mistake(
        "torch_private.py",
        "int(size[1]) if size else None",
        "0 if size else None",
        "test_shapes.py::test_a_plan_tells_of_other_sizes",
    ),
]

# regions in slices
MISTAKES += [
    # the inner dimension of a product is cut, and its parts are put side by side instead of added
    Mistake(
        "slices/rules.py",
        "_cut(node, [(a, 1), (b, 0)], [SUM], count),",
        "_cut(node, [(a, 1), (b, 0)], [WHOLE], count),",
        "slices/test_rules.py",
    ),
    # a softmax is cut along the dimension that it adds up over
    Mistake(
        "slices/rules.py",
        "if not any(map(at.holds, mixed)):\n            cut: list[tuple[Any, Part]] = [(x, outer) for x in operands]",
        "if True:\n            cut: list[tuple[Any, Part]] = [(x, outer) for x in operands]",
        "slices/test_rules.py",
    ),
    # a group norm is told the number of images of the whole batch
    Mistake(
        "slices/emission.py",
        "lambda number: number // count * rows)",
        "lambda number: number)",
        "slices/test_rules.py",
    ),
    # later slices replace what the first ones have added up
    Mistake(
        "slices/body.py",
        "            _call(graph, aten.add_.Tensor, (target, node), {})",
        "            _call(graph, aten.copy_.default, (target, node), {})",
        "slices/test_models.py",
    ),
    # rows of a flattened batch are taken as if each were one of the axis
    Mistake(
        "slices/body.py",
        "first * self.each, rows * self.each)",
        "first, rows * self.each)",
        "slices/test_rules.py",
    ),
    # gradients that were made in the forward are not multiplied by that of the loss
    Mistake(
        "slices/write.py",
        "            if output not in scaled:",
        "            if True:",
        "slices/test_models.py::test_a_scaled_loss_scales_the_gradients",
    ),
    # float16 gradients are made before a loss scale can keep them from vanishing
    Mistake(
        "slices/write.py",
        "t.dtype == torch.float16 for v in made",
        "t.dtype == torch.int8 for v in made",
        "slices/test_rewrite.py",
    ),
    # targets that are ignored count in the mean
    Mistake(
        "slices/explicit.py",
        "    first = write(aten.where.self, seen, zero, none)",
        "    first = write(aten.where.self, seen, zero, zero)",
        "slices/test_explicit.py",
    ),
    # a mask is drawn with the share that is dropped
    Mistake(
        "slices/explicit.py",
        "mask = write(aten.bernoulli.p, empty, 1 - p)",
        "mask = write(aten.bernoulli.p, empty, p)",
        "slices/test_explicit.py",
    ),
    # what a region adds up may be read before all slices have run
    Mistake(
        "slices/region.py",
        "                if value in large or not earlier:",
        "                if False:",
        "slices/test_random.py::test_a_sum_is_not_read_before_all_slices_have_run",
    ),
]

MISTAKES += [
    # a memory snapshot frees what has ended one moment too late
    Mistake(
        "show/snapshot.py",
        "                if life.last < count:\n                    ends[life.last + 1].append(block)",
        "                if life.last + 1 < count:\n                    ends[life.last + 2].append(block)",
        "test_snapshot.py::test_the_allocations_have_the_peak_of_the_plan",
    ),
    # a free extent is not joined with the one before it
    Mistake(
        "show/addresses.py",
        "if after > 0 and (before := self._starts[after - 1])",
        "if after > 1 and (before := self._starts[after - 1])",
        "test_snapshot.py::test_blocks_that_are_there_at_the_same_time_do_not_overlap",
    ),
    # a block is put at the begin of the last free extent even where that does not reach the end
    Mistake(
        "show/addresses.py",
        "if self._starts and self._starts[-1] + self._sizes[self._starts[-1]] == self.end:",
        "if self._starts:",
        "test_snapshot.py::test_blocks_that_are_there_at_the_same_time_do_not_overlap",
    ),
    # the counters of a trace count a life for one moment too few
    Mistake(
        "show/trace.py",
        "change[life.kind][min(life.last, count) + 1] -= life.bytes",
        "change[life.kind][min(life.last, count)] -= life.bytes",
        "test_trace.py::test_the_counters_have_the_peak_of_the_plan",
    ),
    # the lower bound of every row is that of the plan's own budget
    Mistake(
        "show/frontier.py",
        "bound = replace(self.plan, budget=point[0]).lower_bound",
        "bound = replace(self.plan, budget=self.plan.budget).lower_bound",
        "test_frontier_table.py::test_bounds_are_those_of_plans_within_these_peaks",
    ),
    # modules that only the first plan has are left out of the difference
    Mistake(
        "show/difference.py",
        "paths = dict.fromkeys((*others, *parts))",
        "paths = dict.fromkeys(others)",
        "test_difference.py::test_everything_adds_up",
    ),
    # the frame of a plan in a notebook may reach the page around it
    Mistake(
        "show/notebook.py",
        'sandbox="allow-scripts"',
        'sandbox="allow-scripts allow-same-origin"',
        "test_notebook.py::test_a_plan_shows_its_page_in_a_frame_and_its_text_below",
    ),
    # in a notebook the bar waits for a terminal
    Mistake(
        "progress.py",
        "(notebook_bar() or tqdm, False) if in_notebook()",
        "(notebook_bar() or tqdm, None) if in_notebook()",
        "test_notebook.py::test_without_widgets_the_bar_is_text_and_nobody_is_warned",
    ),
    # the last op of a number is taken for the one that a backward op belongs to
    Mistake(
        "step/names.py",
        "for node in reversed(nodes) if not _is_backward(node)",
        "for node in nodes if not _is_backward(node)",
        "step/test_names.py::test_the_loss_of_the_root_is_the_models_own",
    ),
    # the sum of two gradients belongs to the module of the last one
    Mistake(
        "step/names.py",
        "    return common_module(names) if names else \"\"\n\n\ndef _ops_behind",
        "    return names[0] if names else \"\"\n\n\ndef _ops_behind",
        "step/test_names.py::test_additions_of_gradients_lie_around_what_they_add_and_who_reads_it",
    ),
    # what an op overwrites stays there while its result does
    Mistake(
        "step/kinds.py",
        "replace(life, last=place - 1)",
        "replace(life, last=place)",
        "test_moments.py::test_an_op_that_overwrites_its_operand_counts_once",
    ),
    # gradients that the loss hands in are there only after it
    Mistake(
        "show/moments.py",
        "or life.value in tangents",
        "",
        "test_moments.py::test_moments_with_a_loss_outside",
    ),
    # values that are made again count as saved too
    Mistake(
        "show/modules.py",
        "if life.value is not None and life.kind is MemoryKind.KEPT:",
        "if life.value is not None and life.kind in (MemoryKind.KEPT, MemoryKind.RECOMPUTED):",
        "test_modules.py::test_modules_of_a_plan",
    ),
    # ops that run again count as those of the forward
    Mistake(
        "show/modules.py",
        'column = "extra" if again else',
        'column = "forward" if again else',
        "test_modules.py::test_modules_of_a_plan",
    ),
    # a part of several equal layers is counted once
    Mistake(
        "show/tree.py",
        "replace(row, count=row.count * len(group), share=share, paths=paths)",
        "replace(row, count=row.count * len(group), paths=paths)",
        "test_modules.py::test_a_table_by_hand",
    ),
    # a script can end inside of the data
    Mistake(
        "show/page.py",
        'for sign in "<>&\\u2028\\u2029"',
        'for sign in ">&\\u2028\\u2029"',
        "test_page.py::test_any_data_and_text_come_back_as_they_were",
    ),
    # neighbors that share a color look like one module
    Mistake(
        "show/palette.py",
        "self.groups[number].index(group) % 2",
        "number % 2",
        "test_headline.py::test_a_group_has_the_color_of_its_label",
    ),
    # a plan that recomputes is said to keep everything
    Mistake(
        "show/headline.py",
        "if memory == format_bytes(candidate.peak) and speed == SAME:",
        "if memory == format_bytes(candidate.peak):",
        "test_headline.py::test_headlines",
    ),
    # lives are stacked by purpose first
    Mistake(
        "show/page_data.py",
        "return group, kinds.index(life.kind), life.first, life.last",
        "return kinds.index(life.kind), group, life.first, life.last",
        "test_page.py::test_lives_lie_in_the_order_in_which_they_are_stacked",
    ),
    # a budget in words is rounded to the nearest
    Mistake(
        "profiles.py",
        "math.ceil(size / factor * 10**digits)",
        "round(size / factor * 10**digits)",
        "test_profile.py::test_enough_is_no_less_and_little_more",
    ),
    # changes are sorted by what they cost
    Mistake(
        "profiles.py",
        "worth.sort(key=lambda change: (-change.saved, change.time))",
        "worth.sort(key=lambda change: (change.time, -change.saved))",
        "test_profile.py::test_changes_are_worth_it_and_sorted_by_what_they_save",
    ),
    # running statistics are held until the step is over
    Mistake(
        "cost/calibrate.py",
        "joint.value_of.get(node) in joint.updates)",
        "False)",
        "cost/test_cost.py::test_a_step_that_runs_for_its_peak_holds_no_running_statistics_as_those_of_users_do_not",
    ),
]

SEGMENTS = "cost/test_segments.py"
CUDNN = "step/test_cudnn_batch_norm.py"
MISTAKES += [
    # what an allocator does not split off is not counted
    Mistake(
        "step/costs.py",
        "return rounded(size, device) + (unsplit(device) if size > CUDA_UNSPLIT else 0)",
        "return rounded(size, device)",
        f"{SEGMENTS}::test_a_large_block_may_have_a_mebibyte_more",
    ),
    # workspaces fit their blocks
    Mistake(
        "step/costs.py",
        "own = [held(cost.workspace, device) +",
        "own = [rounded(cost.workspace, device) +",
        f"{SEGMENTS}::test_values_and_workspaces_leave_room_for_it",
    ),
    # the allocator is set whatever the user has set
    Mistake(
        "cost/segments.py",
        "or any(os.environ.get(name) for name in VARIABLES)",
        "",
        f"{SEGMENTS}::test_what_the_user_has_set_stays",
    ),
    # a driver that cannot map memory is asked for segments at every step
    Mistake(
        "torch_private.py",
        'set_to("expandable_segments:False")',
        "pass",
        f"{SEGMENTS}::test_a_driver_that_cannot_map_memory_is_left_with_blocks",
    ),
    # mem="auto" leaves no room for the largest tensor
    Mistake(
        "budget.py",
        "max(share * free, LEAST_MARGIN, FRAGMENTS * largest)",
        "max(share * free, LEAST_MARGIN)",
        "runtime/test_auto.py::test_the_margin_is_what_the_allocator_reserves_beside_what_is_allocated",
    ),
    # cuDNN's BatchNorm is taken apart
    Mistake(
        "runtime/dynamo.py",
        "cudnn = contextlib.nullcontext() if self.options.compiles else batch_norms_of_cudnn()",
        "cudnn = contextlib.nullcontext()",
        CUDNN,
    ),
    # the captured op overwrites the running statistics
    Mistake(
        "step/cudnn_batch_norm.py",
        "(None if old is None else old.clone() for old in (running_mean, running_var))",
        "running_mean, running_var",
        CUDNN,
    ),
    # the new running statistics are dropped
    Mistake("step/cudnn_batch_norm.py", "        mean.copy_(new_mean)\n", "", CUDNN),
    # a backward uses up what was reserved
    Mistake("step/cudnn_batch_norm.py", "reserve.clone()", "reserve", f"{CUDNN}::test_a_backward_may_run_twice"),
    # a second execution makes new running statistics again
    Mistake(
        "step/batch_norm.py",
        "return node.target, (x, weight, bias, None, None, *rest)",
        "return node.target, node.args",
        f"{CUDNN}::test_its_bits_are_eagers_also_where_it_runs_again",
    ),
    # an H100 takes flash attention
    Mistake(
        "cost/devices.py",
        '    name="H100",\n    cudnn_attention=256,\n',
        '    name="H100",\n',
        f"{WHAT_IF}::test_attention_is_the_kernel_that_the_device_would_take",
    ),
    # pinned memory takes what it is asked for
    Mistake(
        "step/costs.py",
        "return tensors * (1 << (each - 1).bit_length()) if self.in_powers and each else size",
        "return size",
        "test_offloading.py::test_a_limit_counts_what_pinned_memory_takes",
    ),
    # the optimizer's state is one tensor
    Mistake(
        "transfers/weights.py",
        "link.on_host(unit.state_bytes, kinds)",
        "link.on_host(unit.state_bytes // 2)",
        "test_weights.py::test_host_mem_counts_what_pinned_memory_takes_for_parameters_and_state",
    ),
]
