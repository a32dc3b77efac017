"""Checks that a program is a valid execution of its step graph; every transformation of programs must keep these rules.

    each op runs; backward ops, and ops that return nothing (assertions), run once
    each version that a step reads was written before, or exists from the start
    the first execution of an op has its `reads` and `writes`, later ones its `again_reads` and `again_writes`
    values that the step returns are computed by the first execution of their op

`lower` runs these checks if FXREMAT_VERIFY is set, as it is in the tests. O(steps * reads).
"""

from __future__ import annotations

import os
from collections import Counter

from fxremat.errors import InvalidSchedule
from fxremat.step.program import Program, Role, Step
from fxremat.step.step_graph import Op, StepGraph


def is_verified() -> bool:
    """Tell whether FXREMAT_VERIFY is set, so that programs are checked before they become graphs."""
    return bool(os.environ.get("FXREMAT_VERIFY"))


def verify(program: Program) -> Program:
    """Return the program; raise `InvalidSchedule`, with the op and the reason, if it breaks a rule."""
    graph = program.layout.graph
    _check_reads(program, graph)
    _check_executions(program, graph)
    _check_results(program, graph)
    return program


def _check_reads(program: Program, graph: StepGraph) -> None:
    """Check that each version (result of one execution) is written exactly once, and before it is read."""
    written = {step_write for step in program.steps for step_write in step.writes}
    there = {version for version in range(len(program.version_of)) if version not in written}
    for version in there:
        value = graph.values[program.version_of[version]]
        if value.index not in graph.given:
            raise InvalidSchedule(f"{value.name} is made by an op, and no step of the program makes it")
    for step in program.steps:
        for version in step.reads:
            if version not in there:
                name = graph.values[program.version_of[version]].name
                raise InvalidSchedule(f"{_named(step.op, graph, step.role)} reads {name} before it is made")
        for version in step.writes:
            if version in there:
                name = graph.values[program.version_of[version]].name
                raise InvalidSchedule(f"{_named(step.op, graph, step.role)} writes {name} over itself")
            there.add(version)


def _named(op: int | None, graph: StepGraph, role: Role) -> str:
    return role.value if op is None else graph.ops[op].name


def _check_executions(program: Program, graph: StepGraph) -> None:
    """Check what each execution reads and writes, and how often each op runs."""
    ran: Counter[int] = Counter()
    for place, step in enumerate(program.steps):
        if not isinstance(step, Step):
            continue
        op, again = graph.ops[step.op], bool(ran[step.op])
        if step.role not in (roles := _roles(op, again=again)):
            raise InvalidSchedule(f"{op.name} is called {step.role.value}, and it is {roles[0].value}")
        if again and (op.backward or not op.writes):
            raise InvalidSchedule(f"{op.name} runs twice")
        if op.backward and place < program.split:
            raise InvalidSchedule(f"{op.name} belongs to the backward, and runs in the forward")
        reads, writes = (op.again_reads, op.again_writes) if again else (op.reads, op.writes)
        for what, versions, values in (("reads", step.reads, reads), ("writes", step.writes, writes)):
            seen = tuple(program.version_of[version] for version in versions)
            if seen != tuple(values):
                names = [graph.values[value].name for value in (*seen, *values)]
                raise InvalidSchedule(f"{op.name} {what} other values than its op: {', '.join(names)}")
        ran[step.op] += 1
    if missing := [op.name for op in graph.ops if not ran[op.index]]:
        raise InvalidSchedule(f"{missing[0]} never runs")
    repeated = frozenset(op for op, count in ran.items() if count > 1)
    if repeated != program.repeated:
        wrong = ", ".join(graph.ops[op].name for op in sorted(repeated ^ program.repeated))
        raise InvalidSchedule(f"what runs more than once is noted otherwise: {wrong}")


def _roles(op: Op, *, again: bool) -> tuple[Role, ...]:
    """Return the roles that an execution of an op may have; `again`: it is not the first execution.

    A compiled region of the backward may consist of recomputed ops only.
    """
    if op.backward:
        return Role.BACKWARD, Role.RECOMPUTE
    return (Role.RECOMPUTE,) if again else (Role.FORWARD,)


def _check_results(program: Program, graph: StepGraph) -> None:
    """Check that forward outputs are computed in the forward, and overwritten inputs are copied if they are read later.
    """
    early = {version for step in program.steps[: program.split] for version in step.writes}
    for value in sorted(graph.kept_outputs - graph.given):
        if program.first[value] not in early:
            raise InvalidSchedule(f"{graph.values[value].name} is returned by the forward, and made later")
    late = {program.version_of[version] for step in program.steps[program.split :] for version in step.reads}
    if lost := sorted((late & graph.mutated_primals) - program.preserved):
        raise InvalidSchedule(f"{graph.values[lost[0]].name} is read after the step has overwritten it")
