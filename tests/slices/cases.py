"""Ops on small tensors, at least one for every rule of `fxremat.slices.rules`, with the ways that are known by hand.

A way is written as the parts of its inputs, in the order of the arguments, then those of its outputs:

    "1 whole -> 1"    the first input is cut along the axis of `outer` 1, the second is whole, the output is cut
    "6 1 -> sum"      both are cut, and the results of the slices are added up
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

aten = torch.ops.aten
DRAW = torch.Generator().manual_seed(0)
HIGH, LOW, HALF = torch.float64, torch.float32, torch.bfloat16


def real(*shape: int, dtype: torch.dtype = HIGH) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=DRAW, dtype=HIGH).to(dtype)


def turned(*shape: int, dtype: torch.dtype = HIGH) -> torch.Tensor:
    """The same, the first dimension innermost in memory."""
    return real(*shape[::-1], dtype=dtype).permute(*range(len(shape))[::-1])


def gaps(*shape: int, dtype: torch.dtype = HIGH) -> torch.Tensor:
    """The same, every other element of a larger tensor."""
    return real(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., ::2]


def whole(high: int, *shape: int) -> torch.Tensor:
    """Integers below a number."""
    return torch.randint(high, shape, generator=DRAW)


def mask(*shape: int) -> torch.Tensor:
    """Booleans."""
    return torch.rand(shape, generator=DRAW) < 0.5


@dataclass(frozen=True)
class Case:
    """One op with its arguments.

    Attributes:
        ways: the exact ways for some counts; for others there may be any.
        counts: the only counts that are tried, where not all that divide a group of dimensions.
    """

    op: torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    ways: Mapping[int, set[str]] = field(default_factory=dict)
    note: str = ""
    counts: tuple[int, ...] = ()

    def __str__(self) -> str:
        shapes = ["x".join(map(str, a.shape)) for a in self.args if isinstance(a, torch.Tensor)]
        return "-".join([str(self.op).removeprefix("aten."), *shapes, *filter(None, [self.note])])


NO: set[str] = set()
CASES: list[Case] = []


def case(
    op: Any, *args: Any, ways: Any = None, note: str = "", counts: tuple[int, ...] = (), **kwargs: Any
) -> None:
    """Add a case to the table."""
    CASES.append(Case(op, args, kwargs, ways or {}, note, counts))


# Pointwise.
x234 = real(2, 3, 4)
case(
    aten.add.Tensor,
    x234,
    real(2, 3, 4),
    ways={
        2: {"1 1 -> 1", "2 2 -> 2", "6 6 -> 6"},
        6: {"1 1 -> 1", "2 2 -> 2"},
        4: {"1 1 -> 1", "2 2 -> 2", "6 6 -> 6"},
    },
)
case(aten.add.Tensor, x234, x234, note="with itself")
case(aten.add.Tensor, x234, turned(2, 3, 4), alpha=2)
case(aten.mul.Tensor, turned(2, 3, 4), turned(2, 3, 4), note="turned")
case(
    aten.mul.Tensor,
    real(5, 7),
    real(7),
    ways={5: {"1 whole -> 1"}, 7: {"5 1 -> 5"}, 35: NO},
    counts=(5, 7, 35),
)
case(aten.mul.Tensor, real(5, 7), real(5, 1), ways={5: {"1 1 -> 1"}, 7: {"5 whole -> 5"}})
case(
    aten.mul.Tensor,
    real(4, 1, 3),
    real(2, 1),
    ways={2: {"1 whole -> 1", "whole 1 -> 4"}, 8: NO, 3: {"4 whole -> 8"}},
)
case(aten.mul.Tensor, real(2, 3, 4), real(1, 3, 4), ways={3: {"2 1 -> 2"}, 6: {"2 1 -> 2"}, 12: {"2 1 -> 2"}})
case(aten.mul.Tensor, real(), real(3, 4), ways={3: {"whole 1 -> 1"}})
case(aten.mul.Scalar, gaps(5, 6), 3)
case(
    aten.add.Tensor,
    real(6, 4),
    real(2, 6, 4),
    note="more dimensions",
    ways={2: {"whole 1 -> 1", "1 2 -> 2", "6 12 -> 12"}},
)
case(aten.sub.Tensor, real(1, 5, 3), 1.5, ways={5: {"1 -> 1"}, 3: {"1 -> 1", "5 -> 5"}})
case(aten.pow.Tensor_Scalar, real(5, 3), 2)
case(aten.rsub.Scalar, real(5, 3), 2)
case(aten.div.Tensor_mode, real(5, 3), real(3), rounding_mode="floor")
case(aten.where.self, mask(5, 1), real(5, 3), real(3), ways={5: {"1 1 whole -> 1"}, 3: {"whole 5 1 -> 5"}})
case(
    aten.where.self,
    mask(2, 1, 3),
    real(2, 4, 3),
    real(),
    ways={2: {"1 1 whole -> 1", "whole 2 whole -> 2"}, 4: {"whole 2 whole -> 2"}},
)
case(aten.masked_fill.Scalar, real(2, 3, 5, 5), mask(5, 5), float("-inf"), counts=(2, 3, 5, 6))
case(aten.masked_fill.Tensor, real(2, 3, 4), mask(2, 1, 4), real())
case(aten.clamp.default, real(5, 3), -0.5, None)
case(aten.clamp.Tensor, real(5, 3), real(3), real(5, 1))
case(aten.gelu.default, turned(5, 3))
case(aten.gelu_backward.default, real(5, 3), real(5, 3), approximate="tanh")
case(aten.threshold_backward.default, real(7, 3), gaps(7, 3), 0)
case(aten.silu.default, real(7, 3, dtype=LOW))
case(
    aten.native_dropout_backward.default,
    real(2, 3, 4),
    mask(2, 3, 4),
    1.25,
    ways={6: {"1 1 -> 1", "2 2 -> 2"}},
)
case(aten._to_copy.default, turned(2, 3, 4), dtype=LOW)
case(aten._to_copy.default, real(2, 3, 4, dtype=HALF), dtype=HIGH)
case(aten.clone.default, turned(5, 3))
case(aten.clone.default, real(4, 2, 3, 3), memory_format=torch.channels_last, counts=(2, 4, 8, 9))
case(aten.clone.default, turned(4, 2, 3), memory_format=torch.contiguous_format)
case(aten.detach.default, real(5, 3))
case(aten.alias.default, gaps(5, 3))
case(aten.lift_fresh_copy.default, real(5, 3))
case(aten.contiguous.default, real(5, 3))
case(aten.full_like.default, turned(5, 3), 2.5, dtype=LOW)
case(aten.zeros_like.default, real(5, 3))
case(aten.ones_like.default, real(2, 3, 4))
case(aten.empty_like.default, real(5, 3))
case(aten.bitwise_and.Tensor, mask(5, 3), mask(3))
case(aten.addcmul.default, real(5, 3), real(5, 1), real(1, 3), value=2)
case(aten.lerp.Tensor, real(5, 3), real(5, 3), real(3))

# Views.
case(
    aten.view.default,
    real(6, 4),
    [2, 3, 4],
    ways={6: {"1 -> 1"}, 2: {"1 -> 1", "6 -> 6"}, 3: {"1 -> 1"}, 24: {"1 -> 1"}},
)
case(aten.view.default, real(2, 3, 4), [6, 4], ways={3: {"1 -> 1"}, 12: {"1 -> 1"}})
case(aten.view.default, real(2, 3, 4), [2, 12], ways={3: {"1 -> 1", "2 -> 2"}, 4: {"1 -> 1", "2 -> 2"}})
case(aten.view.default, gaps(2, 3, 4), [2, 3, 2, 2])
case(aten._unsafe_view.default, real(10, 3), [2, 5, 3], ways={5: {"1 -> 1"}, 3: {"1 -> 1", "10 -> 10"}})
case(aten.reshape.default, turned(2, 3, 4), [6, 4])
case(aten.reshape.default, turned(4, 6), [-1])
case(aten._reshape_alias.default, real(6, 4), [2, 3, 4], [12, 4, 1])
case(aten.unsqueeze.default, turned(5, 3), 1, ways={5: {"1 -> 1"}, 3: {"1 -> 1", "5 -> 5"}})
case(aten.squeeze.dim, real(5, 1, 3), 1)
case(aten.squeeze.default, gaps(1, 5, 1, 3))
case(aten.squeeze.dims, real(1, 5, 1, 3), [0, 2])
case(aten.flatten.using_ints, real(2, 3, 4), 0, 1)
case(aten.unflatten.int, real(6, 4), 0, [2, 3])
case(
    aten.view.dtype,
    real(4, 6, dtype=LOW),
    torch.int32,
    ways=dict.fromkeys((2, 3, 4, 6, 24), NO),
    note="another type",
)
case(aten.t.default, real(5, 3), ways={5: {"1 -> 3"}, 3: {"5 -> 1"}, 15: NO})
case(aten.transpose.int, real(2, 3, 4), 1, 2, ways={2: {"1 -> 1", "6 -> 2"}, 3: {"2 -> 8"}, 4: {"6 -> 2"}})
case(aten.transpose.int, turned(2, 3, 5), -1, 0)
case(
    aten.permute.default,
    real(2, 3, 4, 5),
    [2, 0, 1, 3],
    ways={6: {"1 -> 4"}, 3: {"1 -> 4", "2 -> 8"}},
    counts=(2, 3, 4, 5, 6),
)
case(aten.permute.default, real(2, 3, 5), [-1, 0, 1])
case(aten.expand.default, real(5, 1), [5, 3], ways={5: {"1 -> 1"}, 3: {"whole -> 5"}, 15: NO})
case(
    aten.expand.default,
    real(5, 1, 3),
    [2, -1, 4, -1],
    ways={5: {"1 -> 2"}, 2: {"whole -> 1", "whole -> 10"}, 3: {"5 -> 40"}},
    counts=(2, 3, 4, 5, 10),
)
case(aten.expand.default, real(), [4, 3])

# Fills.
case(aten.full.default, [4, 3], 2.5, dtype=HIGH, ways={4: {" -> 1"}, 3: {" -> 1", " -> 4"}})
case(aten.zeros.default, [4, 3], dtype=HIGH)
case(aten.ones.default, [2, 3, 4])
case(aten.empty.memory_format, [4, 3])

# Matrix products.
MM = {
    2: {"1 whole -> 1", "6 1 -> sum", "whole 4 -> 6"},
    4: {"6 1 -> sum", "whole 4 -> 6"},
    6: {"1 whole -> 1"},
    3: {"1 whole -> 1"},
    8: {"whole 4 -> 6"},
}
case(aten.mm.default, real(6, 4), real(4, 8), ways=MM)
case(aten.mm.default, turned(6, 4), turned(4, 8), ways=MM, note="turned")
case(
    aten.mm.default,
    real(5, 7),
    gaps(7, 3),
    ways={5: {"1 whole -> 1"}, 7: {"5 1 -> sum"}, 3: {"whole 7 -> 5"}},
)
x44 = real(4, 4)
case(aten.mm.default, x44, x44, ways={2: NO, 4: NO}, note="with itself")
case(
    aten.addmm.default,
    real(8),
    real(6, 4),
    real(4, 8),
    ways={6: {"whole 1 whole -> 1"}, 8: {"1 whole 4 -> 6"}, 4: {"1 whole 4 -> 6"}},
)
case(
    aten.addmm.default,
    real(6, 8),
    real(6, 4),
    turned(4, 8),
    beta=2,
    alpha=3,
    ways={3: {"1 1 whole -> 1"}, 8: {"6 whole 4 -> 6"}},
)
case(
    aten.addmm.default,
    real(6, 1),
    real(6, 4),
    real(4, 5),
    ways={5: {"whole whole 4 -> 6"}, 6: {"1 1 whole -> 1"}},
)
case(aten.addmm.default, x44, x44, x44, note="with itself", ways={4: NO})
case(
    aten.bmm.default,
    real(2, 3, 5),
    real(2, 5, 7),
    ways={2: {"1 1 -> 1"}, 3: {"2 whole -> 2"}, 7: {"whole 10 -> 6"}, 5: {"6 2 -> sum"}},
    counts=(2, 3, 5, 7),
)
case(aten.bmm.default, turned(2, 3, 5), turned(2, 5, 7), counts=(2, 3, 5, 7))
x233 = real(2, 3, 3)
case(aten.bmm.default, x233, x233, note="with itself", ways={2: {"1 -> 1"}, 3: NO})
case(
    aten.baddbmm.default,
    real(2, 1, 7),
    real(2, 3, 5),
    real(2, 5, 7),
    ways={2: {"1 1 1 -> 1"}, 3: {"whole 2 whole -> 2"}, 7: {"2 whole 10 -> 6"}, 5: NO},
    counts=(2, 3, 5, 7),
)
case(aten.baddbmm.default, real(7), real(2, 3, 5), real(2, 5, 7), beta=2, counts=(2, 3, 5, 7))

# Along a dimension.
ROWS = {2: {"1 -> 1"}, 3: {"1 -> 1", "2 -> 2"}, 6: {"1 -> 1"}, 5: NO, 10: NO, 15: NO}
case(aten._softmax.default, real(2, 3, 5), -1, False, ways=ROWS)
case(aten._softmax.default, turned(2, 3, 5), 2, False, ways=ROWS)
case(
    aten._softmax.default,
    real(2, 3, 5),
    0,
    False,
    ways={2: NO, 3: {"2 -> 2"}, 5: {"6 -> 6", "2 -> 2"}, 15: {"2 -> 2"}, 6: NO, 10: NO},
    note="the first",
)
case(aten._softmax.default, real(10, 3), 1, False, ways={5: {"1 -> 1"}, 2: {"1 -> 1"}}, note="two to a row")
case(aten._log_softmax.default, gaps(7, 5), 1, False, ways={7: {"1 -> 1"}, 5: NO})
case(aten._log_softmax.default, real(2, 3, 5), 1, False, ways={3: NO, 2: {"1 -> 1"}, 5: {"6 -> 6"}})
soft = torch.softmax(real(2, 3, 5), 1)
case(
    aten._softmax_backward_data.default,
    real(2, 3, 5),
    soft,
    1,
    HIGH,
    ways={3: NO, 6: NO, 2: {"1 1 -> 1"}, 5: {"6 6 -> 6"}},
)
case(
    aten._log_softmax_backward_data.default,
    turned(7, 5),
    torch.log_softmax(real(7, 5), 1),
    -1,
    HIGH,
    ways={7: {"1 1 -> 1"}, 5: NO},
)
case(aten.cumsum.default, real(2, 3, 5), 1, ways={3: NO, 2: {"1 -> 1"}})
case(aten.cumprod.default, real(5, 3), 0, ways={5: NO, 3: {"5 -> 5"}})
case(aten.logcumsumexp.default, real(5, 3), -1, ways={3: NO})
case(aten.sort.default, real(2, 3, 5), 1, True, ways={3: NO, 5: {"6 -> 6 6"}})
case(aten.sort.stable, whole(3, 5, 7), stable=True, dim=1, ways={7: NO, 5: {"1 -> 1 1"}})
case(aten.flip.default, real(2, 3, 4), [0, -1], ways={2: NO, 4: NO, 3: {"2 -> 2"}, 6: NO})

# Normalizations.
shown, weight, bias = real(2, 3, 4), real(4), real(4)
case(
    aten.native_layer_norm.default,
    shown,
    [4],
    weight,
    bias,
    1e-5,
    ways={2: {"1 whole whole -> 1 1 1"}, 6: {"1 whole whole -> 1 1 1"}, 4: NO, 12: NO},
)
case(
    aten.native_layer_norm.default,
    turned(7, 2, 3),
    [2, 3],
    None,
    None,
    1e-5,
    ways={7: {"1 -> 1 1 1"}, 2: NO, 3: NO, 6: NO},
)
for forms in ([True] * 3, [True, False, True], [False, True, True]):
    _, mean, rstd = aten.native_layer_norm(shown, [4], weight, bias, 1e-5)
    parts = {"1 1 1 1 whole whole -> 1 sum sum"}
    case(
        aten.native_layer_norm_backward.default,
        real(2, 3, 4),
        shown,
        [4],
        mean,
        rstd,
        weight,
        bias,
        forms,
        ways={2: parts, 3: parts | {"2 2 2 2 whole whole -> 2 sum sum"}, 6: parts, 4: NO},
        note=str(sum(forms)),
    )
case(
    aten.native_layer_norm_backward.default,
    turned(2, 3, 4),
    shown,
    [4],
    mean,
    rstd,
    weight,
    bias,
    [True] * 3,
    note="turned",
)
case(aten.rms_norm.default, shown, [4], weight, 1e-6, ways={6: {"1 whole -> 1"}, 4: NO})
out, rstd = aten._fused_rms_norm(shown, [4], weight, 1e-6)
case(aten._fused_rms_norm.default, shown, [4], weight, 1e-6, ways={6: {"1 whole -> 1 1"}, 4: NO})
images = real(6, 4, 3, 3)
_, mean, rstd = aten.native_group_norm(images, real(4), real(4), 6, 4, 9, 2, 1e-5)
case(
    aten.native_group_norm.default,
    images,
    real(4),
    real(4),
    6,
    4,
    9,
    2,
    1e-5,
    ways={2: {"1 whole whole -> 1 1 1"}, 6: {"1 whole whole -> 1 1 1"}, 4: NO, 9: NO},
)
case(aten.native_group_norm.default, images, None, None, 6, 4, 9, 2, 1e-5, ways={3: {"1 -> 1 1 1"}})
normalized = (real(6, 4, 3, 3), images, mean, rstd, real(4), 6, 4, 9, 2)
case(
    aten.native_group_norm_backward.default,
    *normalized,
    [True] * 3,
    ways={6: {"1 1 1 1 whole -> 1 sum sum"}, 4: NO},
)
case(
    aten.native_group_norm_backward.default,
    *normalized,
    [False, True, True],
    note="no input",
)

# Losses.
logits, target = real(6, 5), torch.tensor([0, 3, -100, 4, 1, 1])
LOSS = {6: {"1 1 -> 1 whole"}, 3: {"1 1 -> 1 whole"}, 5: NO}
case(aten.nll_loss_forward.default, logits, target, None, 0, -100, ways=LOSS)
case(aten.nll_loss_forward.default, logits, target, real(5), 0, -100, ways={6: {"1 1 whole -> 1 whole"}})
case(aten.nll_loss_forward.default, logits, target, None, 1, -100, ways={6: NO, 3: NO, 5: NO}, note="mean")
case(
    aten.nll_loss_backward.default,
    real(6),
    logits,
    target,
    real(5),
    0,
    -100,
    real(),
    ways={6: {"1 1 1 whole whole -> 1"}},
)
total = torch.tensor(5.0, dtype=HIGH)
for reduction in (1, 2):
    case(
        aten.nll_loss_backward.default,
        real(),
        logits,
        target,
        None,
        reduction,
        -100,
        total,
        ways={6: {"whole 1 1 whole -> 1"}, 5: NO},
    )
maps, places = real(4, 5, 2, 3), whole(5, 4, 2, 3)
case(
    aten.nll_loss2d_forward.default,
    maps,
    places,
    None,
    0,
    -100,
    ways={4: {"1 1 -> 1 whole"}, 5: NO, 6: NO, 3: NO},
)
case(
    aten.nll_loss2d_backward.default,
    real(4, 2, 3),
    maps,
    places,
    None,
    0,
    -100,
    total,
    ways={4: {"1 1 1 whole -> 1"}},
)
case(
    aten.nll_loss2d_backward.default,
    real(),
    maps,
    places,
    real(5),
    1,
    -100,
    total,
    ways={4: {"whole 1 1 whole whole -> 1"}},
)

square_losses = (
    (aten.mse_loss, aten.mse_loss_backward, ()),
    (aten.smooth_l1_loss, aten.smooth_l1_loss_backward, (0.5,)),
    (aten.huber_loss, aten.huber_loss_backward, (0.5,)),
    (aten.soft_margin_loss, aten.soft_margin_loss_backward, ()),
)
ALIKE = {2: {"1 1 -> 1"}, 5: {"1 1 -> 1", "2 2 -> 2"}, 10: {"1 1 -> 1"}}
ALL_THREE = {2: {"1 1 1 -> 1"}, 5: {"1 1 1 -> 1", "2 2 2 -> 2"}}
ONE_GRADIENT = {2: {"whole 1 1 -> 1"}, 5: {"whole 1 1 -> 1", "whole 2 2 -> 2"}}
NEVER_CUT = dict.fromkeys((2, 5, 10), NO)
for loss, back, more in square_losses:
    pair = real(2, 5), real(2, 5)
    for reduction, parts in ((0, ALIKE), (1, NEVER_CUT), (2, NEVER_CUT)):
        case(loss.default, *pair, reduction, *more, ways=parts, note=f"reduction {reduction}")
    case(back.default, real(2, 5), *pair, 0, *more, ways=ALL_THREE, note="none")
    case(back.default, real(), *pair, 2, *more, ways=ONE_GRADIENT, note="sum")
    case(back.default, real(), *pair, 1, *more, ways=NEVER_CUT, note="mean")
chances, truths = torch.sigmoid(real(2, 5)), mask(2, 5).to(HIGH)
case(aten.binary_cross_entropy.default, chances, truths, None, 0, ways=ALIKE)
case(aten.binary_cross_entropy.default, chances, truths, real(5), 0, ways={2: {"1 1 whole -> 1"}})
case(aten.binary_cross_entropy.default, chances, truths, None, 1, ways=NEVER_CUT, note="mean")
case(aten.binary_cross_entropy_backward.default, real(2, 5), chances, truths, None, 0, ways=ALL_THREE)
case(aten.binary_cross_entropy_backward.default, real(), chances, truths, None, 2, ways=ONE_GRADIENT)

# Reductions.
case(
    aten.sum.default,
    real(2, 3, 4),
    ways={2: {"1 -> sum", "2 -> sum", "6 -> sum"}, 6: {"1 -> sum", "2 -> sum"}, 12: {"1 -> sum", "2 -> sum"}},
    dtype=HIGH,
)
case(aten.sum.default, mask(5, 3), note="booleans")
case(
    aten.sum.dim_IntList,
    real(2, 3, 5),
    [1],
    ways={2: {"1 -> 1"}, 3: {"2 -> sum"}, 5: {"6 -> 2"}, 6: NO, 15: NO},
)
case(aten.sum.dim_IntList, real(2, 3, 5), [0, 1], True, ways={6: {"1 -> sum"}, 5: {"6 -> 1"}, 10: NO})
case(aten.sum.dim_IntList, turned(2, 3, 5), [-1], ways={6: {"1 -> 1"}, 5: {"6 -> sum"}})
case(aten.sum.dim_IntList, real(5, 3), [], note="all", ways={5: {"1 -> sum"}, 3: {"1 -> sum", "5 -> sum"}})
ONE = {2: {"1 -> 1"}, 3: NO, 5: {"6 -> 2"}, 6: NO}
for reduce in (aten.amax, aten.amin, aten.logsumexp):
    case(reduce.default, real(2, 3, 5), [1], ways=ONE)
    case(reduce.default, turned(2, 3, 5), [2], True, ways={6: {"1 -> 1"}, 5: NO})
case(aten.mean.dim, real(2, 3, 5), [1], ways=ONE)
case(aten.mean.default, real(2, 3, 5), ways=dict.fromkeys((2, 3, 5, 6), NO))
case(aten.var.correction, real(2, 3, 5), [1], correction=0, ways=ONE)
case(aten.std.correction, real(2, 3, 5), [1], correction=1, ways=ONE)
case(
    aten.var_mean.correction, real(2, 3, 5), [1], correction=1, ways={2: {"1 -> 1 1"}, 3: NO, 5: {"6 -> 2 2"}}
)
for reduce in (aten.any, aten.all):
    case(reduce.dim, mask(2, 3, 5), 1, ways=ONE)
    case(reduce.default, mask(2, 3, 5), ways=dict.fromkeys((2, 3, 5, 6), NO))
for reduce in (aten.argmax, aten.argmin):
    case(reduce.default, real(2, 3, 5), 1, ways=ONE)
    case(reduce.default, real(2, 3, 5), ways=dict.fromkeys((2, 3, 5, 6), NO))
case(aten.prod.dim_int, real(2, 3, 5), 1, ways=ONE)
for reduce in (aten.max, aten.min):
    case(reduce.dim, real(2, 3, 5), 1, ways={2: {"1 -> 1 1"}, 3: NO, 5: {"6 -> 2 2"}})
    case(reduce.default, real(5, 3), ways={5: NO, 3: NO})
case(aten.topk.default, real(2, 7, 5), 3, 1, ways={2: {"1 -> 1 1"}, 7: NO, 5: {"14 -> 6 6"}, 3: NO})
case(aten.topk.default, real(5, 3), 2, ways={5: {"1 -> 1 1"}, 3: NO})
case(aten.topk.default, real(7, 6), 6, 0, ways={6: {"7 -> 6 6"}, 7: NO}, note="as many as columns")
case(aten.linalg_vector_norm.default, real(2, 3, 5), 2, [1], ways=ONE)
case(aten.linalg_vector_norm.default, real(5, 3), 2, ways={5: NO, 3: NO})

# Rows that are looked up.
case(aten.gather.default, real(5, 7), 1, whole(7, 5, 2), ways={5: {"1 1 -> 1"}, 7: NO, 2: NO})
case(aten.gather.default, real(5, 7), 1, whole(7, 3, 2), ways={5: NO, 3: NO}, note="fewer rows")
case(
    aten.gather.default,
    turned(2, 3, 5),
    2,
    whole(5, 2, 3, 1),
    ways={6: {"1 1 -> 1"}, 3: {"1 1 -> 1", "2 2 -> 2"}, 5: NO},
)
case(aten.gather.default, real(3, 5), 0, whole(3, 2, 5), ways={5: {"3 2 -> 2"}, 3: NO, 2: NO})
case(aten.scatter.value, real(5, 7), 1, whole(7, 5, 2), 3.5, ways={5: {"1 1 -> 1"}, 7: NO})
columns = torch.stack([torch.randperm(7, generator=DRAW)[:2] for _ in range(5)])
case(aten.scatter.src, real(5, 7), 1, columns, real(5, 3), ways={5: {"1 1 1 -> 1"}, 7: NO})
case(aten.scatter_add.default, real(5, 7), 1, whole(7, 5, 2), real(5, 2), ways={5: {"1 1 1 -> 1"}, 7: NO})
case(
    aten.scatter_add.default,
    real(2, 3, 7),
    2,
    whole(7, 2, 3, 4),
    real(2, 3, 4),
    ways={6: {"1 1 1 -> 1"}, 7: NO},
)
case(aten.index_select.default, real(5, 7), 1, whole(7, 3), ways={5: {"1 whole -> 1"}, 7: NO, 3: NO})
case(aten.index_select.default, real(5, 7), 0, whole(5, 3), ways={7: {"5 whole -> 3"}, 5: NO, 3: NO})
case(aten.index.Tensor, real(5, 3, 4), [None, whole(3, 6)], ways={5: {"1 whole -> 1"}, 4: NO, 3: NO})
case(
    aten.index.Tensor,
    real(2, 5, 3, 4),
    [None, None, whole(3, 2, 2), whole(4, 2)],
    ways={10: {"1 whole whole -> 1"}, 3: NO, 4: NO},
    counts=(3, 4, 5, 10),
)
case(aten.index.Tensor, real(5, 3), [whole(5, 4)], ways={5: NO, 3: NO, 4: NO})
case(aten.index.Tensor, real(5, 3, 4), [whole(5, 2), None, whole(4, 2)], ways={5: NO, 3: NO}, note="apart")
square = whole(3, 3, 3)
case(aten.index.Tensor, square, [None, square], ways={3: NO}, note="with itself")
case(
    aten.embedding.default,
    real(9, 4),
    whole(9, 2, 3),
    1,
    ways={6: {"whole 1 -> 1"}, 2: {"whole 1 -> 1"}, 9: NO, 4: NO},
)
case(
    aten.embedding_dense_backward.default,
    real(2, 3, 4),
    whole(9, 2, 3),
    9,
    1,
    False,
    ways={6: {"1 1 -> sum"}, 4: NO},
)
case(
    aten.embedding_dense_backward.default,
    real(5, 4),
    whole(9, 5),
    9,
    -1,
    True,
    ways={5: NO},
    note="by frequency",
)

# Parts of tensors.
case(aten.select.int, real(2, 3, 5), 1, 2, ways={2: {"1 -> 1"}, 3: NO, 5: {"6 -> 2"}, 6: NO})
case(aten.select.int, turned(2, 3, 5), -1, 0, ways={6: {"1 -> 1"}, 5: NO})
case(aten.select.int, real(2, 3, 5), 0, 1, ways={15: {"2 -> 1"}, 2: NO, 3: {"2 -> 1"}})
case(aten.slice.Tensor, real(2, 7, 5), 1, 2, 6, ways={2: {"1 -> 1"}, 7: NO, 5: {"14 -> 8"}, 4: NO})
case(aten.slice.Tensor, real(2, 3, 8), -1, 1, 8, 2, ways={6: {"1 -> 1"}, 8: NO})
case(
    aten.slice_backward.default,
    real(2, 4, 5),
    [2, 7, 5],
    1,
    2,
    6,
    1,
    ways={2: {"1 -> 1"}, 7: NO, 5: {"8 -> 14"}},
)
case(aten.slice_backward.default, real(2, 3, 2), [2, 3, 8], 2, 0, 2, 1, ways={6: {"1 -> 1"}})
case(aten.select_backward.default, real(2, 5), [2, 3, 5], 1, 2, ways={2: {"1 -> 1"}, 3: NO, 5: {"2 -> 6"}})
case(aten.select_backward.default, real(2, 3), [2, 3, 5], -1, 2, ways={6: {"1 -> 1"}, 5: NO})
case(aten.split.Tensor, real(5, 8), 3, 1, ways={5: {"1 -> 1 1 1"}, 8: NO})
case(aten.split.Tensor, real(5, 8), 2, ways={5: NO, 8: {"5 -> 2 2 1"}})
case(aten.split_with_sizes.default, real(2, 3, 9), [4, 5], -1, ways={6: {"1 -> 1 1"}, 9: NO})
case(aten.unbind.int, real(2, 3, 5), 1, ways={2: {"1 -> 1 1 1"}, 5: {"6 -> 2 2 2"}, 3: NO})
joined = real(5, 3)
case(aten.cat.default, [joined, turned(5, 4)], 1, ways={5: {"1 1 -> 1"}, 3: NO, 4: NO, 7: NO})
case(aten.cat.default, [joined, real(2, 3)], ways={3: {"5 2 -> 7"}, 5: NO, 7: NO})
case(aten.cat.default, [joined, joined], -1, note="twice")
case(aten.stack.default, [joined, real(5, 3)], 1, ways={5: {"1 1 -> 1"}, 3: {"5 5 -> 10"}, 2: NO})
case(aten.stack.default, [joined, gaps(5, 3)], -1, ways={15: {"1 1 -> 1"}, 2: NO})
case(aten.stack.default, [joined, gaps(5, 3)], ways={15: {"1 1 -> 2"}, 2: NO})
case(
    aten.slice_scatter.default,
    real(2, 7, 5),
    real(2, 4, 5),
    1,
    2,
    6,
    ways={2: {"1 1 -> 1"}, 5: {"14 8 -> 14"}, 7: NO},
)
case(
    aten.select_scatter.default,
    real(2, 7, 5),
    real(2, 5),
    1,
    3,
    ways={2: {"1 1 -> 1"}, 5: {"14 2 -> 14"}, 7: NO},
)
case(aten.constant_pad_nd.default, real(2, 3, 4), [1, 2], 1.5, ways={6: {"1 -> 1"}, 4: NO, 7: NO})
case(
    aten.constant_pad_nd.default,
    real(2, 3, 4),
    [0, 0, 1, -1],
    ways={2: {"1 -> 1", "6 -> 6"}, 3: NO, 4: {"6 -> 6"}},
)

# Convolutions.
BATCH = {2: {"1 whole whole -> 1"}, 6: {"1 whole whole -> 1"}, 4: NO, 3: {"1 whole whole -> 1"}, 5: NO}
kernel = real(5, 4, 3, 3)
STEP = ([1, 1], [1, 1], [1, 1])
case(aten.convolution.default, real(6, 4, 5, 5), kernel, real(5), *STEP, False, [0, 0], 1, ways=BATCH)
case(
    aten.convolution.default,
    real(7, 4, 6),
    real(2, 2, 3),
    None,
    [2],
    [0],
    [1],
    False,
    [0],
    2,
    ways={7: {"1 whole -> 1"}},
)
case(
    aten.convolution.default,
    real(6, 4, 3, 3),
    real(4, 5, 2, 2),
    None,
    [2, 2],
    [0, 0],
    [1, 1],
    True,
    [0, 0],
    1,
    ways={6: {"1 whole -> 1"}},
)
same = real(4, 4, 3, 3)
case(
    aten.convolution.default,
    same,
    same,
    None,
    *STEP,
    False,
    [0, 0],
    1,
    ways={2: NO, 4: NO},
    note="with itself",
)
for forms in ([True] * 3, [False, True, True], [True, False, False]):
    case(
        aten.convolution_backward.default,
        real(6, 5, 5, 5),
        real(6, 4, 5, 5),
        kernel,
        [5],
        *STEP,
        False,
        [0, 0],
        1,
        forms,
        ways={6: {"1 1 whole -> " + ("1" if forms[0] else "whole") + " sum sum"}, 5: NO, 4: NO},
        note=str(forms.index(True)),
    )

# By batch: what lies beside the batch is as small as the op allows.
BY = {2: {"1 -> 1"}, 4: {"1 -> 1"}, 3: NO, 5: NO}
WITH = {2: {"1 1 -> 1"}, 4: {"1 1 -> 1"}, 3: NO}
pictures, cubes, lines = real(4, 2, 6, 6), real(4, 2, 4, 4, 4), real(4, 2, 5)
case(aten.max_pool2d_with_indices.default, pictures, [2, 2], [2, 2], ways={2: {"1 -> 1 1"}, 3: NO, 6: NO})
_, kept = aten.max_pool2d_with_indices(pictures, [2, 2], [2, 2])
case(
    aten.max_pool2d_with_indices_backward.default,
    real(4, 2, 3, 3),
    pictures,
    [2, 2],
    [2, 2],
    [0, 0],
    [1, 1],
    False,
    kept,
    ways={2: {"1 1 1 -> 1"}, 3: NO},
)
case(aten.max_pool3d_with_indices.default, cubes, [2, 2, 2], [2, 2, 2], ways={2: {"1 -> 1 1"}})
_, kept = aten.max_pool3d_with_indices(cubes, [2, 2, 2], [2, 2, 2])
case(
    aten.max_pool3d_with_indices_backward.default,
    real(4, 2, 2, 2, 2),
    cubes,
    [2, 2, 2],
    [2, 2, 2],
    [0, 0, 0],
    [1, 1, 1],
    False,
    kept,
    ways={4: {"1 1 1 -> 1"}},
)
case(aten.avg_pool1d.default, lines, [2], ways={4: {"1 -> 1"}, 5: NO})
case(aten.avg_pool2d.default, pictures, [2, 2], ways=BY)
case(aten.avg_pool2d.default, real(4, 6, 6), [2, 2], ways=BY, note="no batch")
case(
    aten.avg_pool2d.default,
    pictures.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    [3, 3],
    [1, 1],
    ways=BY,
    note="channels last",
)
case(
    aten.avg_pool2d_backward.default,
    real(4, 2, 3, 3),
    pictures,
    [2, 2],
    [2, 2],
    [0, 0],
    False,
    True,
    None,
    ways=WITH,
)
case(aten.avg_pool3d.default, cubes, [2, 2, 2], ways=BY)
case(
    aten.avg_pool3d_backward.default,
    real(4, 2, 2, 2, 2),
    cubes,
    [2, 2, 2],
    [2, 2, 2],
    [0, 0, 0],
    False,
    True,
    None,
    ways=WITH,
)
case(aten._adaptive_avg_pool2d.default, pictures, [3, 2], ways=BY)
case(aten._adaptive_avg_pool2d_backward.default, real(4, 2, 3, 2), pictures, ways=WITH)
case(aten._adaptive_avg_pool3d.default, cubes, [3, 2, 1], ways=BY)
case(aten._adaptive_avg_pool3d_backward.default, real(4, 2, 3, 2, 1), cubes, ways=WITH)
case(aten.adaptive_max_pool2d.default, pictures, [3, 3], ways={4: {"1 -> 1 1"}, 3: NO})
for pad, back in (
    (aten.reflection_pad2d, aten.reflection_pad2d_backward),
    (aten.replication_pad2d, aten.replication_pad2d_backward),
):
    case(pad.default, pictures, [1, 2, 0, 1], ways=BY)
    case(back.default, real(4, 2, 7, 9), pictures, [1, 2, 0, 1], ways=WITH)
case(aten.upsample_nearest1d.default, lines, [10], ways={4: {"1 -> 1"}, 5: NO})
case(aten.upsample_nearest1d_backward.default, real(4, 2, 10), [10], [4, 2, 5], ways={4: {"1 -> 1"}, 5: NO})
for up, back in (
    (aten.upsample_nearest2d, aten.upsample_nearest2d_backward),
    (aten._upsample_nearest_exact2d, aten._upsample_nearest_exact2d_backward),
):
    case(up.default, pictures, [9, 12], ways=BY)
    case(back.default, real(4, 2, 9, 12), [9, 12], [4, 2, 6, 6], ways=BY)
for up, back in (
    (aten.upsample_bilinear2d, aten.upsample_bilinear2d_backward),
    (aten.upsample_bicubic2d, aten.upsample_bicubic2d_backward),
):
    case(up.default, pictures, [9, 12], False, ways=BY)
    case(back.default, real(4, 2, 9, 12), [9, 12], [4, 2, 6, 6], False, ways=BY)
case(aten.upsample_nearest2d.vec, pictures, None, [2.0, 2.0], ways=BY)
case(aten.pixel_shuffle.default, real(4, 8, 3, 3), 2, ways={4: {"1 -> 1"}, 8: NO, 3: NO})
case(aten.pixel_shuffle.default, real(8, 3, 3), 2, ways={8: NO, 4: NO, 2: NO}, note="no batch")
case(aten.pixel_unshuffle.default, real(4, 2, 6, 6), 2, ways={4: {"1 -> 1"}, 8: NO, 3: NO})
q, k, v = (real(4, 2, 5, 8) for _ in range(3))
case(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    q,
    k,
    v,
    0.0,
    True,
    ways={2: {"1 1 1 -> 1 1"}, 5: NO, 8: NO},
)
case(
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    q,
    q,
    q,
    note="with itself",
    ways={4: {"1 -> 1 1"}},
)
ANY = ((4, "1"), (1, "whole"), (0, "whole"))  # how many masks there are, and how they are cut
for many, part in ANY:
    hides = real(many, 1, 5, 5) if many else real(5, 5)
    shown, logs = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=hides)
    case(
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        q,
        k,
        v,
        0.0,
        False,
        attn_mask=hides,
        note=f"{many} masks",
        ways={4: {f"1 1 1 {part} -> 1 1"}},
    )
    case(
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        real(4, 2, 5, 8),
        q,
        k,
        v,
        shown,
        logs,
        0.0,
        False,
        attn_mask=hides,
        note=f"{many} masks",
        ways={4: {f"1 1 1 1 1 1 {part} -> 1 1 1"}, 5: NO},
    )

NEVER: list[tuple[Case, str]] = [  # ops without any way, and what is said about them
    (
        Case(aten.native_batch_norm.default, (real(4, 3), None, None, None, None, True, 0.1, 1e-5)),
        "whole batch (BatchNorm)",
    ),
    (
        Case(
            aten._native_batch_norm_legit_functional.default,
            (real(4, 3), None, None, real(3), real(3), True, 0.1, 1e-5),
        ),
        "whole batch (BatchNorm)",
    ),
    (Case(aten.bernoulli.p, (real(4, 3), 0.5)), "(bernoulli) draws random numbers"),
    (Case(aten.native_dropout.default, (real(4, 3), 0.5, True)), "(native_dropout) draws random numbers"),
    (Case(aten.rand_like.default, (real(4, 3),)), "(rand_like) draws random numbers"),
    (Case(aten.roll.default, (real(4, 3), [1], [0])), "roll has no rule for slices"),
    (Case(torch.ops.prims.sum.default, (real(4, 3), [0])), "sum has no rule for slices"),
    (Case(aten.add_.Tensor, (real(4, 3), real(4, 3))), "add_ has no rule for slices"),
    (Case(aten.mean.default, (real(4, 3),)), "(mean) needs more than a slice"),
]


FOR_A_GPU: list[Case] = []  # ops that a CPU cannot run, of which only the ways are compared
heads, logs, seed = real(4, 2, 16, 8, dtype=HALF), real(4, 2, 16, dtype=LOW), whole(9)
many_hides, one_hides = real(4, 2, 16, 16, dtype=HALF), real(1, 2, 16, 16, dtype=HALF)
efficient, flash, cudnn = (
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_cudnn_attention,
)
ALL = [True] * 4
FOR_A_GPU += [
    Case(op.default, args, {}, {4: {f"1 1 1 {written}"}, 2: {f"1 1 1 {written}"}, 3: NO, 16: NO, 8: NO}, note)
    for op, args, written, note in (
        (efficient, (heads, heads, heads, None, True), "-> 1 1 whole whole", ""),
        (efficient, (heads, heads, heads, many_hides, True), "1 -> 1 1 whole whole", "bias"),
        (efficient, (heads, heads, heads, one_hides, True), "whole -> 1 1 whole whole", "one bias"),
        (flash, (heads, heads, heads, 0.0, True, False), "-> 1 1" + 7 * " whole", ""),
        (cudnn, (heads, heads, heads, None, True, 0.0, True), "-> 1 1" + 7 * " whole", ""),
    )
]
given = (heads, heads, heads, heads)
FOR_A_GPU += [
    Case(op.default, args, {}, {4: {reads}, 2: {reads}, 3: NO, 16: NO}, note)
    for op, args, reads, note in (
        (
            aten._scaled_dot_product_efficient_attention_backward,
            (*given, many_hides, heads, logs, seed, seed, 0.0, ALL),
            "1 1 1 1 1 1 1 whole whole -> 1 1 1 1",
            "bias",
        ),
        (
            aten._scaled_dot_product_efficient_attention_backward,
            (*given, one_hides, heads, logs, seed, seed, 0.0, [True, True, True, False]),
            "1 1 1 1 whole 1 1 whole whole -> 1 1 1 whole",
            "one bias",
        ),
        (
            aten._scaled_dot_product_flash_attention_backward,
            (*given, heads, logs, None, None, 16, 16, 0.0, True, seed, seed),
            "1 1 1 1 1 1 whole whole -> 1 1 1",
            "",
        ),
        (
            aten._scaled_dot_product_cudnn_attention_backward,
            (*given, heads, logs, seed, seed, one_hides, None, None, 16, 16, 0.0, True),
            "1 1 1 1 1 1 whole whole whole -> 1 1 1",
            "one bias",
        ),
    )
]
normed = (real(2, 3, 4), real(2, 3, 4), [4], real(2, 3, 1), real(4), [True, True])
FOR_A_GPU.append(
    Case(
        aten._fused_rms_norm_backward.default,
        normed,
        {},
        {6: {"1 1 1 whole -> 1 sum"}, 3: {"1 1 1 whole -> 1 sum", "2 2 2 whole -> 2 sum"}, 4: NO},
    )
)
