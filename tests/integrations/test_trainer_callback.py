"""`RematCallback`: trainers train models that they make themselves within a budget, with the bits of plain training."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxremat

transformers = pytest.importorskip("transformers")

from fxremat.integrations.in_place import InPlace  # noqa: E402
from fxremat.integrations.transformers import RematCallback  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("torch_ready"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]
QUICK = fxremat.Search(seconds=0.2, progress=False)


def gpt2() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=1
    )
    config.loss_type = "ForCausalLM"
    return transformers.GPT2LMHeadModel(config)


def trained(callback: RematCallback | None, folder: Path, **settings: Any) -> Any:
    """The trainer after a few steps; the model is made by `model_init`."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=3, logging_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True, **{"save_strategy": "no", **settings},
    )  # fmt: skip
    tokens = torch.randint(128, (24, 32), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = transformers.Trainer(
        model_init=gpt2, args=arguments, train_dataset=data, eval_dataset=data[:4],
        callbacks=[callback] if callback else None,
    )  # fmt: skip
    trainer.train()
    return trainer


def logged(trainer: Any) -> list[float]:
    keys = ("loss", "eval_loss", "grad_norm")
    return [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]


def assert_same(ours: Any, plain: Any) -> None:
    assert logged(ours) == logged(plain)
    pairs = zip(ours.model.parameters(), plain.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"bf16": True}, marks=pytest.mark.long),
        pytest.param({"gradient_accumulation_steps": 2}, marks=pytest.mark.long),
        {"eval_strategy": "steps", "eval_steps": 2, "max_grad_norm": 0.01},
    ],
    ids=str,
)
def test_a_trainer_with_the_callback_trains_as_without(settings: dict[str, Any], tmp_path: Path) -> None:
    callback = RematCallback(mem="65%", search=QUICK)
    ours, plain = trained(callback, tmp_path, **settings), trained(None, tmp_path, **settings)
    assert_same(ours, plain)
    assert callback.plan.predicted_peak <= callback.plan.budget < callback.plan.keep_all_peak
    assert type(ours.model) is transformers.GPT2LMHeadModel
    assert "_compiled_call_impl" not in ours.model.__dict__


def test_all_of_the_device_counts_the_trainers_optimizer(tmp_path: Path) -> None:
    callback = RematCallback(device_mem="3MiB", search=QUICK)
    ours, plain = trained(callback, tmp_path), trained(None, tmp_path)
    assert_same(ours, plain)
    memory = callback.plan.on_device
    assert memory.optimizer == "AdamW"
    assert memory.total == 3 * 2**20
    parameters = [*ours.model.parameters()]
    numbers = memory.state - 2 * sum(p.nbytes for p in parameters)  # such as counts of steps
    assert 0 <= numbers <= 32 * len(parameters)


def test_checkpoints_are_those_of_the_plain_library(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        ours = trained(
            RematCallback(mem="65%", search=QUICK), tmp_path, save_strategy="steps", save_steps=3,
            gradient_checkpointing=True,
        )  # fmt: skip
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-3")
    assert all(map(torch.equal, again.parameters(), ours.model.parameters()))
    assert "gradient_checkpointing is turned off" in caplog.text
    assert not ours.model.is_gradient_checkpointing
    assert any("allowed" in record.message for record in caplog.records)


def test_compiling_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fxremat.FxrematError, match="RematCallback goes without it"):
        trained(RematCallback(mem="65%"), tmp_path, torch_compile=True)
    with pytest.raises(fxremat.FxrematError, match=r"compiled by fxremat\.compile already"):
        InPlace(fxremat.compile(nn.Linear(2, 2), mem="1MiB"), "1MiB")
    model = nn.Linear(2, 2)
    first = InPlace(model, "1MiB")
    with pytest.raises(fxremat.FxrematError, match=r"another callback.*inside\.remove\(\)"):
        InPlace(model, "1MiB")
    first.remove()
    model.compile()
    with pytest.raises(fxremat.FxrematError, match=r"Linear.compile\(\) was called already"):
        InPlace(model, "1MiB")
    with pytest.raises(fxremat.InvalidBudget):
        InPlace(nn.Linear(2, 2), "many")


def test_in_place_until_removed() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    inside = InPlace(model, "8MiB", search=QUICK)
    plain = copy.deepcopy(model)
    x = torch.randn(4, 8)
    for one in (model, plain):
        one(x).square().mean().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    plan = inside.plan
    assert plan is not None
    inside.remove()
    inside.remove()
    model(x.repeat(2, 1)).square().mean().backward()
    assert inside.plan is plan


@pytest.mark.long
@pytest.mark.parametrize("kind", ["sft", "sft with LoRA", "dpo", "reward", "grpo"])
def test_trainers_of_trl_with_a_model_by_name(kind: str, tmp_path: Path) -> None:
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    datasets, tokenizers = pytest.importorskip("datasets"), pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["[PAD]", "[EOS]", "[UNK]", *"abcdefghijklm"])}
    whole = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    whole.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=whole, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]"
    )
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    settings: dict[str, Any] = {
        "output_dir": str(tmp_path / "run"), "per_device_train_batch_size": 2, "max_steps": 3, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    given: dict[str, Any] = {"model": str(tmp_path / "llama"), "processing_class": tokenizer}
    texts = {"prompt": ["a b c"] * 8, "chosen": ["d e f"] * 8, "rejected": ["g h"] * 8}
    if kind == "dpo":
        make, arguments = trl.DPOTrainer, trl.DPOConfig(**settings)
    elif kind == "reward":
        make, arguments = trl.RewardTrainer, trl.RewardConfig(**settings)
    elif kind == "grpo":
        texts = {"prompt": ["a b c"] * 8}
        given["reward_funcs"] = lambda completions, **_: [float(len(text)) for text in completions]
        make, arguments = trl.GRPOTrainer, trl.GRPOConfig(num_generations=2, max_completion_length=8, **settings)
    else:
        texts = {"text": ["a b c d e f g h i j k l"] * 8}
        make, arguments = trl.SFTTrainer, trl.SFTConfig(**settings)
    if kind == "sft with LoRA":
        given["peft_config"] = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    found = []
    for callbacks in (None, [RematCallback(mem="80%", search=QUICK)]):
        torch.manual_seed(1)
        trainer = make(args=arguments, train_dataset=datasets.Dataset.from_dict(texts), callbacks=callbacks, **given)
        trainer.train()
        found.append(trainer)
    assert_same(found[1], found[0])
    plan = callbacks[0].plan  # type: ignore[index]
    assert plan.predicted_peak <= plan.budget < plan.keep_all_peak
