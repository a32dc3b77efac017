"""The command line: `fxremat solve | simulate | plan | fits | profile | ...`, or `python -m fxremat ...`.

Exit 0 with the answer on stdout, or exit 2 (130 after Ctrl-C) with one line on stderr, and nothing on stdout but a plan
that could not be written to a file. `profile --compare` ends with 1 where the peak grew by more than the tolerance.
"""

import argparse
import functools
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn, TypeVar

from fxremat import __version__, simulate
from fxremat.chains.chain import Chain, Join
from fxremat.chains.join_schedule import JoinSchedule
from fxremat.chains.platform import Platform
from fxremat.chains.schedule import Schedule
from fxremat.chains.simulate import Timeline
from fxremat.chains.simulate_join import JoinTimeline
from fxremat.cost.devices import DEVICES, listed
from fxremat.errors import CaptureError, FxrematError
from fxremat.factories import guarded, made_by
from fxremat.progress import shown_on_stderr, telling
from fxremat.show import pipeline as pipeline_report
from fxremat.solvers.choose import EFFORT, JoinSolution, Solution, solution
from fxremat.solvers.pipeline.best_plan import EFFORT as PIPELINE_EFFORT
from fxremat.solvers.pipeline.best_plan import plan_pipeline
from fxremat.solvers.pipeline.model import Machines, PipelinePlan
from fxremat.solvers.pipeline.of_chain import layers_of
from fxremat.solvers.pipeline.solved import plan_chain
from fxremat.solvers.pipeline.stage_costs import step_seconds
from fxremat.solvers.registry import JOINS, NAMES
from fxremat.units import format_bytes, parse_bytes, shortened

_T = TypeVar("_T")
_GREW = 1  # exit status where a peak grew by more than the tolerance
_INTERRUPTED = 130  # exit status of an interrupted command, as in shells: 128 + SIGINT
_LONGEST = 1000  # maximum number of characters of an error message
_QUOTES = "\"'"
_FLAGS = (  # (a setting as the library's error messages spell it, the command-line flag that sets it)
    ("exact=False", "--exact no"),
    ("exact=True", "--exact yes"),
    ('costs="H100"', "--device H100"),
    ('costs="estimate"', "--estimate"),
    ("costs: ", ""),
    ("Search: seconds", "--effort"),
    ("Offload: limit", "--host-mem"),
)


@dataclass(frozen=True)
class _Judged:
    """An answer whose exit status is not 0."""

    text: str
    status: int


def entry() -> NoReturn:
    """Run `main` and end the process with its exit status; the console script `fxremat` calls this."""
    status = main()
    if status == _INTERRUPTED:
        os._exit(status)  # ends the process without waiting for background threads
    sys.exit(status)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line `arguments` (None: those of the process) and return the exit status."""
    options: Collection[str] = ()
    try:
        args = _parser().parse_args(arguments)
        options = vars(args)
        with shown_on_stderr(), telling(args.command):
            answer = _COMMANDS[args.command](args)
    except FxrematError as error:
        print("fxremat:", _one_line(_in_flags(str(error), options)), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("fxremat: interrupted", file=sys.stderr)
        return _INTERRUPTED
    print(answer.text if isinstance(answer, _Judged) else answer)
    return answer.status if isinstance(answer, _Judged) else 0


def _in_flags(text: str, options: Collection[str]) -> str:
    """Replace Python settings in an error message by command-line flags: `device="H100"` by `--device H100`."""
    names, unlike_words = "|".join(options), "|".join(name for name in options if "_" in name) or "(?!)"

    def flag(match: re.Match[str]) -> str:
        value = match["value"]
        return f"--{match['name']}" + ("" if value == "True" else f" {value.strip(_QUOTES)}")

    for option, given in _FLAGS:
        text = text.replace(option, given)
    text = re.sub(rf"\b(?P<name>{names})=(?P<value>True|\"[^\"]*\"|'[^']*')", flag, text)
    text = re.sub(rf"^({names})(?= is | goes )|\b(?<!-)({unlike_words})\b", r"--\g<0>", text)
    text = re.sub(rf"--({unlike_words})\b", lambda match: match[0].replace("_", "-"), text)
    text = re.sub(r"fxremat\.(plan|profile)\(\.\.\., (--.*?)\)", r"fxremat \1 ... \2", text)
    text = re.sub(r"(--[a-z-]+ [^\s,]+), (?=--)", r"\1 ", text)
    return text.replace(", or give a Device(...)", "; `fxremat devices` says more of them")


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2]} ... {text[-_LONGEST // 2 :]}"


def _solve(args: argparse.Namespace) -> str:
    model = _read_model(args.chain)
    platform = Platform(to_host=args.to_host, from_host=args.from_host)
    mem = parse_bytes(args.mem)
    asked = {"solver": args.solver, "platform": platform, "slots": args.slots, "effort": args.effort}
    found: Solution | JoinSolution = _beside(lambda: solution(model, mem, **asked))
    timeline = found.timeline
    if not args.json:
        gap = f"{found.solver}; no schedule is faster than {found.lower_bound:.6g} s"
        return f"{timeline.schedule}\n{_summary(timeline)} of {format_bytes(mem)}, by {gap}"
    answer = {
        "solver": found.solver,
        "time": timeline.time,
        "peak": timeline.peak,
        "ops": [str(op) for op in timeline.schedule.ops],
        "lower_bound": found.lower_bound,
    }
    if isinstance(found, Solution) and platform.linked:
        answer["fluid_time"] = found.fluid_time
    return json.dumps(answer)


def _beside(work: Callable[[], _T]) -> _T:
    """Run `work` on its own thread and return its result, so that Ctrl-C need not wait for compiled code to return."""
    done: Future[_T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return done.result()


def _simulate(args: argparse.Namespace) -> str:
    model = _read_model(args.chain)
    timeline: Timeline | JoinTimeline
    if isinstance(model, Join):
        timeline = simulate(model, JoinSchedule.parse(args.schedule))
    else:
        timeline = simulate(model, Schedule.parse(args.schedule))
    if args.mem is not None and timeline.peak > (mem := parse_bytes(args.mem)):
        raise FxrematError(f"the schedule needs {timeline.peak} bytes, more than the {mem} of --mem")
    if not args.json:
        return str(timeline) if isinstance(timeline, Timeline) else _listed(timeline)
    return json.dumps({"time": timeline.time, "peak": timeline.peak, "memory": list(timeline.memory)})


def _plan(args: argparse.Namespace) -> str:
    _check_folder(args.report)
    _check_folder(args.save)
    factory = _read_factory(args.factory)
    # imported only here since it imports torch, which the other commands do not need
    from fxremat.api import compare, plan
    from fxremat.options import options_of
    from fxremat.settings import Offload

    options: dict[str, Any] = {"search": _search(args)}
    given = ("mem", "device_mem", "solver", "optimizer")
    options |= {name: value for name in given if (value := getattr(args, name)) is not None}
    if args.host_mem is not None and not args.offload:
        raise FxrematError("--host-mem limits what is offloaded; it goes with --offload")
    if args.offload:
        options["offload"] = Offload(limit=args.host_mem)
    if args.exact is not None:
        options["exact"] = args.exact == "yes"
        if args.largest is not None:
            raise FxrematError("--exact chooses for inputs of one size; it does not go with --largest")
    devices: list[str] = [] if args.device is None else [name.strip() for name in args.device.split(",")]
    if args.device_mem is not None and (len(devices) > 1 or args.largest is not None):
        other = "--largest" if args.largest is not None else f"--device with {len(devices)} devices"
        raise FxrematError(f"--device-mem is for one plan, on one device; it does not go with {other}: give --mem")
    for device in devices or (_costs_here(args),):
        options_of(**options, costs=device)  # checks the options before the factory runs, which may take a while
    if args.largest is not None:
        if args.report is not None or args.save is not None or args.full:
            raise FxrematError("--largest prints sizes; --report, --save and --full are for the plan of one size")
        return _largest(args, factory, options, devices)
    if len(devices) > 1 and args.report is not None:
        raise FxrematError(f"--report shows one plan, and --device names {len(devices)} devices: name one")
    if devices and args.save is not None:
        raise FxrematError("--save writes a plan for the device that the model is on; --device plans for others")
    model, example_inputs = made_by(factory, args.factory)
    planning = f"planning {args.factory}"
    if len(devices) > 1:
        return str(guarded(planning, lambda: compare(model, example_inputs, devices, **options)))
    options["costs"] = devices[0] if devices else _costs_here(args)
    found = guarded(planning, lambda: plan(model, example_inputs, **options))
    described = str(found.describe(full=args.full))
    try:
        _write(args.report, found.to_html)
        if args.save is not None:
            _writing(args.save, lambda: found.save(args.save))
    except FxrematError:
        print(described)  # planning may have taken a while
        raise
    return described


def _costs_here(args: argparse.Namespace) -> str:
    """Return the `costs` setting for the model's own device: "estimate" if --estimate was given, else "measure"."""
    return "estimate" if args.estimate else "measure"


def _search(args: argparse.Namespace) -> Any:
    """Return the `Search` settings that --effort and --slots give; settings that were not given have their defaults."""
    from fxremat.settings import Search

    given = {"seconds": args.effort, "slots": getattr(args, "slots", None)}
    return Search(**{name: value for name, value in given.items() if value is not None})


def _profile(args: argparse.Namespace) -> str | _Judged:
    """Profile a step; print the profile, or how it compares with an earlier one."""
    for path in (args.report, args.save):
        _check_folder(path)
    from fxremat.show.profile_figures import TOLERANCE, ProfileComparison, allowed

    if args.tolerance is not None and args.compare is None:
        raise FxrematError("--tolerance is for --compare, which says how much the peak grew")
    tolerance = TOLERANCE if args.tolerance is None else args.tolerance
    allowed(tolerance, 0)
    before = None if args.compare is None else _read_profile(args.compare)
    factory = _read_factory(args.factory)
    from fxremat.api import profile
    from fxremat.options import options_of

    options: dict[str, Any] = {"costs": args.device or _costs_here(args), "search": _search(args)}
    options_of(mem="100%", **options)  # checks the options before the factory runs, which may take a while
    model, example_inputs = made_by(factory, args.factory)
    found = guarded(f"profiling {args.factory}", lambda: profile(model, example_inputs, **options))
    _write(args.report, found.to_html)
    _write(args.save, found.to_json)
    if before is None:
        return found.to_json() if args.json else str(found)
    comparison: ProfileComparison = before.compare(found)
    grew = comparison.exceeds(tolerance)
    verdict = f"{'more' if grew else 'no more'} than the tolerance of {tolerance.strip()}"
    text = comparison.to_json() if args.json else f"{comparison}\n\nthe peak grew by {verdict}"
    return _Judged(text, _GREW) if grew else text


def _read_profile(path: str) -> Any:
    from fxremat.profiles import Profile

    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FxrematError(f"cannot read {shortened(path)}: {getattr(error, 'strerror', None) or error}") from None
    try:
        return Profile.from_json(text)
    except FxrematError as error:
        raise FxrematError(f"{path} holds {error}") from None


def _largest(
    args: argparse.Namespace, factory: Callable[..., Any], options: dict[str, Any], devices: list[str]
) -> str:
    """Return one line per device: the largest value of the factory's parameter (such as a batch size) that fits there.
    """
    from fxremat.api import plan
    from fxremat.cost.devices import Device
    from fxremat.what_if import PlansOfSize, largest_on

    name, limit, mem = args.largest, args.up_to, args.mem.strip()
    if not _takes(factory, name):
        raise FxrematError(
            f"{args.factory} has no parameter {shortened(name)}; --largest calls it with that parameter, from 1 on"
        )
    if limit < 1:
        raise FxrematError(f"--up-to is {limit}; it is 1 or more")
    if mem.endswith("%"):
        raise FxrematError("--largest needs --mem in bytes, such as 4GiB: a share of a larger batch is more memory")
    if mem.lower() == "auto" and not devices:
        raise FxrematError("--largest needs --mem in bytes, or --mem auto with --device H100")
    del options["mem"]
    if args.effort is None:
        options["search"] = replace(options["search"], seconds=0.0)
    options["costs"] = _costs_here(args)  # `PlansOfSize` replaces this by each of the devices

    def make(size: int) -> tuple[Any, Any]:
        return made_by(functools.partial(factory, **{name: size}), args.factory)

    def planned(model: Any, inputs: Any, **further: Any) -> Any:
        return guarded(f"planning {args.factory}", lambda: plan(model, inputs, **(options | further)))

    plans, lines = PlansOfSize(make, planned), []
    targets: list[Device | None] = [Device.named(device) for device in devices] or [None]
    for device in targets:
        budget, found = largest_on(device, plans, mem, limit)
        lines.append(
            f"{f'{device}: ' if device else ''}the largest {name} within {format_bytes(budget)} is {found}"
        )
    return "\n".join(lines)


def _takes(factory: Callable[..., Any], name: str) -> bool:
    """Tell whether a factory has a parameter of this name."""
    try:
        return name in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # raised if `factory` is not a function, or not one written in Python
        return False


def _check_folder(path: str | None) -> None:
    """Raise `FxrematError` if the folder that is to contain the output file `path` does not exist.

    None: no output file.
    """
    if path is not None and not Path(path).absolute().parent.is_dir():
        raise FxrematError(f"cannot write {path}: there is no folder {Path(path).absolute().parent}")


def _write(path: str | None, text: Callable[[], str]) -> None:
    if path is not None:
        _writing(path, lambda: Path(path).write_text(text(), encoding="utf-8"))


def _writing(path: str, write: Callable[[], object]) -> None:
    try:
        write()
    except OSError as error:
        raise FxrematError(f"cannot write {path}: {error.strerror or error}") from None


def _fits(args: argparse.Namespace) -> str:
    """Answer whether a model trains on a device, or which batch or length is the largest that does."""
    _check_folder(args.html)
    from fxremat.fitting import fits
    from fxremat.fitting.largest import largest_that_fits

    names = ("batch", "length", "image", "dtype", "train", "optimizer", "accumulate", "devices", "shard", "device_mem")
    asked = {name: value for name in names if (value := getattr(args, name)) is not None}
    cards = [name.strip() for name in args.on.split(",")]
    asked |= {"on": cards if len(cards) > 1 else args.on, "config": dict(map(_key_and_value, args.config))}
    if args.largest is not None:
        if args.html is not None:
            raise FxrematError("--largest prints a size; --html is for the answer at one size")
        if len(cards) > 1:
            raise FxrematError(f"--largest is for one device, and --on names {len(cards)}")
        found = largest_that_fits(args.model, args.largest, up_to=args.up_to, **asked)
        return json.dumps(asdict(found)) if args.json else str(found)
    answer = fits(args.model, **asked)
    _write(args.html, answer.to_html)
    return json.dumps(answer.to_json()) if args.json else str(answer)


def _key_and_value(text: str) -> tuple[str, Any]:
    """Return the two sides of `key=value`; a value that is JSON is read as such, any other is a text."""
    key, sign, value = text.partition("=")
    if not (key and sign):
        raise FxrematError(f"--config {shortened(text)} is not key=value, such as num_hidden_layers=16")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def _pipeline(args: argparse.Namespace) -> str:
    _check_folder(args.picture)
    chain = _read_model(args.chain)
    if isinstance(chain, Join):
        raise FxrematError(f"{args.chain}: a pipeline runs a chain; this is a join")
    machines = Machines(
        devices=args.devices, memory=parse_bytes(args.mem), bandwidth=args.bandwidth, copies=args.copies
    )
    asked = {"microbatches": args.microbatches, "effort": args.effort}
    found: PipelinePlan = _beside(
        lambda: (
            plan_pipeline(layers_of(chain), machines, **asked)
            if args.keep_all
            else plan_chain(chain, machines, **asked)
        )
    )
    _write(args.picture, lambda: pipeline_report.picture(found))
    if not args.json:
        return pipeline_report.text(found, args.microbatches)
    answer = {
        "period": found.period,
        "lower_bound": found.bound,
        "by": found.by,
        "pipedream_period": pipeline_report.baseline_period(found),
        "skip": found.skip,
        "stages": [
            {"layers": [stage.first + 1, stage.last + 1], "device": stage.device, "in_flight": flight}
            | asdict(stage.way)
            for stage, flight in zip(found.stages, found.in_flight, strict=True)
        ],
        "memory": list(found.memory),
    }
    if args.microbatches is not None:
        answer["step"] = step_seconds(found, args.microbatches)
    return json.dumps(answer)


def _opt(args: argparse.Namespace) -> str:
    """Plan the fx graph in a text file, and print the plan, or write the planned graph to the output file."""
    _check_folder(args.output)
    try:
        text = Path(args.graph).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise FxrematError(f"cannot read {shortened(args.graph)}: {reason}") from None
    from fxremat.compilers.planned_text import planned_text
    from fxremat.options import options_of

    given: dict[str, Any] = {"costs": args.costs, "search": _search(args)}
    options_of(mem=args.mem, **given)
    try:
        plan, emitted = planned_text(text, args.mem, **given)
    except CaptureError as error:
        raise CaptureError(f"{args.graph}: {error}") from None
    if args.output is None:
        return f"{emitted}\n{plan.headline}"
    _write(args.output, lambda: emitted)
    return str(plan)


def _devices(args: argparse.Namespace) -> str:
    return json.dumps([asdict(device) for device in DEVICES.values()]) if args.json else listed()


def _summary(timeline: Timeline | JoinTimeline) -> str:
    return f"time {timeline.time:.6g} s, peak {format_bytes(timeline.peak)} ({timeline.peak} bytes)"


def _listed(timeline: JoinTimeline) -> str:
    """Format the ops of a join of chains, one per line with the memory in use, like `str` of a chain's timeline."""
    ops = [str(op) for op in timeline.schedule.ops]
    lines = [f"peak {format_bytes(timeline.peak)}, time {timeline.time:.6g} s, {len(ops)} operations"]
    for op, memory in zip(ops, timeline.memory, strict=True):
        bar = "#" * round(40 * memory / timeline.peak) if timeline.peak else ""
        lines.append(f"{op:{max(map(len, ops))}}  {format_bytes(memory):>10}  {bar}")
    return "\n".join(lines)


def _read_model(path: str) -> Chain | Join:
    """Read a JSON file as a join if it has "branches", else as a chain. Raises `FxrematError` that names the file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FxrematError(f"cannot read {shortened(path)}: {getattr(error, 'strerror', None) or error}") from None
    try:
        return Join.from_json(text) if _has_branches(text) else Chain.from_json(text)
    except FxrematError as error:
        raise type(error)(f"{path}: {error}") from None


def _has_branches(text: str) -> bool:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):  # ignored here: `Chain.from_json` raises an error with a better message
        return False
    return isinstance(data, dict) and "branches" in data


def _read_factory(name: str) -> Callable[[], Any]:
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise FxrematError(f"{shortened(name)} is not package.module:factory")
    if module.startswith("."):
        raise FxrematError(f"{shortened(name)} is relative; name the module from its package on")
    sys.path.insert(0, "")
    try:
        factory: Callable[[], Any] = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # importing the user's module may raise anything
        raise FxrematError(f"cannot import {shortened(name)}: {type(error).__name__}: {error}") from error
    return factory


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FxrematError(f"{message}; see {self.prog} --help")


def _called() -> str:
    """Return the command by which the user runs this program: "fxremat" or "python -m fxremat"."""
    name = Path(sys.argv[0]).name if sys.argv else ""
    return "fxremat" if name in ("fxremat", "fxremat.exe") else "python -m fxremat"


def _parser() -> _Parser:
    parser = _Parser(prog=_called(), description="Plan training steps inside a memory budget.")
    parser.add_argument("--version", action="version", version=f"fxremat {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    joins = ", ".join(("auto", *JOINS))
    solve = commands.add_parser("solve", help="the fastest schedule of a chain or a join within a budget")
    solve.add_argument("chain", metavar="CHAIN.json")
    solve.add_argument("--mem", required=True, metavar="BYTES", help="such as 4294967296, 4GiB, 300MB")
    solve.add_argument(
        "--solver", default="auto", metavar="NAME", help=f"{', '.join(NAMES)}; of a join: {joins}"
    )
    solve.add_argument("--slots", type=int, default=500, metavar="N", help="steps of memory (default 500)")
    solve.add_argument(
        "--effort", type=float, default=EFFORT, metavar="SECONDS", help=f'for "auto" (default {EFFORT:g})'
    )
    solve.add_argument("--to-host", type=float, metavar="B/s")
    solve.add_argument("--from-host", type=float, metavar="B/s")
    solve.add_argument("--json", action="store_true")

    simulate = commands.add_parser("simulate", help="time and memory of a schedule")
    simulate.add_argument("chain", metavar="CHAIN.json")
    simulate.add_argument("schedule", metavar='"Fck1 ..."')
    simulate.add_argument("--mem", metavar="BYTES", help="an error where the peak is above it")
    simulate.add_argument("--json", action="store_true")

    pipeline = commands.add_parser("pipeline", help="stages on several devices that work like a pipeline")
    pipeline.add_argument("chain", metavar="CHAIN.json", help="times and sizes of one micro-batch")
    pipeline.add_argument("--devices", type=int, required=True, metavar="N")
    pipeline.add_argument("--mem", required=True, metavar="BYTES", help="of each device")
    pipeline.add_argument(
        "--bandwidth", type=float, metavar="B/s", help="of each link; without it copies take no time"
    )
    pipeline.add_argument(
        "--microbatches", type=int, metavar="N", help="of a step; without it the period decides"
    )
    pipeline.add_argument(
        "--copies",
        type=float,
        default=3.0,
        metavar="N",
        help="of the weights, gradients included (default 3)",
    )
    pipeline.add_argument("--keep-all", action="store_true", help="recompute nothing")
    pipeline.add_argument("--effort", type=float, default=PIPELINE_EFFORT, metavar="SECONDS")
    pipeline.add_argument("--picture", metavar="OUT.svg")
    pipeline.add_argument("--json", action="store_true")

    plan = commands.add_parser("plan", help="capture, measure and plan a model")
    plan.add_argument("factory", metavar="package.module:factory", help="returns (model, example_inputs)")
    budget = plan.add_mutually_exclusive_group(required=True)
    budget.add_argument(
        "--mem",
        help="what forward and backward may allocate: 4GiB, 300MB, 60%%; auto: what the GPU, or that of --device, has "
        "left",
    )
    budget.add_argument(
        "--device-mem",
        metavar="SIZE",
        help="instead of --mem, what the whole process may have on the device: parameters, buffers, inputs, optimizer "
        "state, gradients, forward and backward, and on CUDA its context and the allocator's reserve, both estimated",
    )
    plan.add_argument(
        "--exact",
        choices=("yes", "no"),
        help="let the planner choose the means. yes: those with the same bits; no: slices and compiled kernels, too",
    )
    plan.add_argument("--offload", action="store_true", help="let values wait on the host")
    plan.add_argument("--host-mem", metavar="SIZE", help="what may wait there at a time, such as 16GiB")
    plan.add_argument("--solver", metavar="NAME", help='"auto" unless told; see docs/solvers.md')
    plan.add_argument("--effort", type=float, metavar="SECONDS", help="to improve the plan op by op")
    plan.add_argument("--slots", type=int, metavar="N", help="steps of memory (default 500)")
    plan.add_argument("--estimate", action="store_true", help="of costs: nothing is measured")
    plan.add_argument(
        "--device", metavar="NAMES", help="estimate for another device: H200, or several to compare: A100,H200"
    )
    plan.add_argument(
        "--optimizer",
        metavar="NAME",
        help="whose state --device or --device-mem counts: adamw (default), sgd, sgd-momentum, ...",
    )
    plan.add_argument(
        "--largest", metavar="NAME", help="the largest number that this parameter of the factory can have"
    )
    plan.add_argument("--up-to", type=int, default=65536, metavar="N", help="where --largest stops (default 65536)")
    plan.add_argument("--full", action="store_true", help="a line for each block, and the whole schedule")
    plan.add_argument("--report", metavar="OUT.html")
    plan.add_argument("--save", metavar="PLAN.json", help="what fxremat.compile(model, plan=...) runs")

    fits = commands.add_parser("fits", help="whether a model trains on a device, and in which memory")
    fits.add_argument(
        "model",
        metavar="MODEL",
        help="a config.json or its folder (transformers, diffusers), a name on the hub or of timm, "
        "package.module:factory, or a shipped configuration such as llama-3-8b",
    )
    fits.add_argument(
        "--on", required=True, metavar="NAME", help="the device, such as RTX-4090, or several: RTX-4090,H100"
    )
    fits.add_argument(
        "--device-mem", metavar="SIZE", help="what the process may have there, such as 20GiB (default: all that it has)"
    )
    fits.add_argument(
        "--config", action="append", default=[], metavar="KEY=VALUE", help="a setting of the configuration that differs"
    )
    for name, meaning in (
        ("batch", "examples at a time on each device (default 1)"),
        ("length", "tokens of an example"),
        ("image", "pixels along a side of an image"),
        ("accumulate", "backwards before each step of the optimizer (default 1)"),
        ("devices", "devices that train together, with --shard"),
    ):
        fits.add_argument(f"--{name}", type=int, metavar="N", help=meaning)
    fits.add_argument("--dtype", metavar="NAME", help="bf16 (default), fp32, autocast")
    fits.add_argument("--train", metavar="HOW", help="full (default), lora, lora:16 (a rank), qlora")
    fits.add_argument("--optimizer", metavar="NAME", help="adamw (default), adamw8bit, sgd, adafactor, muon")
    fits.add_argument("--shard", metavar="HOW", help="fsdp, ddp or tp, with --devices")
    fits.add_argument("--largest", metavar="NAME", help="the largest batch or length that fits")
    fits.add_argument("--up-to", type=int, default=65536, metavar="N", help="where --largest stops (default 65536)")
    fits.add_argument("--json", action="store_true")
    fits.add_argument("--html", metavar="OUT.html", help="the answer as a page")

    profile = commands.add_parser("profile", help="where the memory of a training step goes, and what would save most")
    profile.add_argument("factory", metavar="package.module:factory", help="returns (model, example_inputs)")
    profile.add_argument("--effort", type=float, metavar="SECONDS", help="to improve the plans it compares op by op")
    profile.add_argument("--estimate", action="store_true", help="of costs: nothing is measured")
    profile.add_argument("--device", metavar="NAME", help="estimate for another device, such as H200")
    profile.add_argument("--report", metavar="OUT.html", help="the same as a page to explore")
    profile.add_argument("--save", metavar="PROFILE.json", help="its figures, for --compare")
    profile.add_argument("--json", action="store_true", help="print figures as JSON")
    profile.add_argument(
        "--compare",
        metavar="OLD.json",
        help="print which modules grew since this profile was saved; exit 1 if the peak grew by more than --tolerance",
    )
    profile.add_argument(
        "--tolerance", metavar="SIZE", help="growth of the peak that is no failure: 1%% (default), 10MiB, 0"
    )

    opt = commands.add_parser("opt", help="plan a graph that was written as text (fxremat.passes.to_text)")
    opt.add_argument("graph", metavar="GRAPH.py")
    opt.add_argument("--mem", required=True, help="such as 4GiB, 300MB, 60%%")
    opt.add_argument("--costs", default="estimate", metavar="NAME", help="estimate (default), measure, or such as H100")
    opt.add_argument("--effort", type=float, metavar="SECONDS", help="to improve the plan op by op")
    opt.add_argument("-o", "--output", metavar="OUT.py", help="the graphs of the plan; stdout then has the plan")

    devices = commands.add_parser("devices", help="the devices that --device knows")
    devices.add_argument("--json", action="store_true")
    return parser


_COMMANDS: dict[str, Callable[[argparse.Namespace], str | _Judged]] = {
    "solve": _solve,
    "simulate": _simulate,
    "plan": _plan,
    "fits": _fits,
    "profile": _profile,
    "pipeline": _pipeline,
    "opt": _opt,
    "devices": _devices,
}

if __name__ == "__main__":
    entry()
