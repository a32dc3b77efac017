"""The ways to slice a joint graph that are worth planning for a budget, those with the fewest cuts first.

    slices   as many as no op then needs more than a quarter of what the largest op needs, or than a share of the
             budget; then four times as many; then until ops need little next to the gradients that the step returns
    kind     gradients made in the forward, which runs no op twice; then forwards run again, which needs less memory
    sums     gradients of half precision that are sums over slices added up in float32; then in half precision
"""

from __future__ import annotations

from collections.abc import Iterator

from fxremat.graphs.captured import Captured
from fxremat.slices.rewrite import SlicedJoint, Slicing, largest_need

SHARE = 0.4  # share of the budget that an op may need: the rest is for gradients, and kept values
FEWEST = 4  # least number of slices that is worthwhile
LITTLE = 1 / 8  # share of the bytes of all returned gradients that an op may always need: those exist in any case
MORE = 4  # factor on the number of slices, if fewer were not enough


def variants(
    joint: Captured, mem: int, *, most: int, reduce: str | None, only_loss: bool = False
) -> Iterator[SlicedJoint]:
    """Yield joint graphs with regions in slices, each different from those before it; none if nothing can be cut.

    Args:
        mem: the budget in bytes.
        most: slices of a region at most.
        reduce: "same": sums of half precision are accumulated in their own type, else in float32; None: try both.
        only_loss: the forward returns NaN instead of large outputs besides its loss.
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
    """Return the joint graph with as many slices as possible, for the least memory; arguments are as in `variants`."""
    return Slicing(target=_finest(joint), most=most, wide=reduce == "fp32", only_loss=only_loss).of(joint)


def _finest(joint: Captured) -> int:
    """Return the bytes that an op may need at least: making slices smaller than that is not worthwhile."""
    return max(1, int(LITTLE * sum(joint.values[value].bytes for value in joint.returned)))
