"""Ops of a planned program taken together into regions, each compiled once, measured, and judged as an op is.

    units    the steps of a program, in groups: each is a region that is compiled, or one op that runs as it is
    joint    the program as a joint graph again, whose ops are these units: nothing of it is ever computed again

`planning.compiled` chooses the fastest program whose units fit into the budget.
"""
