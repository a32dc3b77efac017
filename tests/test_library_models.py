"""Forty models of timm and transformers train a step at batch 1 and 2 inside two budgets: the plain models' bits.

Widths are the libraries' own where that is quick enough; depths are cut and images are small. What decides here is
the variety of ops and layouts, and a batch of 1 is where layouts differ that are equal in every larger batch. Where
torch.compile(backend="aot_eager") computes something else than eager PyTorch, its bits are those to have.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from benchmarks.meter import peak_bytes
from fxremat.settings import Search
from fxremat.torch_private import capture_settings
from tests.steps import Step, differences, step_of

pytestmark = [
    pytest.mark.usefixtures("torch_ready"),
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # of the libraries
]

BATCHES = (1, 2)
CLASSES = 10
WORDS = 128
QUICK: Any = {"search": Search(seconds=0.0, slots=100)}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model of a library, what it is called with, and its loss."""

    build: Callable[[], nn.Module]
    batch: dict[str, Any]
    loss: Callable[[Any], Tensor]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().train()

    def step(self, model: nn.Module) -> Step:
        return step_of(model, lambda: model(**self.batch), self.loss)

    def captured_step(self) -> Step:
        """The step under aot_eager. Models of transformers put hooks in place when first called, which no graph can."""
        model = self.model()
        with torch.no_grad():
            model.eval()(**self.batch)
        compiled: Any = torch.compile(model.train(), backend="aot_eager", fullgraph=True, dynamic=False)
        with capture_settings():
            return step_of(model, lambda: compiled(**self.batch), self.loss)

    def peak(self, model: nn.Module) -> int:
        """Bytes of a step after the second: the first changes the configuration of a classifier, so that the second is
        traced again."""

        def step() -> Any:
            outputs = model(**self.batch)
            self.loss(outputs).backward()
            return outputs

        model.zero_grad(set_to_none=True)
        step()
        model.zero_grad(set_to_none=True)
        return peak_bytes(step)


def check(case: Trained) -> None:
    """Train at "100%", and at a quarter of the way from the least budget to that."""
    plain = case.step(case.model())
    captured: list[Step] = []  # aot_eager's step, where it was needed

    def as_it_should_be(step: Step) -> None:
        if not differences(step, plain):
            return
        if not captured:
            torch._dynamo.reset()
            captured.append(case.captured_step())
        assert differences(step, captured[0]) == []

    def trained(mem: int | str) -> fxremat.Plan:
        torch._dynamo.reset()
        compiled = fxremat.compile(case.model(), mem, **QUICK)
        as_it_should_be(case.step(compiled))
        assert compiled.plan is not None
        assert case.peak(compiled) <= compiled.plan.budget
        return compiled.plan

    everything = trained("100%")
    trained(everything.minimum + (everything.keep_all_peak - everything.minimum) // 4)


def drawn(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- timm: the loss is outside of the model -----------------------------------------------------------------

ONCE = (1, 1, 1, 1)  # blocks of each stage
DROP = {"drop_path_rate": 0.2, "drop_rate": 0.1}

TIMM: dict[str, tuple[int, dict[str, Any]]] = {  # side of the images, options
    "seresnet50": (64, {"layers": ONCE}),  # squeeze and excite
    "densenet121": (64, {"block_config": (2, 2, 2, 2)}),
    "inception_next_atto": (64, {"depths": ONCE, **DROP}),  # branches of depthwise convolutions
    "repvgg_a0": (64, {}),
    "mobilenetv3_small_050": (64, DROP),  # depthwise
    "nf_resnet26": (32, {}),  # standardized weights, no normalization
    "convnext_atto": (64, {"depths": ONCE, **DROP}),
    "edgenext_xx_small": (64, {"depths": ONCE}),  # attention over channels
    "poolformer_s12": (32, DROP),  # GroupNorm, and pooling in place of attention
    "vit_tiny_patch16_224": (64, {"depth": 2, "img_size": 64, "pos_drop_rate": 0.1, **DROP}),
    "beit_base_patch16_224": (64, {"depth": 2, "img_size": 64, "embed_dim": 192, "num_heads": 3}),
    "cait_xxs24_224": (64, {"depth": 2, "img_size": 64, **DROP}),
    "xcit_nano_12_p16_224": (64, {"depth": 2, **DROP}),
    "swin_tiny_patch4_window7_224": (56, {"img_size": 56, "depths": (2, 2), "num_heads": (3, 6), **DROP}),
    "twins_svt_small": (224, {"depths": ONCE, **DROP}),
    "maxvit_rmlp_pico_rw_256": (64, {"img_size": 64, "depths": ONCE}),
    "coatnet_pico_rw_224": (64, {"img_size": 64, "depths": ONCE}),
    "mixer_s32_224": (64, {"img_size": 64, **DROP}),
    "resmlp_12_224": (64, {"img_size": 64}),
    "efficientformer_l1": (224, {"depths": ONCE}),
}


def timm_case(name: str, batch: int) -> Trained:
    timm = pytest.importorskip("timm")
    side, options = TIMM[name]
    labels = torch.randint(CLASSES, (batch,), generator=drawn())
    return Trained(
        build=lambda: timm.create_model(name, num_classes=CLASSES, **options),
        batch={"x": torch.randn(batch, 3, side, side, generator=drawn())},
        loss=lambda logits: F.cross_entropy(logits, labels),
    )


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", TIMM)
def test_timm(name: str, batch: int) -> None:
    check(timm_case(name, batch))


# --- transformers: the loss is inside -----------------------------------------------------------------------

CASES = (
    *("llama", "qwen3", "gemma2", "mixtral", "falcon", "opt", "bloom", "gpt_neox", "mamba"),
    *("bert_classifier", "albert", "electra", "deberta_v2", "t5", "bart", "whisper"),
    *("vit", "swin", "segformer", "clip"),
)
"""Those of the benchmarks, in their small size."""


def benchmark_case(name: str, batch: int) -> Trained:
    from benchmarks.models import libraries

    case = libraries.get(name, "small")
    return Trained(
        build=case.build,
        batch={key: value[:batch] if isinstance(value, Tensor) else value for key, value in case.batch().items()},
        loss=lambda outputs: outputs.loss,
    )


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", CASES)
def test_transformers(name: str, batch: int) -> None:
    check(benchmark_case(name, batch))


def xlm_case(batch: int) -> Trained:
    """A model that checks a number of its data on the way."""
    transformers = pytest.importorskip("transformers")
    config = transformers.XLMConfig(
        vocab_size=WORDS, emb_dim=32, n_layers=2, n_heads=2, max_position_embeddings=32, num_labels=CLASSES
    )
    words = torch.randint(5, WORDS, (batch, 16), generator=drawn())
    labels = torch.randint(CLASSES, (batch,), generator=drawn())
    return Trained(
        build=lambda: transformers.XLMForSequenceClassification(config),
        batch={"input_ids": words, "attention_mask": torch.ones_like(words), "labels": labels},
        loss=lambda outputs: outputs.loss,
    )


@pytest.mark.parametrize("batch", BATCHES)
def test_a_model_that_reads_a_number(batch: int) -> None:
    check(xlm_case(batch))
