"""The ways to run regions of a joint graph in slices that are worth planning for a budget, fewest slices first.

    slices   so many that no op needs more than a quarter of what the largest op needs, nor more than a fraction of
             the budget; then four times as many; then until ops need little compared with the returned gradients
    kind     gradients computed in the forward, which runs no op twice; then forwards run again, which needs less memory
    sums     gradients of half precision that are sums over slices are accumulated in float32; then in half precision
"""

from __future__ import annotations

from collections.abc import Iterator

from fxremat.graphs.captured import Captured
from fxremat.slices.rewrite import SlicedJoint, Slicing, largest_need

SHARE = 0.4  # an op may need this fraction of the budget; the rest is for gradients and saved tensors
FEWEST = 4  # least number of slices that is worthwhile
LITTLE = 1 / 8  # an op may always need this fraction of the bytes of the returned gradients, which exist in any case
MORE = 4  # the number of slices is multiplied by this if it was too small


def variants(
    joint: Captured, mem: int, *, most: int, reduce: str | None, only_loss: bool = False
) -> Iterator[SlicedJoint]:
    """Yield joint graphs with regions in slices, all different; none if no op can run in slices.

    Args:
        mem: the budget in bytes.
        most: largest number of slices of a region.
        reduce: "same": sums of half precision are accumulated in half precision, else in float32; None: try both.
        only_loss: True: the forward returns NaN instead of large outputs besides its loss.
    """
    need = largest_need(joint)
    first = max(1, min(int(SHARE * mem), need // FEWEST))
    wide = reduce != "same"
    finest = _finest(joint)
    ways = [(first, True, wide), (first // MORE, True, wide), (first // MORE, False, wide), (finest, False, wide)]
    if reduce is None:
        ways.append((finest, False, False))
    seen: set[tuple[str, ...]] = set()
    for target, inside, in_float32 in ways:
        slicing = Slicing(target=max(finest, target), most=most, inside=inside, wide=in_float32, only_loss=only_loss)
        found = slicing.of(joint)
        known = tuple(op.target for op in found.joint.ops)
        if found.regions and known not in seen:
            seen.add(known)
            yield found


def least_of_all(joint: Captured, *, most: int, reduce: str | None, only_loss: bool = False) -> SlicedJoint:
    """Return the joint graph with as many slices as possible, for the least memory; arguments as in `variants`."""
    return Slicing(target=_finest(joint), most=most, wide=reduce == "fp32", only_loss=only_loss).of(joint)


def _finest(joint: Captured) -> int:
    """Return a size in bytes below which ops need not be sliced further."""
    return max(1, int(LITTLE * sum(joint.values[value].bytes for value in joint.returned)))
