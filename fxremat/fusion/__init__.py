"""Ops of a planned program grouped into regions, each compiled once, measured, and evaluated like an op.

    units    the steps of a program, in groups: each is a region that is compiled, or one op that runs as it is
    joint    the program as a joint graph again, whose ops are these units: no unit is ever recomputed

`planning.compiled` chooses the fastest program whose units fit into the budget.
"""
