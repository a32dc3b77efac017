"""Masks of padding that mask nothing are left out where eager mode leaves them out: bits are those of eager mode.

Where heads share keys and values, PyTorch's attention rounds its gradients otherwise with a mask.
"""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxremat
from benchmarks import meter
from benchmarks.models import libraries
from fxremat.runtime import attention_masks
from tests.steps import differences, step_of

pytestmark = [pytest.mark.usefixtures("torch_ready"), pytest.mark.filterwarnings("ignore:::transformers")]

PAD = 0


def llama() -> Any:
    """One layer of it."""
    model = libraries.get("llama", "small").model()
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0  # with which another kernel computes
    return model


def tokens(padded: int = 0) -> dict[str, Tensor]:
    batch = dict(libraries.get("llama", "small").batch())
    mask = torch.ones_like(batch["input_ids"])
    mask[1, mask.shape[1] - padded :] = 0
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def masked_in_graphs(model: Any) -> list[bool]:
    """Tell, for each plan of a compiled model with attention, whether the attention takes a mask."""
    codes = [plan.graphs[0].code for plan in model.fxremat.plans]
    return ["attn_mask" in code for code in codes if "scaled_dot_product" in code]


def compare(make: Callable[[], Any], *batches: dict[str, Tensor], autocast: bool = False, **options: Any) -> Any:
    """Take a step on each batch as plain PyTorch does; returns the compiled model."""
    plain, model = make(), make()
    compiled = fxremat.compile(model, mem="100%", costs="estimate", solver="keep_all", **options)

    def step(called: nn.Module, batch: dict[str, Tensor]) -> Any:
        def call() -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return called(**batch)

        return step_of(called, call, lambda outputs: outputs.loss)

    for batch in batches:
        assert differences(step(compiled, batch), step(plain, batch)) == []
    return compiled


@pytest.mark.parametrize("autocast", [False, pytest.param(True, marks=pytest.mark.long)])
def test_calls_with_and_without_padding_have_the_bits_of_eager_mode(autocast: bool) -> None:
    compiled = compare(llama, tokens(), tokens(padded=5), tokens(), tokens(padded=3), autocast=autocast)
    assert masked_in_graphs(compiled) == [False, True]


def test_without_a_mask() -> None:
    batch = tokens()
    del batch["attention_mask"]
    assert masked_in_graphs(compare(llama, batch)) == [False]


def test_sizes_that_change_are_captured_once(captures: list[object]) -> None:
    shorter = {name: value[:, :20].contiguous() for name, value in tokens().items()}
    compare(llama, tokens(), shorter, dynamic=True)
    assert len(captures) == 1


def positions(*lengths: int) -> dict[str, Tensor]:
    """A batch without a padding mask or a cache, and the position ids of sequences that are packed in each row."""
    batch = tokens() | {"use_cache": False}
    del batch["attention_mask"]
    rows, length = batch["input_ids"].shape
    packed = torch.cat([torch.arange(n) for n in (*lengths, length - sum(lengths))])
    return batch | {"position_ids": packed.expand(rows, -1)}


def test_without_a_mask_and_a_cache(captures: list[object]) -> None:
    """Then transformers looks for packed sequences in eager mode, and leaves out the mask if there are none."""
    batch = positions()
    del batch["position_ids"]
    shorter = batch | {name: batch[name][:, :20].contiguous() for name in ("input_ids", "labels")}
    assert masked_in_graphs(compare(llama, batch, shorter, dynamic=True)) == [False, False]
    assert len(captures) == 1


def test_packed_sequences_have_the_bits_of_eager_mode() -> None:
    compiled = compare(llama, positions(), positions(7), positions(), positions(3, 10))
    assert masked_in_graphs(compiled) == [False, True]


class OwnPositions(nn.Module):
    """Makes position ids, by a function of the tokens."""

    def __init__(self, made: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.made = llama(), made

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.inner(input_ids=input_ids, position_ids=self.made(input_ids), labels=labels, use_cache=False)


def counted(tokens: Tensor) -> Tensor:
    """Position ids that count up from one."""
    return (torch.arange(tokens.shape[1])[None] + 1).expand(tokens.shape[0], -1)


def written(tokens: Tensor) -> Tensor:
    """Position ids of two sequences."""
    positions = torch.arange(tokens.shape[1])[None].clone()
    positions[:, 8:] -= 8
    return positions


def written_by_a_view(tokens: Tensor) -> Tensor:
    """Position ids of two sequences."""
    positions = torch.arange(tokens.shape[1])[None].clone()
    second = positions[:, 8:]
    second -= 8
    return positions


def every_second(tokens: Tensor) -> Tensor:
    return torch.arange(0, 2 * tokens.shape[1], 2)[None]


def transposed(tokens: Tensor) -> Tensor:
    """Rows that are columns of what counts up."""
    return torch.arange(tokens.numel()).view(tokens.shape[1], -1)[:, :1].view(1, -1)


@pytest.mark.parametrize(
    ("made", "masked"),
    [
        (counted, False),
        (written, True),
        (written_by_a_view, True),
        pytest.param(every_second, True, marks=pytest.mark.long),
        pytest.param(transposed, True, marks=pytest.mark.long),
    ],
)
def test_position_ids_that_the_model_makes(made: Callable[[Tensor], Tensor], masked: bool) -> None:
    batch = {name: value for name, value in tokens().items() if name != "attention_mask"}
    assert masked_in_graphs(compare(lambda: OwnPositions(made), batch)) == [masked]


class OwnMask(nn.Module):
    """Pads by tokens, whatever the mask says that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=self.mask(input_ids, attention_mask), labels=labels)

    def mask(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return input_ids != PAD


class WrittenMask(OwnMask):
    """Masks more than the mask that it is given."""

    def mask(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = attention_mask.clone()
        mask[1, -4:] = 0
        return mask


class ConvertedMask(OwnMask):
    """Masks what it is given."""

    def mask(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return attention_mask.to(torch.bool)[:, :].contiguous()


@pytest.mark.parametrize(
    ("kind", "masked"),
    [pytest.param(OwnMask, True, marks=pytest.mark.long), (WrittenMask, True), (ConvertedMask, False)],
)
def test_a_mask_that_the_model_computes_is_not_taken_for_the_one_it_was_given(
    kind: type[OwnMask], masked: bool
) -> None:
    batch = tokens()
    batch["input_ids"][1, -4:] = PAD
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = compare(kind, batch)
    assert masked_in_graphs(compiled) == [masked]
    assert sum("call the model without attention_mask" in str(each.message) for each in caught) == masked


class MadeMask(nn.Module):
    """Makes its mask, as many models do that are given none."""

    def __init__(self, made: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.made = llama(), made

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.inner(input_ids=input_ids, attention_mask=self.made(input_ids), labels=labels)


def last_masked(tokens: Tensor) -> Tensor:
    mask = tokens.new_ones(tokens.shape)
    mask[1, -4:] = 0
    return mask


@pytest.mark.filterwarnings("ignore:in this model, which computes masks itself")
@pytest.mark.parametrize(
    ("made", "masked"),
    [
        (lambda tokens: torch.ones(tokens.shape, dtype=torch.long), False),
        pytest.param(last_masked, True, marks=pytest.mark.long),
        pytest.param(torch.ones_like, False, marks=pytest.mark.long),
        (lambda tokens: tokens != PAD, True),
    ],
    ids=["ones", "written", "ones_like", "by tokens"],
)
def test_a_mask_that_the_model_makes_is_left_out_if_it_is_of_ones(
    made: Callable[[Tensor], Tensor], masked: bool
) -> None:
    batch = {name: value for name, value in tokens().items() if name != "attention_mask"}
    batch["input_ids"][1, -4:] = PAD
    assert masked_in_graphs(compare(lambda: MadeMask(made), batch)) == [masked]


class LateMask(OwnMask):
    """Computes its mask in the second of two graphs, after random numbers were drawn and a buffer was written."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def mask(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        several = torch.rand(()) < 2
        self.calls += 1
        random.random()
        torch._dynamo.graph_break()
        return (input_ids != PAD) & several


class MaskByName(OwnMask):
    """Computes a mask in its first graph, under the name that the second one knows a mask by."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        self.calls += 1
        attention_mask = (input_ids != PAD).long()
        torch._dynamo.graph_break()
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


@pytest.mark.filterwarnings("ignore:in this model, which computes masks itself")
def test_a_mask_of_a_later_graph_is_looked_at_when_it_comes() -> None:
    model = MaskByName()
    plain = copy.deepcopy(model)
    ours = fxremat.compile(model, mem="1GiB", search=fxremat.Search(seconds=0.0))
    batch = tokens()
    padded = batch | {"input_ids": batch["input_ids"].clone()}
    padded["input_ids"][1, -4:] = PAD
    for each in (batch, padded, batch):
        found = [ours(**each).loss, plain(**each).loss]
        assert found[0].item() == pytest.approx(found[1].item(), rel=1e-6)
        found[0].backward()
    assert ours.calls == plain.calls == 3


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:in this model, which computes masks itself")
def test_a_mask_that_a_later_graph_computes_leaves_random_numbers_and_buffers_as_they_were() -> None:
    model, batch = LateMask(), tokens()
    plain = copy.deepcopy(model)
    ours = fxremat.compile(model, mem="100%", search=fxremat.Search(seconds=0.0))
    for seed in range(2):
        found = []
        for each in (ours, plain):
            random.seed(seed)
            found.append(step_of(each, lambda each=each: each(**batch), lambda outputs: outputs.loss))  # type: ignore[misc]
            found.append(random.random())
        assert torch.equal(found[0].rng, found[2].rng)
        assert ours.calls == plain.calls == seed + 1
        assert found[1] == found[3]


def test_the_library_is_as_it_was() -> None:
    import transformers.masking_utils as library

    before = {name: getattr(library, name) for name in attention_masks.REPLACED if hasattr(library, name)}
    with pytest.raises(ValueError, match="stop"), attention_masks.left_out([torch.ones(2, 3, dtype=torch.bool)], []):
        raise ValueError("stop")
    assert before == {name: getattr(library, name) for name in before}
    assert not attention_masks.leaves_masks_out()


class Table(OwnMask):
    """Two graphs with a large buffer, which is only read, and a small one that is written."""

    table: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(2**20))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        self.calls += self.table[0]
        torch._dynamo.graph_break()
        return self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def test_buffers_that_no_step_writes_to_are_not_copied_in_each_step() -> None:
    model, batch = Table(), tokens()
    ours = fxremat.compile(model, mem="100%", search=fxremat.Search(seconds=0.0))

    def step() -> None:
        ours(**batch).loss.backward()

    for _ in range(4):
        step()
    assert ours._fxremat.written == {"calls"}
    ours.zero_grad(set_to_none=True)
    assert meter.peak_bytes(step) <= ours.plan.budget
    assert ours.calls == 5
