"""Plans the first step with less for a loss outside the model than is assumed, where nothing fits otherwise."""

from __future__ import annotations

import gc
import logging
import math
from collections.abc import Callable
from dataclasses import replace

from fxremat.errors import BudgetTooSmall
from fxremat.graphs.accounting import outer_gradients, outside_bytes
from fxremat.graphs.captured import Captured
from fxremat.options import Options, SeenLoss
from fxremat.plans import Plan
from fxremat.transfers.network import communicates
from fxremat.units import Percent, format_bytes

log = logging.getLogger(__name__)
TRIES = 3  # a budget in percent shrinks with what is assumed for the loss, so that one try may not do


def plan_expecting_less(
    plan: Callable[[Options], Plan], options: Options, graph: Callable[[], Captured]
) -> tuple[Plan, Options]:
    """Plan; where nothing fits beside a loss that was not measured, leave it the most with which something fits.

    A cross entropy takes three times its logits' bytes, and four times are assumed. What the loss takes is known after
    the step, and the next one is planned for that, or refused.

    Args:
        plan: plans with the options that it gets.
        graph: returns the step; called if nothing fits.

    Returns:
        the plan, and the options that it was made with.

    Raises:
        BudgetTooSmall: nothing fits even if the loss only computes the gradients of the outputs.
    """
    try:
        return plan(options), options
    except BudgetTooSmall as error:
        if options.loss_seen is not None or options.loss_outside.size is not None or options.plan is not None:
            raise
        small = error.explained()  # without a traceback
    step = graph()
    least = sum(node.meta["val"].nbytes for node in outer_gradients(step))
    if communicates(step) or not least:
        raise small
    assumed = left = outside_bytes(step)
    lacking = small
    share = options.budget.of_keep_all / 100 if isinstance(options.budget, Percent) else 0.0
    for _ in range(TRIES):
        left -= math.ceil((lacking.minimum - lacking.budget) / max(0.1, 1 - share))
        if left < least:
            break
        seen = SeenLoss(peaks=((assumed, left),), as_traced=True, is_expected=True)
        less = replace(options, loss_seen=seen)
        try:
            made = plan(less)
        except BudgetTooSmall as error:
            lacking = error.explained()
            continue
        gc.collect()  # errors may refer to themselves, and so to frames that would hold this call's outputs
        log.warning(
            "nothing fits in %s beside %s for the loss outside the model: this step leaves it %s, and exceeds the "
            "budget if it takes more; the next is planned for what it took",
            options.mem if options.division is None else format_bytes(small.budget),
            format_bytes(assumed),
            format_bytes(left),
        )
        return made, less
    raise small
