"""`--shard tp`: the part of one device is what transformers gives to a rank, and its step takes what a rank's takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import fxremat
from fxremat.errors import FxrematError
from fxremat.fitting.loading import load
from fxremat.fitting.settings import Training
from fxremat.fitting.tensor_parallel import NOTE
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library
KINDS = {
    "llama-3-8b": ("LlamaConfig", {"tie_word_embeddings": False}),
    "gemma-2-2b": ("Gemma2Config", {"query_pre_attn_scalar": 16}),
    "qwen-3-8b": ("Qwen3Config", {"tie_word_embeddings": False}),
}
CONFIG = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300,
}  # fmt: skip
TOKENS = (4, 64)
TWO = Training(batch=TOKENS[0], length=TOKENS[1], dtype="fp32", devices=2, shard="tp")


def _rank(rank: int, world: int, folder: str) -> tuple[int, int, bool]:
    """Return the bytes of a rank's weights, and the peak of its step without recomputation; and whether bits are equal.
    """
    import transformers

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32)
    model.config.use_cache = False
    model.train()
    ids = torch.arange(TOKENS[0] * TOKENS[1]).view(TOKENS) % 300

    def step(one: Any) -> list[torch.Tensor]:
        one.zero_grad(set_to_none=True)
        one(input_ids=ids, labels=ids).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    expected = step(model)
    ours = fxremat.compile(model, mem="70%", search=fxremat.Search(seconds=0.2, progress=False))
    found = [torch.equal(_local(a), _local(b)) for a, b in zip(step(ours), expected, strict=True)]
    return sum(_local(p).nbytes for p in model.parameters()), ours.plan.keep_all_peak, all(found)


def _local(tensor: Any) -> torch.Tensor:
    part: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_the_part_of_one_device_is_that_of_a_rank(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    kind, settings = KINDS[name]
    config = getattr(transformers, kind)(**CONFIG, **settings)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    weights, peak, equal = run_ranks(_rank, 2, tmp_path, str(tmp_path / "model"))[0]
    assert equal
    loaded = load(name, None, TWO, CONFIG | settings)
    assert sum(parameter.nbytes for parameter in loaded.model.parameters()) == weights
    alone = fxremat.plan(loaded.model, loaded.inputs, mem="100%", costs="cpu", search=fxremat.Search(progress=False))
    assert alone.keep_all_peak == pytest.approx(peak, rel=0.03)


def test_what_a_plan_does_not_divide_is_refused() -> None:
    pytest.importorskip("transformers")
    answer = fxremat.fits("llama-3-8b", on="H100", config=CONFIG, length=32, devices=2, shard="tp")
    assert NOTE in str(answer)
    assert 'tp_plan="auto"' in answer.calls["PyTorch"]
    with pytest.raises(FxrematError, match="num_attention_heads is 4, and 3 devices do not divide it"):
        fxremat.fits("llama-3-8b", on="H100", config=CONFIG, devices=3, shard="tp")
    with pytest.raises(FxrematError, match="transformers has none for GPT2LMHeadModel"):
        fxremat.fits("gpt2", on="H100", devices=2, shard="tp")
    with pytest.raises(FxrematError, match=r"query_key_value.weight has .* numbers on one of 2 devices"):
        own = {name: value for name, value in CONFIG.items() if name != "num_key_value_heads"}
        fxremat.fits("pythia-1.4b", on="H100", config=own, devices=2, shard="tp")
    with pytest.raises(FxrematError, match='shard="tp" is answered for train="full"'):
        Training(devices=2, shard="tp", train="lora")
    with pytest.raises(FxrematError, match="is for models of transformers"):
        fxremat.fits(torch.nn.Linear(2, 2), inputs=torch.ones(2, 2), on="H100", devices=2, shard="tp")
