"""A slow simulator that moves time on by one second and one byte a second: what `simulate` is compared with.

All times are whole seconds, all sizes whole bytes, and both directions of the link copy one byte a second.
"""

from dataclasses import dataclass, field

from fxremat.chains.chain import Chain
from fxremat.chains.schedule import Backward, Drop, Forward, Keep, Offload, Prefetch, Schedule, Value


@dataclass(eq=False)
class Item:
    """One copy of a value on the device; ops are numbered from 0, and a token belongs to the op after it."""

    size: int
    option: int
    by_op: int | None = None  # the op that makes it
    pre: int | None = None  # the token that brings it
    off: int | None = None
    reads: list[int] = field(default_factory=list)
    closed: float = float("inf")  # not there any more when this op runs; j + .5: op j closes it
    first: float = float("inf")  # the first op that needs it there


class Stuck(Exception):
    """Nothing can proceed."""


def tick(
    chain: Chain,
    schedule: Schedule,
    limit: float,
    *,
    fluid: bool,
    half: bool = False,
    synchronized: bool = False,
) -> tuple[int, float]:
    """Time and peak of a valid schedule. Raises `Stuck`.

    With `synchronized`, copies to the host end before the first backward starts, and only then others start.
    """
    world = _World(chain, schedule, limit, fluid, half, synchronized)
    while not world.settle():
        world.second()
    return world.time, world.peak


class _World:
    def __init__(self, chain, schedule, limit, fluid, half, synchronized):
        self.ops, self.tokens, items, self.source = _follow(chain, schedule)
        self.items = items
        self.of = {i.pre: i for i in items if i.pre is not None} | {
            i.off: i for i in items if i.off is not None
        }
        self.offs = [token for token, op in enumerate(schedule.ops) if isinstance(op, Offload)]
        self.pres = [token for token, op in enumerate(schedule.ops) if isinstance(op, Prefetch)]
        # first in, first out: a copy is due no later than those behind it
        self.due = {token: min(self.of[t].first for t in self.pres if t >= token) for token in self.pres}
        self.phases, self.n = chain.phase_sizes, len(chain)
        self.limit, self.fluid, self.half = limit, fluid, half
        self.synchronized = synchronized
        self.turn = min(op for op, (kind, *_) in enumerate(self.ops) if kind == "B")
        self.moved: dict[int, int] = {}  # token -> bytes
        self.running, self.left, self.ended = (
            False,
            0,
            0,
        )  # `ended` ops have ended; if one runs, it is the next
        self.flying: dict[bool, int | None] = {True: None, False: None}  # to the host, from the host
        self.time, self.peak = 0, 0.0
        self.waiting = set(self.offs + self.pres)  # tokens not reached yet

    def done(self, token):
        return token in self.moved and self.moved[token] >= self.of[token].size

    def held(self, op):
        """The bytes that the phase before op number `op` holds."""
        return self.phases[self.n - sum(kind == "B" for kind, *_ in self.ops[:op])]

    def ahead(self, op, after):
        """Memory while an op runs or after it, if no copy to the host ends until then and none starts back."""
        total = self.held(op + after) + (0 if after else self.ops[op][2])
        for item in self.items:
            born = (item.by_op if item.pre is None else self.due[item.pre]) <= op
            if born and (op + after / 2 < item.closed or (item.off is not None and not self.done(item.off))):
                total += item.size
            elif not born and item.pre in self.moved:
                total += self.moved[item.pre] if self.fluid else item.size
        return total

    def gone(self, op):
        """Bytes that have left in part and that no op up to number `op` reads any more."""
        return sum(
            self.moved[i.off]
            for i in self.items
            if self.fluid and i.off in self.moved and not self.done(i.off) and all(r < op for r in i.reads)
        )

    def now(self):
        """Memory at this moment, with what has left in part still there."""
        total = self.held(self.ended) + (self.ops[self.ended][2] if self.running else 0)
        for item in self.items:
            if item.pre is None:
                born, size = item.by_op < self.ended + self.running, item.size
            else:
                born, size = item.pre in self.moved, self.moved.get(item.pre) if self.fluid else item.size
            if born and (self.ended < item.closed or (item.off is not None and not self.done(item.off))):
                total += size
        return total

    def see(self):
        self.peak = max(self.peak, self.now() - self.gone(self.ended))

    def room(self, token):
        """Bytes that a copy from the host may take now, beyond what it has."""
        due = self.due[token]
        places = [(op, after) for op in range(self.ended, due) for after in (0, 1)]
        if self.running:
            places.remove((self.ended, 0))
        return self.limit - max([self.now()] + [self.ahead(op, after) for op, after in places])

    def settle(self):
        """Let happen what happens in no time; whether all is over."""
        while True:
            before = self.running, self.ended, dict(self.flying), dict(self.moved)
            self.see()
            if self.running and self.left == 0:
                self.running, self.ended = False, self.ended + 1
                self.see()
            if not self.running:
                self.waiting -= {token for token, slot in self.tokens if slot <= self.ended}
            for way, token in self.flying.items():
                if token is not None and self.done(token):
                    self.flying[way] = None
            token = self.flying[False]
            if self.fluid and token is not None and self.room(token) < 1:
                self.flying[False] = None  # it pauses
            self.see()
            self.start_op()
            self.see()
            self.start_copies()
            if (self.running, self.ended, self.flying, self.moved) == before:
                break
        if self.ended == len(self.ops) and all(map(self.done, self.offs + self.pres)):
            return True
        if not self.running and set(self.flying.values()) == {None}:
            raise Stuck
        return False

    def start_op(self):
        op = self.ended
        if self.running or op == len(self.ops) or (op == self.turn and not self.turned()):
            return
        ready = all(self.done(i.pre) for i in self.items if i.pre is not None and op in [*i.reads, i.first])
        fits = all(self.ahead(op, after) - self.gone(op + after) <= self.limit for after in (0, 1))
        if ready and fits:
            self.running, self.left = True, self.ops[op][1]

    def turned(self):
        """Tell whether backwards and copies from the host may start."""
        return not self.synchronized or (self.ended >= self.turn and all(map(self.done, self.offs)))

    def start_copies(self):
        heads = []
        for queue, way in ((self.offs, True), (self.pres, False)):
            rest = [token for token in queue if not self.done(token)]
            if rest and rest[0] not in self.waiting and self.flying[way] is None:
                heads.append((rest[0], way))
        for token, way in sorted(heads):
            item = self.of[token]
            if self.half and self.flying[not way] is not None:
                continue
            if way and item.pre is not None and not self.done(item.pre):
                continue
            if not way and not (self.done(self.source[token]) and self.turned()):
                continue
            if not way and item.size and self.room(token) < (1 if self.fluid else item.size):
                continue
            self.moved.setdefault(token, 0)
            self.flying[way] = token
            self.see()

    def second(self):
        self.time += 1
        self.left -= self.running
        for token in self.flying.values():
            if token is not None:
                self.moved[token] += 1


def _follow(chain: Chain, schedule: Schedule):
    """Ops as (kind, seconds, extra bytes), slots of the tokens, items, and where each Pre comes from."""
    start = Item(chain.input_bytes, 0, by_op=-1)
    device, host, items, ops, tokens, source = {Value("a", 0): start}, {}, [start], [], [], {}

    def drop(value, when):
        item = device.pop(value, None)
        if item is not None:
            item.first = min(item.first, when // 1)
            if item.off is None:
                item.closed = when

    def use(value, op):
        item = device[value]
        item.reads.append(op)
        item.first = min(item.first, op)
        if item.off is not None:
            item.closed = op + 0.5

    def use_input(block, op):
        found = [v for v in (Value("a", block - 1), Value("A", block - 1)) if v in device]
        use(next((v for v in found if device[v].off is None), found[0]), op)

    for token, op in enumerate(schedule.ops):
        here = len(ops)
        match op:
            case Forward():
                block = chain.blocks[op.block - 1]
                use_input(op.block, here)
                all_ = op.keep is Keep.ALL
                choice = block.choices[op.option]
                value = Value("A" if all_ else "a", op.block)
                item = Item(choice.saved_bytes if all_ else block.output_bytes, op.option, by_op=here)
                drop(value, here + 0.5)
                device[value] = item
                items.append(item)
                if op.keep is Keep.NONE:
                    drop(Value("a", op.block - 1), here + 0.5)
                ops.append(
                    ("F", int(block.forward_time), choice.save_scratch if all_ else block.forward_scratch)
                )
            case Backward():
                block = chain.blocks[op.block - 1]
                choice = block.choices[device[Value("A", op.block)].option]
                use(Value("A", op.block), here)
                use_input(op.block, here)
                drop(Value("A", op.block), here + 0.5)
                drop(Value("a", op.block - 1), here + 0.5)
                extra = chain.grad_sizes[op.block - 1] + choice.backward_scratch
                ops.append(("B", int(choice.backward_time), extra))
            case Drop(value):
                drop(value, here)
            case Offload(value):
                item = device[value]
                item.off = token
                item.closed = here
                item.first = min(item.first, here)
                host[value] = item
                tokens.append((token, here))
            case Prefetch(value):
                old = host[value]
                device[value] = Item(old.size, old.option, pre=token)
                items.append(device[value])
                tokens.append((token, here))
                source[token] = old.off
    return ops, tokens, items, source
