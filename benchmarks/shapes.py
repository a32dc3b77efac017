"""Measure what new input sizes cost when one capture serves them all.

    python -m benchmarks.shapes

Five small models at twelve sizes each, in one process each and one thread: seconds of the processor for the first step
(capture and first plan), for the first step at each further size beyond those of a step at a size that is known, and
how a step compares with one of a capture for that size alone (least of several rounds in turns). Then a GPT-2 of the
library `transformers` on 30 batches of random lengths through its Trainer, with and without fxremat: what planning took
is the difference.
"""

from __future__ import annotations

import copy
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fxremat.settings import Search

from . import report
from .models.resizable import KINDS, Kind, loss_of

ROUNDS = 15
MOST_NEW = 0.2  # seconds of a new size
MOST_TRAINING = 20.0  # seconds of planning for 30 random lengths
LENGTHS, WORDS = (8, 120), 60
RESULTS = Path(__file__).parent / "results" / "shapes.json"


def main() -> None:
    """Measure every row in a process of its own, print and keep it."""
    if sys.argv[1:2] == ["--worker"]:
        torch.set_num_threads(1)
        name = sys.argv[2]
        print(json.dumps(_training() if name == "training" else _row(KINDS[name])))
        return
    found = {name: _in_a_process(name) for name in KINDS}
    for name, row in found.items():
        held = "held" if row["slowest"] <= MOST_NEW else "NOT HELD"
        print(
            f"{name}: first step {row['first']:.1f} s, all captures {row['captures']:.1f} s; a new size "
            f"{row['median']:.3f} s, at most {row['slowest']:.3f} s: {held}; {row['from_nothing']} of 12 sizes planned "
            f"from nothing; a step takes {row['step']:.3f} of one that was captured for its size"
        )
    training = _in_a_process("training")
    held = "held" if training["planning"] <= MOST_TRAINING else "NOT HELD"
    print(f"30 lengths through Trainer: {training['planning']:.1f} s of planning and capture: {held}")
    record = {"conditions": report.machine(), "kinds": found, "training": training}
    RESULTS.write_text(json.dumps(record, indent=1) + "\n")


def _in_a_process(name: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.shapes", "--worker", name]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=root, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _seconds(model: nn.Module, inputs: Mapping[str, Tensor]) -> float:
    begin = time.process_time()
    output = model(**inputs)
    loss_of(output).backward()
    return time.process_time() - begin


def _row(kind: Kind) -> dict[str, float]:
    """The costs of one model's sizes; those that bring a capture or a plan from nothing are counted apart."""
    import fxremat
    from fxremat.planning import sizes
    from fxremat.runtime import dynamo

    events: list[str] = []
    _noting(dynamo, "normalize", "capture", events)
    _noting(sizes, "plan_from_nothing", "from nothing", events)
    torch.manual_seed(0)
    model = kind.model()
    fixed = copy.deepcopy(model)
    largest = dict(kind.inputs(kind.sizes[0]))
    whole = fxremat.plan(copy.deepcopy(model), largest, mem="100%", dynamic=False, search=Search(progress=False))
    events.clear()
    mem = int(kind.share * whole.keep_all_peak)
    compiled = fxremat.compile(model, mem=mem, search=Search(progress=False), **kind.options)
    first = _seconds(compiled, largest)
    new, captures = [], first
    for size in kind.sizes[1:]:
        inputs = kind.inputs(size)
        before = len(events)
        seconds = _seconds(compiled, inputs)
        known = min(_seconds(compiled, inputs) for _ in range(3))
        if len(events) == before:
            new.append(seconds - known)
        else:
            captures += seconds
    alone = fxremat.compile(fixed, mem=mem, dynamic=False, search=Search(progress=False))
    _seconds(alone, largest)
    turns = [(_seconds(compiled, largest), _seconds(alone, largest)) for _ in range(ROUNDS)]
    return {
        "first": first,
        "captures": captures,
        "median": statistics.median(new),
        "slowest": max(new),
        "from_nothing": events.count("from nothing"),
        "step": min(ours for ours, _ in turns) / min(theirs for _, theirs in turns),
    }


def _noting(module: Any, name: str, event: str, events: list[str]) -> None:
    """Let a function of a module note an event whenever it is called."""
    function = getattr(module, name)

    def noting(*args: Any, **kwargs: Any) -> Any:
        events.append(event)
        return function(*args, **kwargs)

    setattr(module, name, noting)


def _training() -> dict[str, float]:
    import fxremat

    seconds = [_trained(model) for model in (_gpt2(), fxremat.compile(_gpt2(), "3MB", search=Search(progress=False)))]
    return {"plain": seconds[0], "ours": seconds[1], "planning": seconds[1] - seconds[0]}


def _gpt2() -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=LENGTHS[1], n_embd=32, n_layer=3, n_head=2, loss_type="ForCausalLM"
    )
    return transformers.GPT2LMHeadModel(config)


def _trained(model: nn.Module) -> float:
    """Seconds of 30 steps through Trainer, each with a length of its own; evaluation and saving are off."""
    import transformers

    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(WORDS, (n,), generator=draw) for n in torch.randint(*LENGTHS, (90,), generator=draw).tolist()]
    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            folder, max_steps=30, per_device_train_batch_size=3, report_to=[], use_cpu=True, save_strategy="no",
            disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        trainer = transformers.Trainer(
            model, options, train_dataset=[{"input_ids": row, "labels": row} for row in rows], data_collator=_padded
        )
        begin = time.process_time()
        trainer.train()
        return time.process_time() - begin


def _padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    def pad(name: str, value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)

    mask = pad("labels", -1).ge(0).long()
    return {"input_ids": pad("input_ids", 0), "attention_mask": mask, "labels": pad("labels", -100)}


if __name__ == "__main__":
    main()
