"""Ask `fxremat fits` for every configuration that comes with fxremat on eight devices, and for its largest batches.

    python -m benchmarks.atlas                       asks for all of them, each in a process of its own (an hour)
    python -m benchmarks.atlas llama-3-8b vit-h      asks for these; records of others stay as they are
    python -m benchmarks.atlas --train lora          trains adapters of the language models of `ADAPTED`; or qlora
    python -m benchmarks.atlas --published           computes what others have measured on GPUs (`PUBLISHED`)
    python -m benchmarks.readme                      puts the tables into docs/atlas.md

A model is asked for at its configuration's own length, in bfloat16 with AdamW. Batches are doubled until no device has
the memory that the model takes at least, with everything on the device.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.fits import CONFIGS, ROOT

OUT = ROOT / "benchmarks" / "results" / "atlas.json"
DEVICES = ("RTX-4080", "RTX-4090", "RTX-5090", "A100-40GB", "L40S", "H100", "H200", "MI300X")
ADAPTED = (
    "llama-3.2-3b", "mistral-7b", "qwen-2.5-7b", "qwen-3-8b", "llama-3-8b", "gemma-2-9b", "phi-4", "qwen-2.5-32b",
)  # fmt: skip
BERT = {"architectures": ["BertForSequenceClassification"], "_attn_implementation": "eager"}
"""The model of `PUBLISHED`, with the attention that transformers had in 2022."""
CONTEXT = 1343 * 2**20  # bytes of CUDA's context, which the source of `PUBLISHED` measured
PUBLISHED: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("batch 4", {"batch": 4}, 14949),
    ("batch 1, 4 backwards a step", {"accumulate": 4}, 8681),
    ("batch 4, Adafactor", {"batch": 4, "optimizer": "adafactor"}, 12295),
)
"""BERT-large of length 512 in float32 on a V100, and MiB that nvidia-smi showed after a training run.

https://huggingface.co/docs/transformers/v4.19.2/en/performance; gradients stayed allocated between steps, since
`zero_grad` filled them with zeros then.
"""
LARGEST = 256  # batches above it are not tried
TRAININGS = ("full", "lora", "qlora")


def asked(name: str, train: str) -> dict[str, Any]:
    """Return the row of a configuration, or why there is none; it takes a minute or two."""
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.atlas", name, "--train", train, "--here"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if run.returncode:
        return {"config": name, "train": train, "error": run.stderr.strip().splitlines()[-1]}
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    return found


def row_of(name: str, train: str) -> dict[str, Any]:
    """Return what a configuration takes on each device with one example, and at least with more."""
    from fxremat import fits
    from fxremat.fitting import device_with_memory, needed
    from fxremat.fitting.settings import Training

    began = time.monotonic()
    answers = fits(name, on=DEVICES, train=train)
    largest = max(answer.device.memory or 0 for answer in answers)
    least, batch, device = {1: answers[0].room.least}, 2, device_with_memory(DEVICES[-1])
    while batch <= LARGEST and max(least.values()) <= largest:
        least[batch] = needed(name, Training(batch=batch, train=train), {}, device)
        batch *= 2
    parameters = sum(p.numel() for p in answers[0].loaded.model.parameters())
    return {
        "config": name,
        "train": train,
        "parameters": parameters,
        "sizes": {key: size for key, size in answers[0].loaded.sizes.items() if key != "batch"},
        "least": least,
        "answers": [answer_on(answer, least) for answer in answers],
        "seconds": time.monotonic() - began,
    }


def answer_on(answer: Any, least: Mapping[int, int]) -> dict[str, Any]:
    """Return the record of the answer for one device."""
    way = answer.way
    memory = answer.device.memory
    return {
        "device": answer.device.name,
        "memory": memory,
        "fits": answer.fits,
        "total": answer.ledger.total,
        "offloaded": way.how if way else "",
        "slowdown": way.slowdown if way else None,
        "batch": max((batch for batch, size in least.items() if size <= memory), default=None),
    }


def compared() -> list[dict[str, Any]]:
    """Return what others have measured, with what `fits` computes for the same."""
    from fxremat import fits

    rows = []
    for what, settings, measured in PUBLISHED:
        waiting: Any = {"accumulate": 2} | settings  # gradients are there during forward and backward
        answer = fits("bert-large", on="V100", dtype="fp32", length=512, config=BERT, **waiting)
        context = next(size for name, size in answer.ledger.rows if name.startswith("CUDA context"))
        computed = answer.room.everything - context + CONTEXT
        rows.append({"what": what, "measured": measured * 2**20, "computed": computed})
    return rows


def published(record: str) -> str:
    """Return the table of what others have measured as Markdown."""
    found = json.loads(record)
    lines = ["| BERT-large, float32, length 512, V100 | measured | computed | difference |", "|---|---|---|---|"]
    for row in found["published"]:
        measured, computed = row["measured"], row["computed"]
        sizes = f"{measured / 2**20:,.0f} MiB | {computed / 2**20:,.0f} MiB"
        lines.append(f"| {row['what']} | {sizes} | {100 * (computed / measured - 1):+.0f} % |")
    return "\n".join([*lines, "", "Computed by `python -m benchmarks.atlas --published`."])


def page(record: str, train: str) -> str:
    """Return the table of one way to train as Markdown."""
    found = json.loads(record)
    sizes = {row["config"]: row.get("parameters", 0) for row in found["rows"] if row["train"] == "full"}
    rows = [row | {"parameters": sizes[row["config"]]} for row in found["rows"] if row["train"] == train]
    rows.sort(key=_order)
    if not rows:
        return ""
    heads = ["MODEL", "size", *(f"{name} {memory}" for name, memory in _memories(rows))]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    command = "python -m benchmarks.atlas" + (f" --train {train}" if train != "full" else "")
    lines += ["", f"Computed on {found['date']}, torch {found['torch']}: `{command}`."]
    return "\n".join(lines)


def _order(row: Mapping[str, Any]) -> int:
    return int(row.get("parameters", 0))


def _memories(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    answers = next(row["answers"] for row in rows if "answers" in row)
    return [(each["device"], f"{each['memory'] / 2**30:.0f} GiB") for each in answers]


def _cells(row: Mapping[str, Any]) -> list[str]:
    if "error" in row:
        return [f"`{row['config']}`", row["error"], *[""] * len(DEVICES)]
    sizes = ", ".join(f"{key} {size}" for key, size in row["sizes"].items())
    return [f"`{row['config']}`", f"{_count(row['parameters'])}, {sizes}", *map(_cell, row["answers"])]


def _cell(answer: Mapping[str, Any]) -> str:
    if not answer["fits"]:
        return "no"
    slow = f"{answer['slowdown']:.2f}x"
    return f"{slow}, {answer['offloaded']}" if answer["offloaded"] else f"{slow}, to {answer['batch']}"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def main() -> None:
    """Ask for the configurations of the command line, or for all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", nargs="*")
    parser.add_argument("--train", choices=TRAININGS, default="full")
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        print(json.dumps(row_of(given.config[0], given.train)))
        return
    if given.published:
        _write(published=compared())
        return
    every = sorted(file.stem for file in CONFIGS.glob("*.json")) if given.train == "full" else ADAPTED
    for name in given.config or every:
        row = asked(name, given.train)
        print(json.dumps(row), flush=True)
        rows = json.loads(OUT.read_text())["rows"] if OUT.exists() else []
        rows = [old for old in rows if (old["config"], old["train"]) != (name, given.train)]
        _write(rows=[*rows, row])


def _write(**parts: Any) -> None:
    """Write parts of the record; the others stay as they are."""
    record = json.loads(OUT.read_text()) if OUT.exists() else {"rows": [], "published": []}
    record |= {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, **parts}
    OUT.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
