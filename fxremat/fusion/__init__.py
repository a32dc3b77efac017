"""Grouping the ops of a planned program into regions, each of which is compiled, measured, and treated like one op.

    units    the steps of a program, in groups: each is a region that is compiled, or one op that runs uncompiled
    joint    the program as a joint graph whose ops are these units; a recomputation is an op of its own

`planning.compiled` chooses the fastest program whose units fit into the budget.
"""
