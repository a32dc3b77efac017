"""A lower bound on the time of any schedule of a chain, by linear programming.

The LP looks at a few instants of the step only, just before some backwards k_1 > k_2 > ... > k_p: some evenly spaced,
some that need the most memory. Between two instants lies a window. The variables are fractions from 0 to 1 of what a
schedule does entirely or not at all:

    A[l,o,i], a[l,i]     stored at instant i
    X[l,i], XA[l,o,i]    forward l has run in window i at least once; it has saved option o
    N[l,i]               how often it has run
    U[l,o]               the backward of l reads option o

    minimize      sum forward(l) N[l,i] + sum backward(l,o) U[l,o]
    stored        A[l,o,i] <= A[l,o,i-1] + XA[l,o,i],     a[l,i] <= a[l,i-1] + X[l,i]
    run           X[l,i] <= a[l-1,i-1] + sum_o A[l-1,o,i-1] + X[l-1,i],     XA[l,o,i] <= X[l,i]
    count         N[l,i] >= X[l,i],     N[l,i] >= sum_o XA[l,o,i]
    read          U[l,o] <= A[l,o,i-1] + XA[l,o,i] for the backwards l of window i,     sum_o U[l,o] = 1
    memory        phase(k_i) + d_{k_i - 1} + its scratch + a_0 + stored <= M at every instant

Every valid schedule satisfies all of these, so the least is a lower bound; the more instants, the tighter. With a link
to the host there is one instant: what is neither stored nor run again after it has been copied to the host before it
and is copied back after it, which takes bytes * (1/to_host + 1/from_host) seconds (A. Shilova's thesis, 2021, Prop. 3,
with recomputation as a third way). a_l is the output of block l, A_l what its backward reads under an option.

Ours; the relaxation is that of Checkmate (Jain et al., MLSys 2020) on few stages and with save sets.
Cost: an LP of about (3 + 2 options) n p variables, HiGHS.
"""

import numpy as np

from fxremat.chains.chain import Chain
from fxremat.chains.platform import Platform


def lower_bound(chain: Chain, mem: int, platform: Platform | None = None, *, instants: int = 16) -> float:
    """Return seconds that no schedule within `mem` bytes beats; at least `chain.least_time`.

    The result is infinite if the linear program proves that no schedule fits into `mem`. `instants`: the
    approximate number of moments at which the program limits memory.
    """
    crossing = _crossing(platform)
    n = len(chain)
    needs = {k: _need(chain, k) for k in range(1, n + 1)}
    tight = sorted(needs, key=lambda k: -needs[k])
    choices = [[n], tight[:1]]
    if crossing is None:
        even = [n - round(i * n / instants) for i in range(0, instants, 2)]
        choices.append(sorted({*even, *tight[: instants // 2]} - {0}, reverse=True))
    return max(_Program(chain, mem, marks, crossing).least() for marks in choices)


def _need(chain: Chain, block: int) -> int:
    """Return the bytes without which the backward of `block` cannot run."""
    back = min(option.saved_bytes + option.backward_scratch for option in chain.blocks[block - 1].choices)
    return chain.phase_sizes[block] + chain.grad_sizes[block - 1] + back


def _crossing(platform: Platform | None) -> float | None:
    """Return the seconds to copy a byte to the host and back; None without a link to the host."""
    if platform is None or not platform.to_host or not platform.from_host:
        return None
    return 1 / platform.to_host + 1 / platform.from_host


_Term = tuple[float, tuple[str | int, ...]]  # (factor, variable)


class _Program:
    """Builds the rows of the linear program; a variable is a tuple, and gets a column when it first occurs."""

    def __init__(self, chain: Chain, mem: int, marks: list[int], crossing: float | None) -> None:
        self.chain, self.mem, self.marks, self.crossing = chain, mem, marks, crossing
        self.columns: dict[tuple[str | int, ...], int] = {}
        self.entries: list[tuple[int, int, float]] = []
        self.limits: list[float] = []

    def least(self) -> float:
        """Return the lower bound in seconds."""
        for window in range(1, len(self.marks) + 2):
            for block in range(1, self._last(window) + 1):
                self._forward(block, window)
        for instant in range(1, len(self.marks) + 1):
            self._memory(instant)
        for block in range(1, len(self.chain) + 1):
            self._backward(block)
        self._time()
        return self._solve()

    def _last(self, window: int) -> int:
        """Return the last block whose values may still be needed in a window (the time between two moments)."""
        return len(self.chain) if window == 1 else self.marks[window - 2]

    def _options(self, block: int) -> range:
        return range(len(self.chain.blocks[block - 1].choices)) if block else range(0)

    def _at_most(self, limit: float, *terms: _Term) -> None:
        """Add the row sum of terms <= limit."""
        for factor, variable in terms:
            column = self.columns.setdefault(variable, len(self.columns))
            self.entries.append((len(self.limits), column, factor))
        self.limits.append(limit)

    def _before(self, kind: str, block: int, window: int, option: int = 0) -> list[_Term]:
        """Return negated terms of all that makes a value available when a window begins; [] for the first window.

        A window is the time between two moments at which memory is limited.
        """
        if window == 1:
            return []
        there: list[_Term] = [(-1.0, (kind, block, window - 1, option))]
        if self.crossing is not None:
            there.append((-1.0, ("host", kind, block, option)))
        return there

    def _forward(self, block: int, window: int) -> None:
        """Add the rows of the forward of `block` in a window, and of what it may leave stored at the window's end.

        A window is the time between two moments at which memory is limited.
        """
        run: _Term = (1.0, ("run", block, window))
        saves: list[_Term] = [(1.0, ("save", block, window, o)) for o in self._options(block)]
        if block > 1:
            sources = self._before("a", block - 1, window)
            for o in self._options(block - 1):
                sources += self._before("A", block - 1, window, o)
            self._at_most(0.0, run, (-1.0, ("run", block - 1, window)), *sources)
        self._at_most(0.0, run, (-1.0, ("count", block, window)))
        self._at_most(0.0, *saves, (-1.0, ("count", block, window)))
        for saving in saves:
            self._at_most(0.0, saving, (-1.0, run[1]))
        if window <= len(self.marks) and block <= self.marks[window - 1]:
            for o, (_, save) in enumerate(saves):
                stored: _Term = (1.0, ("A", block, window, o))
                self._at_most(0.0, stored, (-1.0, save), *self._device("A", block, window, o))
            stored = (1.0, ("a", block, window, 0))
            self._at_most(0.0, stored, (-1.0, run[1]), *self._device("a", block, window))
        if self.crossing is not None and window == 1:
            for o, (_, save) in enumerate(saves):
                self._at_most(0.0, (1.0, ("host", "A", block, o)), (-1.0, save))

    def _device(self, kind: str, block: int, window: int, option: int = 0) -> list[_Term]:
        return [(-1.0, (kind, block, window - 1, option))] if window > 1 else []

    def _memory(self, instant: int) -> None:
        """Limit what is stored just before a backward, together with what the backward itself needs."""
        chain, k = self.chain, self.marks[instant - 1]
        terms: list[_Term] = []
        for block in range(1, k + 1):
            for o, option in enumerate(chain.blocks[block - 1].choices):
                scratch = option.backward_scratch if block == k else 0
                terms.append((float(option.saved_bytes + scratch), ("A", block, instant, o)))
            terms.append((float(chain.output_sizes[block]), ("a", block, instant, 0)))
        held = chain.phase_sizes[k] + chain.grad_sizes[k - 1]
        if self.crossing is None:
            held += chain.input_bytes  # the first block's backward reads it in the end, and nothing brings it back
        self._at_most(float(self.mem - held), *terms)
        self._at_most(-1.0, *[(-1.0, ("A", k, instant, o)) for o in self._options(k)])
        if k > 1:
            inputs: list[_Term] = [(-1.0, ("A", k - 1, instant, o)) for o in self._options(k - 1)]
            self._at_most(-1.0, (-1.0, ("a", k - 1, instant, 0)), *inputs)

    def _backward(self, block: int) -> None:
        """Add the rows by which a backward reads one option: stored when its window began, or saved within the window.
        """
        window = 1 + sum(k >= block for k in self.marks)
        uses: list[_Term] = [(-1.0, ("use", block, o)) for o in self._options(block)]
        self._at_most(-1.0, *uses)
        for o, (_, use) in enumerate(uses):
            # memory is limited just before this backward, so the option is a stored value of that moment
            if block in self.marks:
                there: list[_Term] = [(-1.0, ("A", block, self.marks.index(block) + 1, o))]
            else:
                there = [(-1.0, ("save", block, window, o)), *self._before("A", block, window, o)]
            self._at_most(0.0, (1.0, use), *there)

    def _time(self) -> None:
        """Require the step to last at least as long as its computation, and as long as its copies."""
        compute: list[_Term] = [(-1.0, ("time",))]
        carry: list[_Term] = [(-1.0, ("time",))]
        for variable in list(self.columns):
            match variable:
                case ("count", int(block), _):
                    compute.append((self.chain.blocks[block - 1].forward_time, variable))
                case ("use", int(block), int(o)):
                    compute.append((self.chain.blocks[block - 1].choices[o].backward_time, variable))
                case ("host", kind, int(block), int(o)):
                    size = self.chain.output_sizes[block]
                    if kind == "A":
                        size = self.chain.blocks[block - 1].choices[o].saved_bytes
                    carry.append((size * (self.crossing or 0.0), variable))
        self._at_most(0.0, *compute)
        self._at_most(0.0, *carry)

    def _solve(self) -> float:
        from scipy.optimize import Bounds, LinearConstraint, milp  # imported here since it takes a second
        from scipy.sparse import coo_array

        objective = np.zeros(len(self.columns))
        objective[self.columns["time",]] = 1.0
        free = [variable[0] in ("count", "time") for variable in self.columns]
        row, column, factor = zip(*self.entries, strict=True)
        matrix = coo_array((factor, (row, column)), shape=(len(self.limits), len(self.columns)))
        found = milp(
            objective,
            constraints=LinearConstraint(matrix.tocsr(), ub=np.array(self.limits)),
            bounds=Bounds(0.0, np.where(free, np.inf, 1.0)),
        )
        if found.status == 2:
            return float("inf")
        least = self.chain.least_time
        return max(least, float(found.fun) * (1 - 1e-7)) if found.status == 0 else least
