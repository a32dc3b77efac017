"""Measure the seconds and the memory that `fxremat fits` takes for each configuration that comes with fxremat.

    python -m benchmarks.fits                        asks for all of them, each in a process of its own (ten minutes)
    python -m benchmarks.fits llama-3-8b vit-h       asks for these; records of others stay as they are
    python -m benchmarks.readme                      puts the table into docs/fits.md
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "fits.json"
CONFIGS = ROOT / "fxremat" / "fitting" / "configs"
DEVICE = "H200"
CODE = """
import json, resource, sys
from fxremat import fits
answer = fits(sys.argv[1], on=sys.argv[2])
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"line": answer.line, "cpu": used.ru_utime + used.ru_stime, "host": used.ru_maxrss * 1024}))
"""


def asked(name: str) -> dict[str, Any]:
    """Return the answer for a configuration, with the seconds and the bytes of the host that it took."""
    began = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-c", CODE, name, DEVICE], capture_output=True, text=True, cwd=ROOT, env={**os.environ}
    )
    seconds = time.monotonic() - began
    if run.returncode:
        return {"config": name, "error": run.stderr.strip().splitlines()[-1], "seconds": seconds}
    return {"config": name, "seconds": seconds, **json.loads(run.stdout.strip().splitlines()[-1])}


def page(record: str) -> str:
    """Return the table of a record as Markdown."""
    found = json.loads(record)
    lines = ["| MODEL | answer | seconds | of a processor | host memory |", "|---|---|---|---|---|"]
    lines += map(_row, found["rows"])
    lines += ["", f"Measured on {found['date']}, torch {found['torch']}, two cores: `python -m benchmarks.fits`."]
    return "\n".join(lines)


def _row(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return f"| `{row['config']}` | {row['error']} | {row['seconds']:.0f} | | |"
    cost = f"{row['seconds']:.0f} | {row['cpu']:.0f} | {row['host'] / 2**30:.1f} GiB"
    return f"| `{row['config']}` | {row['line']} | {cost} |"


def main() -> None:
    """Ask for the configurations of the command line, or for all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="*")
    every = sorted(file.stem for file in CONFIGS.glob("*.json"))
    given: Sequence[str] = parser.parse_args().config
    known = {row["config"]: row for row in json.loads(OUT.read_text())["rows"]} if OUT.exists() else {}
    for name in given or every:
        known[name] = row = asked(name)
        print(json.dumps(row), flush=True)
        record = {
            "date": time.strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "device": DEVICE,
            "rows": [known[config] for config in every if config in known],
        }
        OUT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
