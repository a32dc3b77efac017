"""The ways to slice a joint graph that are worth planning for a budget, the least cut first.

    parts    as many that no op needs more than a quarter of what the largest needs, or than a share of the budget;
             then four times as many; then as many as there may be
    kind     gradients made in the forward, which does no op twice; then forwards made again, which needs less
    sums     of half precision in float32; then as they are
"""

from __future__ import annotations

from collections.abc import Iterator

from fxremat.slices.rewrite import SlicedJoint, largest_need, sliced
from fxremat.step.joint import Joint

SHARE = 0.4  # of the budget that an op may need: beside it are gradients, and what is kept
FEWEST = 4  # slices that are worth it
MORE = 4  # times as many, where those were not enough


def variants(
    joint: Joint, mem: int, *, most: int, reduce: str | None, only_loss: bool = False
) -> Iterator[SlicedJoint]:
    """Joint graphs with regions in slices, each different from those before it; none where nothing can be cut."""
    need = largest_need(joint)
    first = max(1, min(int(SHARE * mem), need // FEWEST))
    wide = reduce != "same"
    ways = [(first, True, wide), (first // MORE, True, wide), (first // MORE, False, wide), (1, False, wide)]
    if reduce is None:
        ways.append((1, False, False))
    seen: set[tuple[str, ...]] = set()
    for target, inside, in_float32 in ways:
        found = sliced(joint, max(1, target), most=most, inside=inside, wide=in_float32, only_loss=only_loss)
        known = tuple(str(op.node.target) for op in found.joint.ops)
        if found.regions and known not in seen:
            seen.add(known)
            yield found


def least_of_all(joint: Joint, *, most: int, reduce: str | None, only_loss: bool = False) -> SlicedJoint:
    """The joint graph with as many slices as there may be, for the least memory."""
    return sliced(joint, 1, most=most, wide=reduce == "fp32", only_loss=only_loss)
