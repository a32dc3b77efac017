"""The command line: the contract's JSON, and one line on stderr with exit 2 for everything that is wrong."""

import functools
import importlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
import tomllib
from pathlib import Path

import pytest

import fxremat
from benchmarks.solvers import uneven
from fxremat.__main__ import main
from fxremat.settings import Search

VECTORS = json.loads((Path(__file__).parent / "data" / "remat.json").read_text())


@pytest.fixture
def chain_file(tmp_path):
    def write(chain):
        path = tmp_path / "chain.json"
        path.write_text(chain if isinstance(chain, str) else json.dumps(chain))
        return str(path)

    return write


@pytest.mark.parametrize("solver", ["persistent", "input_drop"])
def test_stated_values_through_the_command_line(chain_file, capsys, solver):
    for case in VECTORS:
        path = chain_file(case["chain"])
        status = main(["solve", path, "--mem", str(case["mem"]), "--solver", solver, "--json"])
        printed = capsys.readouterr()
        if case[solver] is None:
            assert (status, printed.out) == (2, "")
            least = printed.err.split("the least that does is ")[1].split()[0]
            assert main(["solve", path, "--mem", least, "--solver", solver, "--json"]) == 0
            assert json.loads(capsys.readouterr().out)["peak"] == int(least)
            continue
        solved = json.loads(printed.out)
        assert solved.keys() == {"solver", "time", "peak", "ops", "lower_bound"}
        assert solved["lower_bound"] <= solved["time"] == case[solver]
        assert solved["peak"] <= case["mem"]
        assert main(["simulate", path, " ".join(solved["ops"]), "--json"]) == 0
        simulated = json.loads(capsys.readouterr().out)
        assert (simulated["time"], simulated["peak"]) == (solved["time"], solved["peak"])
        assert len(simulated["memory"]) == len(solved["ops"])


def test_text(chain_file, capsys):
    path = chain_file(VECTORS[2]["chain"])
    assert main(["solve", path, "--mem", "4 kB"]) == 0
    assert main(["simulate", path, capsys.readouterr().out.splitlines()[0], "--mem", "4kB"]) == 0
    assert "peak" in capsys.readouterr().out


def test_revolve_keeps_nothing_but_checkpoints_however_much_memory_there_is(chain_file, capsys):
    block = {"forward_time": 1, "backward_time": 2, "output_bytes": 1, "saved_bytes": 2}
    path = chain_file({"input_bytes": 1, "blocks": [block] * 3})
    for mem, slots in (("7", "7"), ("99", "500"), ("1TiB", "2")):
        assert main(["solve", path, "--mem", mem, "--solver", "revolve", "--slots", slots]) == 0
        assert capsys.readouterr().out.splitlines()[0] == "Fck1 Fck2 Fall3 B3 Fall2 B2 Fall1 B1"


BRANCH = {
    "input_bytes": 1,
    "blocks": [{"forward_time": 1, "backward_time": 1, "output_bytes": 1, "saved_bytes": 5}],
}
JOIN = {"branches": [BRANCH, BRANCH]}


@pytest.mark.parametrize("solver", ["auto", "canonical"])
def test_a_join(chain_file, capsys, solver):
    path = chain_file(JOIN | {"trunk": None})
    assert main(["solve", path, "--mem", "12", "--solver", solver, "--json"]) == 0
    solved = json.loads(capsys.readouterr().out)
    assert solved.keys() == {"solver", "time", "peak", "ops", "lower_bound"}
    assert (solved["time"], solved["peak"], solved["lower_bound"]) == (5, 10, 4)
    assert main(["simulate", path, " ".join(solved["ops"]), "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert (simulated["time"], simulated["peak"]) == (5, 10)
    assert len(simulated["memory"]) == len(solved["ops"])
    assert main(["solve", path, "--mem", "9"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == (
        "",
        "fxremat: no schedule fits in 9 bytes; the least that does is 10 bytes\n",
    )


def test_a_join_as_text(chain_file, capsys):
    path = chain_file(JOIN)
    assert main(["solve", path, "--mem", "12", "--solver", "canonical"]) == 0
    schedule, summary = capsys.readouterr().out.splitlines()
    assert schedule == "1:Fck1 2:Fall1 Loss 2:B1 1:Fall1 1:B1"
    assert summary == "time 5 s, peak 10 B (10 bytes) of 12 B, by canonical; no schedule is faster than 4 s"
    assert main(["simulate", path, schedule, "--mem", "10"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "peak 10 B, time 5 s, 6 operations"
    assert lines[3].split() == ["Loss", "10", "B", 40 * "#"]
    assert main(["simulate", path, schedule, "--mem", "9"]) == 2


GOOD = VECTORS[2]["chain"]
NOTHING = {"forward_time": 0, "backward_time": 0, "output_bytes": 0, "saved_bytes": 0}
ZEROS = {"input_bytes": 0, "blocks": [NOTHING] * 4}


def with_first(chain, **changes):
    """The chain with fields of its first block changed."""
    first, *others = chain["blocks"]
    return chain | {"blocks": [first | changes, *others]}


def pair_of_nothing():
    return None, None


def model_and_inputs():
    import torch

    return torch.nn.Linear(4, 4), torch.ones(3, 4)


def model_of_other_inputs():
    import torch

    return torch.nn.Linear(4, 4), torch.ones(3, 5)


def record(into, function, *arguments, **options):
    into.update(options)
    return function(*arguments, **options)


@pytest.mark.parametrize(
    ("chain", "arguments", "says"),
    [
        (GOOD, ["solve", "FILE"], "--mem"),
        (GOOD, ["solve", "FILE", "--mem", "1.5.2"], "4GiB"),
        (GOOD, ["solve", "FILE", "--mem", "60%"], "4GiB"),
        (GOOD, ["solve", "FILE", "--mem", "-3"], "4GiB"),
        (GOOD, ["solve", "FILE", "--mem", "1"], "the least that does is"),
        (GOOD, ["solve", "FILE", "--mem", "99", "--solver", "magic"], "input_drop"),
        (GOOD, ["solve", "FILE", "--mem", "99", "--slots", "0"], "slots is 0"),
        (GOOD, ["solve", "FILE", "--mem", "99", "--slots", "x"], "invalid int"),
        (GOOD, ["solve", "FILE", "--mem", "99", "--to-host", "nan"], "--to-host is nan"),
        (GOOD, ["simulate", "FILE", "Fck1 Fwhat2"], "'Fwhat2'"),
        (GOOD, ["simulate", "FILE", "Fall1"], "ends before"),
        (GOOD, ["solve", "missing.json", "--mem", "99"], "missing.json"),
        ("{", ["solve", "FILE", "--mem", "99"], "must be JSON"),
        ('{"input_bytes": NaN, "blocks": []}', ["solve", "FILE", "--mem", "99"], "blocks is empty"),
        (GOOD | {"input_bytes": float("nan")}, ["solve", "FILE", "--mem", "99"], "input_bytes is nan"),
        (GOOD | {"input_bytes": -1}, ["solve", "FILE", "--mem", "99"], "input_bytes is -1"),
        (JOIN, ["solve", "FILE", "--mem", "99", "--solver", "input_drop"], "canonical"),
        (JOIN, ["solve", "FILE", "--mem", "99", "--to-host", "1", "--from-host", "1"], "--to-host and --from-host"),
        (JOIN, ["simulate", "FILE", "Fall1"], "1:Fck3"),
        (JOIN, ["simulate", "FILE", "1:Fall1 Loss"], "branch 2 has not ended"),
        ({"branches": []}, ["solve", "FILE", "--mem", "99"], "at least one Chain"),
        ({"branches": [BRANCH, {}]}, ["solve", "FILE", "--mem", "99"], "blocks"),
        (GOOD, ["solve", "FILE", "--mem", "99", "--solver", "canonical"], "unknown solver"),
        (GOOD, ["simulate", "FILE", "1:Fall1 Loss"], "'1:Fall1'"),
        (GOOD, ["plan", "nocolon", "--mem", "1GiB"], "package.module:factory"),
        (GOOD, ["plan", "no.such.module:f", "--mem", "1GiB"], "no.such.module"),
        (GOOD, ["plan", "..:x", "--mem", "1GiB"], "is relative"),
        (GOOD, ["plan", "os:getcwd", "--mem", "1GiB"], "os:getcwd() returned a str; it must return (model, "),
        (GOOD, ["plan", "os.path:join", "--mem", "1GiB"], "os.path:join() failed at"),
        (GOOD, ["plan", "os:sep", "--mem", "1GiB"], "os:sep is a str; it must be a function"),
        (GOOD, ["fits", "os:getcwd", "--on", "T4"], "os:getcwd() returned a str; it must return (model, "),
        (GOOD, ["fits", "os.path:join", "--on", "T4"], "os.path:join() failed at"),
        (GOOD, ["fits", "os:sep", "--on", "T4"], "os:sep is a str; it must be a function"),
        (GOOD, ["plan", "tests.test_main:pair_of_nothing", "--mem", "1GiB"], "returned a tuple"),
        (GOOD, ["plan", "tests.test_main:model_of_other_inputs", "--mem", "1GiB"], "[3, 5]"),
        (GOOD, ["plan", "os:getcwd", "--mem", "1GiB", "--solver", "best"], "unknown solver 'best'"),
        (GOOD, ["plan", "os:getcwd", "--mem", "1GiB", "--slots", "0"], "slots is 0"),
        (GOOD, ["plan", "os:getcwd", "--mem", "1GiB", "--effort", "nan"], "effort is nan"),
        (GOOD, ["plan", "os:getcwd", "--mem", "1GiB", "--device", "abacus"], "'abacus'"),
        (GOOD, ["plan", "os:getcwd", "--mem", "1GiB", "--report", "/no/such/out.html"], "no folder /no/such"),
        (GOOD, ["plan", "os:getcwd", "--mem", "1GiB", "--save", "/no/such/plan.json"], "no folder /no/such"),
        (GOOD, ["plan", "os:getcwd", "--mem", "1e9"], "int(1e9)"),
        (GOOD, ["pipeline", "FILE", "--mem", "1GiB", "--devices", "1000000000"], "a pipeline has from 1 to 10000"),
        (GOOD, ["pipeline", "FILE", "--mem", "1GiB", "--devices", "0"], "a pipeline has from 1"),
        (GOOD, ["pipeline", "FILE", "--mem", "1GiB", "--devices", "2", "--picture", "/no/x.svg"], "no folder /no"),
        (ZEROS, ["pipeline", "FILE", "--mem", "1GiB", "--devices", "2", "--effort", "1"], "no layer takes any time"),
        (with_first(GOOD, forward_time=1e308), ["solve", "FILE", "--mem", "99"], "forward_time is 1e+308"),
        (with_first(GOOD, forward_scratch=None), ["solve", "FILE", "--mem", "99"], "forward_scratch is None"),
        (with_first(GOOD, weight_bytes=None), ["solve", "FILE", "--mem", "99"], "weight_bytes is None"),
        (with_first(GOOD, **{"k" * 100_000: 1}), ["solve", "FILE", "--mem", "99"], "unknown field 'kkk"),
        (with_first(GOOD, name=["n" * 100_000]), ["solve", "FILE", "--mem", "99"], "a block's name is text"),
        (GOOD, ["simulate", "FILE", "F" * 100_000], "unknown token 'FFF"),
        (GOOD, ["solve", "FILE", "--mem", "9" * 100_000], "is not a number of bytes"),
        (GOOD, ["solve", "FILE", "--mem", "99", "--solver", "s" * 100_000], "unknown solver 'sss"),
        (GOOD, ["solve", "f" * 100_000, "--mem", "99"], "cannot read"),
        (GOOD, ["g" * 100_000], "invalid choice"),
        (JOIN, ["solve", "FILE", "--mem", "99", "--effort", "-1"], "effort is -1"),
        (GOOD, ["guess"], "invalid choice"),
        (GOOD, [], "required"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(chain_file, capsys, chain, arguments, says):
    path = chain_file(chain)
    status = main([path if argument == "FILE" else argument for argument in arguments])
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    (line,) = (line for line in printed.err.splitlines() if not line.endswith("s so far"))  # of a slow machine
    assert len(line) < 1200
    assert says in line


def test_a_join_of_many_towers_is_solved_within_the_effort_about(chain_file, capsys):
    blocks = [
        {"forward_time": 1 + k, "backward_time": 2, "output_bytes": 4000, "saved_bytes": 9000 + 37 * k}
        for k in range(4)
    ]
    path = chain_file({"branches": [{"input_bytes": 4000, "blocks": blocks}] * 100})
    began = time.monotonic()
    assert main(["solve", path, "--mem", "1.6MB", "--effort", "0.3", "--json"]) == 0
    assert time.monotonic() - began < 15
    assert json.loads(capsys.readouterr().out)["peak"] <= 1_600_000
    assert main(["solve", path, "--mem", "3kB", "--effort", "0.3"]) == 2
    least = capsys.readouterr().err.split("the least that does is ")[1].split()[0]
    assert main(["solve", path, "--mem", least, "--effort", "0.3"]) == 0


def test_plan_takes_its_options(capsys, monkeypatch):
    asked = {}
    import fxremat.api

    monkeypatch.setattr("fxremat.api.plan", functools.partial(record, asked, fxremat.api.plan))
    options = ["--solver", "persistent", "--effort", "0", "--slots", "50", "--device", "H100"]
    assert main(["plan", "tests.test_main:model_and_inputs", "--mem", "100%", *options, "--full"]) == 0
    search = Search(seconds=0.0, slots=50)
    assert asked == {"mem": "100%", "solver": "persistent", "search": search, "costs": "H100"}
    assert "fxremat plan for H100 (estimated times)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "name"), [("/usr/bin/fxremat", "fxremat"), ("/x/fxremat/__main__.py", "python -m fxremat")]
)
def test_the_program_is_called_what_it_was_called(monkeypatch, capsys, argv, name):
    monkeypatch.setattr(sys, "argv", [argv])
    assert main([]) == 2
    assert capsys.readouterr().err.rstrip().endswith(f"see {name} --help")


def test_devices_are_listed(capsys):
    assert main(["devices"]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line}
    assert rows["RTX-4090"][1:6] == ["24.0", "GiB", "82.6", "165.2", "1008"]
    assert rows["A100"][1:3] == ["80.0", "GiB"]
    assert main(["devices", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {device["name"]: device["memory"] for device in listed}["H100"] == 81559 * 2**20
    assert all(device["source"] for device in listed)


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"fxremat {fxremat.__version__}\n")


def test_the_console_script_is_this_program(monkeypatch):
    scripts = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["fxremat"].split(":")
    monkeypatch.setattr(sys, "argv", ["fxremat", "solve"])
    with pytest.raises(SystemExit) as ended:
        getattr(importlib.import_module(module), function)()
    assert ended.value.code == 2


def test_solving_imports_no_torch(chain_file):
    script = (
        "import sys; from fxremat.__main__ import main; "
        f"main(['solve', {chain_file(GOOD)!r}, '--mem', '99']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, capture_output=True).returncode == 0


# what `python -m fxremat` runs, once everything is imported
READY = "import runpy, fxremat.solvers; print('ready', flush=True); runpy.run_module('fxremat', run_name='__main__')"


def long_solve(chain_file, stderr):
    """A solve that takes far longer than any test waits, as a process that has begun with it."""
    path = chain_file(uneven(340).to_json())
    link = ["--solver", "pofo", "--to-host", "1e6", "--from-host", "1e6"]
    process = subprocess.Popen(
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # ignored where the tests run in background
        args=[sys.executable, "-c", READY, "solve", path, "--mem", "1GB", *link],
        stdout=subprocess.PIPE,
        stderr=stderr,
    )
    assert process.stdout.readline() == b"ready\n"
    return process


def interrupt(process):
    """Its exit status and what it printed to a pipe, soon."""
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)  # what is being compiled ends first
    return process.returncode, out, err


@pytest.mark.long
def test_no_bar_shows_where_there_is_no_terminal():
    loop = "import time\nfor _ in progress(range(30), 'a bar'): time.sleep(0.1)"
    script = f"from fxremat.progress import progress\n{loop}"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert (ran.stdout, ran.stderr) == (b"", b"")


def window():
    """A terminal that is large enough for a bar: its two ends."""
    master, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    return master, terminal


def read_until(master, word, seconds):
    """Read a terminal until `word` is shown, or for so many seconds."""
    shown, deadline = b"", time.monotonic() + seconds
    while word not in shown and select.select([master], [], [], max(0.0, deadline - time.monotonic()))[0]:
        shown += os.read(master, 4096)
    return shown


def test_an_interrupt_ends_a_solve_at_once(chain_file):
    process = long_solve(chain_file, subprocess.PIPE)
    time.sleep(4)
    assert interrupt(process) == (130, b"", b"fxremat: interrupted\n")  # and no bar, as this is no terminal


@pytest.mark.long
def test_a_bar_shows_on_a_terminal_past_two_seconds(chain_file):
    master, terminal = window()
    begin = time.monotonic()
    process = long_solve(chain_file, terminal)
    os.close(terminal)
    assert b"pofo" in read_until(master, b"pofo", 60)
    assert time.monotonic() - begin >= 2
    assert interrupt(process)[:2] == (130, b"")
    shown = read_until(master, b"interrupted", 2)
    assert b"fxremat: interrupted" in shown
    assert b"Traceback" not in shown


def test_no_bar_shows_for_a_quick_solve(chain_file):
    master, terminal = window()
    asked = [
        "solve",
        chain_file(uneven(20).to_json()),
        "--mem",
        "60MB",
        "--solver",
        "persistent",
        "--slots",
        "50",
    ]
    command = [sys.executable, "-m", "fxremat", *asked]
    assert subprocess.run(command, stdout=subprocess.DEVNULL, stderr=terminal, check=False).returncode == 0
    assert read_until(master, b"anything", 0) == b""


def wrong_inputs():
    model, _ = model_and_inputs()
    return model, (1, 2, 3, 4)


def test_a_model_that_fails_on_its_inputs_is_told_of_in_one_line(capsys):
    assert main(["plan", "tests.test_main:wrong_inputs", "--mem", "100%"]) == 2
    said = capsys.readouterr().err
    assert "the model fails on these inputs: TypeError: " in said
    assert "Traceback" not in said
