"""The command line: the contract's JSON, and one line on stderr with exit 2 for everything that is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fxremat.__main__ import main

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


GOOD = VECTORS[2]["chain"]


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
        (GOOD, ["solve", "FILE", "--mem", "99", "--to-host", "nan"], "to_host"),
        (GOOD, ["simulate", "FILE", "Fck1 Fwhat2"], "'Fwhat2'"),
        (GOOD, ["simulate", "FILE", "Fall1"], "ends before"),
        (GOOD, ["solve", "missing.json", "--mem", "99"], "missing.json"),
        ("{", ["solve", "FILE", "--mem", "99"], "must be JSON"),
        ('{"input_bytes": NaN, "blocks": []}', ["solve", "FILE", "--mem", "99"], "blocks is empty"),
        (GOOD | {"input_bytes": float("nan")}, ["solve", "FILE", "--mem", "99"], "input_bytes is nan"),
        (GOOD | {"input_bytes": -1}, ["solve", "FILE", "--mem", "99"], "input_bytes is -1"),
        (GOOD, ["plan", "nocolon", "--mem", "1GiB"], "package.module:factory"),
        (GOOD, ["plan", "no.such.module:f", "--mem", "1GiB"], "no.such.module"),
        (GOOD, ["guess"], "invalid choice"),
        (GOOD, [], "required"),
    ],
)  # fmt: skip
def test_wrong_input_is_one_line(chain_file, capsys, chain, arguments, says):
    path = chain_file(chain)
    status = main([path if argument == "FILE" else argument for argument in arguments])
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert printed.err.count("\n") == 1
    assert says in printed.err


def test_solving_imports_no_torch(chain_file):
    script = (
        "import sys; from fxremat.__main__ import main; "
        f"main(['solve', {chain_file(GOOD)!r}, '--mem', '99']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False, capture_output=True).returncode == 0
