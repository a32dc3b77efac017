"""Solvers: functions that take a chain of blocks and a budget in bytes, and return a schedule. None imports torch.

In all of them, a_l is the output of block l, A_l all that the backward of block l reads, and d_l the gradient of a_l
(`chains.chain`). "The thesis" is A. Shilova, Memory Saving Strategies for Deep Neural Network Training (2021).

"auto" returns the best schedule of those solvers that the time allows:

    keep_all        saves everything                                the fastest, the largest
    input_drop      saved blocks may also lose their input          dynamic program; the default chain solver
    floating_drop   input_drop; stored a_l may also be replaced     dynamic program for short chains
    exact           optimal                                         A*, for a few blocks

and with a link to the host, over which values may leave and come back:

    pofo            recomputation and offloading together           dynamic program, POFO
    autocapper      input_drop for more memory, then offloading     the heuristic of the thesis, on a better base
    local_search    autocapper, then small changes that help        as long as the effort lasts

Reference solvers can be asked for by name. `references` holds those that no other solver is built on; `persistent` is
part of `pofo`, `periodic` and `binomial` serve long joins:

    periodic        checkpoints at equal distances                  what checkpoint_sequential does
    binomial        optimal for uniform chains                      what Revolve does
    revolve         boundaries only, every block run again          dynamic program
    persistent      optimal where a stored value stays              dynamic program, what ROTOR does
    floating        stored a_l may be replaced by later ones        dynamic program for short chains
    checkmate       optimal without a_l as a value of its own       integer program for a few blocks
    offload_greedy  the first values leave until the rest fits      the thesis, Th. 8
    vdnn            values that take long to compute leave          what vDNN does
    offload_dp      the best set to offload, nothing recomputed     dynamic program, DYNPROG of the thesis
    opportunist     persistent, with offloading where it is free    the heuristic of the thesis

Joins of chains have solvers of their own, `JOINS`; see fxremat/solvers/joins.

`solve` evaluates what solvers propose by `simulate`, which the solvers themselves never import.
"""

from fxremat.solvers import keep_all
from fxremat.solvers.choose import EFFORT, JoinSolution, Solution, best, solution, solve
from fxremat.solvers.registry import CHOSEN, DEFAULT, JOINS, LISTS, NAMES, SOLVERS, TABLES
from fxremat.solvers.time_bound import lower_bound

__all__ = [
    "CHOSEN",
    "DEFAULT",
    "EFFORT",
    "JOINS",
    "LISTS",
    "NAMES",
    "SOLVERS",
    "TABLES",
    "JoinSolution",
    "Solution",
    "best",
    "keep_all",
    "lower_bound",
    "solution",
    "solve",
]
