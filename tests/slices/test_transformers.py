"""Models of the library `transformers` with labels, small but for their vocabularies: the head is found and cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks.meter import peak_bytes
from fxremat.settings import Search, Slices
from tests.slices.test_models import CLOSE, PREDICTED, error, gradients_after, ulps

pytestmark = [
    pytest.mark.usefixtures("torch_ready"),
    pytest.mark.filterwarnings("ignore:::transformers"),
    pytest.mark.long,
]

WIDTH, BATCH, TOKENS = 64, 4, 128


def gpt2() -> nn.Module:
    import transformers

    config = transformers.GPT2Config(vocab_size=50257, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=TOKENS)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    import transformers

    sizes = {"d_model": WIDTH, "d_kv": 16, "d_ff": 2 * WIDTH, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(vocab_size=32128, decoder_start_token_id=0, pad_token_id=0, **sizes)
    return transformers.T5ForConditionalGeneration(config)


def bert() -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        vocab_size=30522,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=2 * WIDTH,
    )
    return transformers.BertForMaskedLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"gpt2": gpt2, "llama": llama, "t5": t5, "bert": bert}
HEADS = {"gpt2": "lm_head", "llama": "lm_head", "t5": "lm_head", "bert": "cls.predictions.decoder"}


@pytest.mark.parametrize(("outputs", "mem"), [("all", "45%"), ("loss", "30%")])
@pytest.mark.parametrize("name", MODELS)
def test_the_head_of_a_model_with_labels_runs_in_slices(name: str, outputs: str, mem: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().train()
    tokens = torch.randint(0, model.config.vocab_size, (BATCH, TOKENS))  # type: ignore[union-attr,arg-type]
    labels = tokens.clone()
    labels[:, :7] = -100
    batch: dict[str, Any] = {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}

    def step_of(module: nn.Module) -> Callable[[], Tensor]:
        def step() -> Tensor:
            torch.manual_seed(7)
            loss: Tensor = module(**batch).loss
            loss.backward()
            return loss.detach()

        return step

    plain = gradients_after(model, step_of(model))
    loss = step_of(model)()
    compiled = fxremat.compile(
        model, mem=mem, search=Search(seconds=0.0), slices=Slices(drop_outputs=outputs == "loss"), example_inputs=batch
    )
    step, plan = step_of(compiled), compiled.plan
    assert HEADS[name] in {region.where for region in plan.slices}
    ours = gradients_after(model, step)
    assert ulps(step(), loss) <= 1
    assert {key for key in plain if error(ours[key], plain[key]) > CLOSE} == set()
    model.zero_grad(set_to_none=True)
    peak = peak_bytes(step)
    assert peak <= plan.budget
    assert plan.predicted_peak == pytest.approx(peak, rel=PREDICTED)
    model.zero_grad(set_to_none=True)
    output = compiled(**batch)
    assert output.logits.shape == (BATCH, TOKENS, model.config.vocab_size)  # type: ignore[union-attr]
    assert bool(output.logits.isnan().all()) == (outputs == "loss")
