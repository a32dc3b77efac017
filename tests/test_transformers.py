"""Models of the library `transformers`: trained inside two budgets, the least first, they are the plain models.

A step of each is compared with the plain one's from the same seed: type and values of all that it returns, gradients,
buffers and random state; and its peak is measured. Three models every day, all others with `-m long`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxremat
from benchmarks.meter import peak_bytes
from benchmarks.models import libraries
from benchmarks.models.libraries import LibraryCase
from fxremat.settings import Search
from fxremat.torch_private import torch_release
from tests.steps import Step, differences, step_of
from tests.training import gradients_of, state_of, unequal

pytestmark = [
    pytest.mark.usefixtures("torch_ready"),
    pytest.mark.filterwarnings("ignore:::transformers"),
]

QUICK = {"search": Search(seconds=0.0)}


def step(model: nn.Module, batch: Mapping[str, Any], autocast: bool = False) -> Step:
    def call() -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(**batch)

    return step_of(model, call, lambda outputs: outputs.loss)


def assert_as_plain(
    case: LibraryCase,
    mem: int | str,
    change: Callable[[Any, dict[str, Any]], object] = lambda model, batch: None,
    autocast: bool = False,
    **options: Any,
) -> Any:
    """Returns the compiled model, planned for keyword arguments."""
    plain, model, batch = case.model(), case.model(), case.batch()
    change(plain, batch)
    change(model, {})
    torch._dynamo.reset()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        compiled = fxremat.compile(model, mem=mem, example_inputs=batch, **{**QUICK, **options})
    assert differences(step(compiled, batch, autocast), step(plain, batch, autocast)) == []
    return compiled


EVERY_DAY = ("gpt2",)  # llama is trained below, in other ways
LONG = [pytest.param(name, marks=pytest.mark.long) for name in libraries.CAPTURED if name not in EVERY_DAY]


@pytest.mark.parametrize("name", [*EVERY_DAY, *LONG])
def test_trains_inside_the_budget_as_the_plain_model(name: str) -> None:
    case = libraries.get(name, "small")
    middle = 0
    for mem in ("min", "middle"):
        compiled, batch = assert_as_plain(case, mem if mem == "min" else middle), case.batch()
        middle = (compiled.plan.minimum + compiled.plan.keep_all_peak) // 2
        step(
            compiled, batch
        )  # the first has changed the configuration of a classifier, so that it is traced again
        compiled.zero_grad(set_to_none=True)
        peak = peak_bytes(lambda compiled=compiled, batch=batch: train(compiled, batch))
        assert peak <= compiled.plan.budget


def train(model: nn.Module, batch: Mapping[str, Any]) -> object:
    outputs = model(**batch)
    outputs.loss.backward()
    return outputs


# --- what else such a model is asked to do: planned from estimates, quickly ---------------------------------


def pad(model: Any, batch: dict[str, Any]) -> None:
    if batch:
        mask = torch.ones_like(batch["input_ids"])
        mask[1, -5:] = 0
        batch.update(attention_mask=mask, labels=batch["labels"].masked_fill(mask == 0, -100))


def collect(model: Any, batch: dict[str, Any]) -> None:
    """Hidden states and attentions: what the library collects with hooks that its first call puts in place."""
    model.set_attn_implementation("eager")
    if batch:
        batch.update(output_hidden_states=True, output_attentions=True)


def own_checkpointing(model: Any, batch: dict[str, Any]) -> None:
    model.gradient_checkpointing_enable()


@pytest.mark.parametrize(
    ("name", "change"),
    [pytest.param("gpt2", pad, marks=pytest.mark.long), ("bert", collect), ("llama", own_checkpointing)],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_calls_of_many_kinds(name: str, change: Callable[[Any, dict[str, Any]], object]) -> None:
    assert_as_plain(libraries.get(name, "small"), "60%", change, costs="estimate", solver="persistent")


@pytest.mark.long
def test_autocast_with_dropout() -> None:
    case = libraries.get("gpt2", "small")
    assert_as_plain(case, "60%", autocast=True, costs="estimate", solver="persistent")


def test_without_labels_the_loss_is_outside() -> None:
    """Keys and values are returned too, and nobody differentiates them."""
    case = libraries.get("llama", "small")
    model, plain, batch = case.model(), case.model(), case.batch()
    labels = batch.pop("labels")
    compiled = fxremat.compile(model, mem="100%", costs="estimate", solver="keep_all")
    gradients = []
    for each in (compiled, plain):
        torch.manual_seed(3)
        logits = each(**batch).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        gradients.append(gradients_of(each))
    assert unequal(*gradients) == []


def test_only_the_loss_is_given_a_gradient() -> None:
    """Not the logits, which are the largest value of all, and not the keys and values."""
    case = libraries.get("gpt2", "small")
    plan = fxremat.plan(case.model(), case.batch(), mem="100%", costs="estimate", solver="keep_all")
    assert [tangent.meta["val"].shape for tangent in plan.captured.tangent_nodes] == [()]


def test_what_the_library_adds_to_a_module_is_there() -> None:
    """Its configuration, and generation with a cache, which runs the plain model."""
    case = libraries.get("gpt2", "small")
    model = case.model()
    compiled: Any = fxremat.compile(model, mem="100%")
    assert compiled.config is model.config
    words = case.batch()["input_ids"][:, :5]
    ask: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": libraries.PAD}
    expected = case.model().eval().generate(words, **ask)  # type: ignore[operator]
    assert torch.equal(compiled.eval().generate(words, **ask), expected)


@pytest.mark.parametrize(
    ("name", "line", "hint"),
    [
        ("bart_layerdrop", "self.layerdrop", "Set layerdrop to 0"),
        pytest.param("wav2vec2", "labels.max()", "compute the loss outside", marks=pytest.mark.long),
        pytest.param("detr", "isfinite", "switch that off", marks=pytest.mark.long),
        pytest.param("longformer", "is_global_attn", "values of tensors", marks=pytest.mark.long),
    ],
)
def test_what_is_not_one_graph_is_refused_with_the_line_and_the_way_out(
    name: str, line: str, hint: str
) -> None:
    case = libraries.get(name, "small")
    with pytest.raises(fxremat.CaptureError) as error:
        fxremat.plan(case.model(), case.batch(), mem="60%", fullgraph=True, **QUICK)
    text = str(error.value)
    assert "\n" not in text
    assert line in text
    assert "/transformers/models/" in text
    assert hint in text


@pytest.mark.long
def test_wav2vec2_as_its_note_says() -> None:
    case = libraries.get("wav2vec2", "small")
    model, plain, batch = case.model(), case.model(), case.batch()
    labels = batch.pop("labels")
    gradients = []
    for each in (model, plain):
        each.freeze_feature_encoder()  # type: ignore[operator]
        called = fxremat.compile(each, mem="70%", costs="estimate", **QUICK) if each is model else each
        torch.manual_seed(3)
        scores = called(**batch).logits.log_softmax(-1).transpose(0, 1)
        lengths = (torch.full((len(labels),), length) for length in (len(scores), labels.shape[1]))
        nn.functional.ctc_loss(scores, labels, *lengths).backward()
        gradients.append(gradients_of(each))
    assert unequal(*gradients) == []


@pytest.mark.long
def test_detr_as_its_note_says() -> None:
    case = libraries.get("detr", "small")
    model: Any = case.model()
    plain, batch = case.model(), case.batch()
    decoder = model.model.decoder
    model.model.decoder = fxremat.compile(decoder, mem="100%", costs="estimate", **QUICK)
    ours = step(model, batch)
    model.model.decoder = decoder
    assert unequal(ours.gradients, step(plain, batch).gradients) == []


@pytest.mark.long
def test_under_the_library_s_own_trainer(tmp_path: Path) -> None:
    """Three steps of `Trainer`: the weights are those of three plain steps."""
    import transformers

    case = libraries.get("llama", "small")
    batches = [{key: value[0] for key, value in case.batch(seed).items()} for seed in range(6)]
    trained = []
    for compiled in (False, True):
        model = case.model()
        options: Any = {"output_dir": str(tmp_path), "max_steps": 3, "per_device_train_batch_size": 2}
        arguments = transformers.TrainingArguments(
            **options, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, seed=1
        )
        trainer = transformers.Trainer(
            model=fxremat.compile(model, mem="70%", **QUICK) if compiled else model,
            args=arguments,
            train_dataset=batches,
        )
        trainer.train()
        trained.append(state_of(model))
    assert unequal(*trained) == []


@pytest.mark.long
@pytest.mark.skipif(torch_release() < (2, 13), reason="torch 2.11 does not trace this model")
def test_a_note_never_hides_the_budget_that_would_do() -> None:
    """Values of Ovis 2 are of several fake modes, where what slices would buy could once not be told."""
    from transformers import Ovis2Config, Ovis2ForConditionalGeneration

    text: dict[str, Any] = {
        "model_type": "qwen2", "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 54, "attention_dropout": 0.1,
    }  # fmt: skip
    vision: dict[str, Any] = {
        "image_size": 32, "patch_size": 8, "hidden_size": 64, "vocab_size": 99, "num_hidden_layers": 2,
        "num_attention_heads": 4, "intermediate_size": 54, "attention_dropout": 0.1, "hidden_stride": 2,
        "tokenize_function": "softmax",
    }  # fmt: skip
    sizes: dict[str, Any] = {"hidden_size": 64, "vocab_size": 99, "image_token_id": 1, "visual_indicator_token_ids": []}
    config = Ovis2Config(vision_config=vision, text_config=text, **sizes)
    tokens = torch.cat([torch.ones(2, 4, dtype=torch.long), torch.arange(3, 17).view(2, 7)], 1)
    batch = {"input_ids": tokens, "pixel_values": torch.randn(2, 3, 32, 32), "labels": tokens}
    model = Ovis2ForConditionalGeneration(config).train()
    with pytest.raises(fxremat.BudgetTooSmall) as error:
        fxremat.plan(model, batch, mem="40%", **QUICK)
    assert fxremat.plan(model, batch, mem=error.value.minimum, **QUICK).predicted_peak <= error.value.minimum
