"""Adapters of PEFT on frozen weights, in 16 bits and in 4: what `fits` counts is what the libraries make."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks import meter
from fxremat.errors import FxrematError
from fxremat.fitting.settings import Training

CONFIG = {
    "num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 300, "max_position_embeddings": 64,
}  # fmt: skip
OF_LIBRARIES = pytest.mark.long  # they need what `make test-long` installs
pytestmark = pytest.mark.filterwarnings("ignore")  # of one library about another


def small_llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(**CONFIG, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


def adapted(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))


def quantized(model: nn.Module) -> Any:
    """The model with the weights of all linear layers but the head in 4 bits, by bitsandbytes."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    for name, linear in [*model.named_modules()]:
        if isinstance(linear, nn.Linear) and name != "lm_head":
            made = bitsandbytes.nn.Linear4bit(
                linear.in_features, linear.out_features, False, torch.bfloat16, quant_type="nf4"
            )
            made.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
            model.set_submodule(name, made)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]
    return model.to("cpu")


def bytes_of(tensors: Any) -> int:
    """Add up the bytes of tensors as CUDA's allocator counts them."""
    return sum(-(-tensor.nbytes // 512) * 512 for tensor in tensors)


def statistics_of(model: nn.Module) -> list[Tensor]:
    states = [weight.quant_state for weight in model.parameters() if hasattr(weight, "quant_state")]
    return [
        tensor
        for state in states
        for tensor in (state.absmax, state.code, state.offset, state.state2.absmax, state.state2.code)
    ]


@OF_LIBRARIES
@pytest.mark.parametrize("train", ["lora:8", "qlora:8"])
def test_weights_and_statistics_are_those_of_the_libraries(train: str) -> None:
    real = adapted(quantized(small_llama()) if train == "qlora:8" else small_llama())
    answer = fxremat.fits("llama-3-8b", on="A100", train=train, config=CONFIG, length=64)
    parts = dict(answer.ledger.rows)
    assert parts["weights"] == bytes_of(real.parameters())
    assert parts["buffers"] == bytes_of([*real.buffers(), *statistics_of(real)])
    trained = [parameter for parameter in real.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    state = [tensor for one in optimizer.state.values() for tensor in one.values()]
    assert parts["optimizer state"] == bytes_of(state)
    assert ("quantization_config" in answer.calls["PyTorch"]) == (train == "qlora:8")


@OF_LIBRARIES
def test_a_weight_in_four_bits_is_unpacked_for_one_product_at_a_time() -> None:
    pytest.importorskip("bitsandbytes")
    answer = fxremat.fits("llama-3-8b", on="A100", train="qlora:8", config=CONFIG, length=64)
    graph, costs = answer.room.step.graph, answer.room.step.costs
    unpacked = [op.writes[0] for op in graph.ops if "dequantize_4bit" in op.target]
    largest = max(costs.sizes.values[value] for value in unpacked)
    assert len(unpacked) == 2 * 7 * 6 - 3  # no gradient goes below the adapters that read the embeddings
    lora = fxremat.fits("llama-3-8b", on="A100", train="lora:8", config=CONFIG, length=64)
    assert answer.room.frontier.keep_all.peak <= lora.room.frontier.keep_all.peak + 4 * largest


@OF_LIBRARIES
def test_a_step_of_real_weights_in_four_bits_holds_its_budget() -> None:
    torch.manual_seed(0)
    model = adapted(quantized(small_llama())).train()
    model.config.use_cache = False
    ids = torch.randint(0, 300, (2, 64))
    ours = fxremat.compile(model, mem="60%", search=fxremat.Search(seconds=0.2, progress=False))

    def step(one: nn.Module) -> list[Tensor]:
        one.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        loss = one(input_ids=ids, labels=ids).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in one.parameters() if p.grad is not None)]

    plain = copy.deepcopy(model)
    for mine, its in zip(step(ours), step(plain), strict=True):
        assert torch.equal(mine, its)
    assert meter.peak_bytes(lambda: step(ours)) <= ours.plan.budget


def test_what_cannot_be_in_four_bits_is_refused() -> None:
    with pytest.raises(FxrematError, match="train is 'qlora:x'"):
        Training(train="qlora:x")
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(FxrematError, match='train="qlora" is for models of transformers'):
        fxremat.fits(model, inputs=torch.ones(2, 8), on="A100", train="qlora")
