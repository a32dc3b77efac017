"""nn.LSTM, nn.GRU and nn.RNN within a budget: plain PyTorch's bits, and a peak that holds, in one graph."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import fxremat
from benchmarks import meter
from fxremat import Offload, Search
from fxremat.ops import recurrent
from fxremat.torch_private import storage_of, torch_release
from tests.dags import few
from tests.steps import differences, step_of
from tests.toys import WIDTH

pytestmark = pytest.mark.usefixtures("torch_ready")
QUICK = Search(seconds=0.0, progress=False)
HIDDEN, LAYERS, BATCH, TIME = 16, 3, 4, 20
KINDS: dict[str, Callable[..., nn.RNNBase]] = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}


class Stack(nn.Module):
    """Recurrent layers with normalizations between them, in a loop, which dynamo would leave to Python."""

    def __init__(self, kind: Callable[..., nn.RNNBase], layers: int = LAYERS, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN)
        self.layers = nn.ModuleList(kind(HIDDEN, HIDDEN, batch_first=True, **options) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(layers))
        self.last = nn.Linear(HIDDEN, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x))[0][..., :HIDDEN]
        return self.last(x).square().mean()


def sequences(time: int = TIME, batch: int = BATCH) -> Tensor:
    return torch.randn(batch, time, WIDTH, generator=torch.Generator().manual_seed(time))


def twins(model: nn.Module, mem: Any, **options: Any) -> tuple[Any, nn.Module]:
    plain = copy.deepcopy(model)
    return fxremat.compile(model, mem=mem, search=QUICK, **options), plain


def assert_equal_steps(ours: nn.Module, plain: nn.Module, *inputs: Any) -> None:
    mine, its = (step_of(model, lambda model=model: model(*inputs), lambda loss: loss) for model in (ours, plain))
    assert differences(mine, its) == []


def assert_close_steps(ours: nn.Module, plain: nn.Module, x: Tensor) -> None:
    mine, its = (step_of(model, lambda model=model: model(x), lambda loss: loss) for model in (ours, plain))
    for name, gradient in its.gradients.items():
        torch.testing.assert_close(mine.gradients[name], gradient, rtol=1e-4, atol=1e-5)


def peak_of(model: nn.Module, x: Tensor) -> int:
    model.zero_grad(set_to_none=True)
    return meter.peak_bytes(lambda: model(x).backward())


@pytest.mark.parametrize(
    ("kind", "mem"),
    [
        ("LSTM", "60%"),
        ("GRU", "min"),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("LSTM", "min"), ("GRU", "80%"), ("RNN", "85%"))),
    ],
)
def test_layers_in_a_loop_are_one_graph_within_the_budget(kind: str, mem: str) -> None:
    torch.manual_seed(0)
    ours, plain = twins(Stack(KINDS[kind]), mem)
    for _ in range(3):
        assert_equal_steps(ours, plain, sequences())
    assert isinstance(ours.plan, fxremat.Plan)
    least = ours.plan.budget
    assert ours.plan.predicted_peak <= least < peak_of(plain, sequences())
    assert 0.98 * ours.plan.predicted_peak <= peak_of(ours, sequences()) <= least


OPTIONS = st.fixed_dictionaries(
    {
        "num_layers": st.integers(1, 2),
        "bidirectional": st.booleans(),
        "bias": st.booleans(),
        "dropout": st.sampled_from([0.0, 0.5]),
    }
)


def check_one(kind: str, options: dict[str, Any], share: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Stack(KINDS[kind], 2, **options)
    least = fxremat.plan(model, sequences(), mem="min", search=QUICK)
    budget = least.budget + (least.keep_all_peak - least.budget) * share // 100
    ours, plain = twins(model, budget)
    for step in range(2):
        torch.manual_seed(step)
        assert_equal_steps(ours, plain, sequences())
    assert peak_of(ours, sequences()) <= budget


one = given(kind=st.sampled_from(sorted(KINDS)), options=OPTIONS, share=st.integers(0, 100))


@few(3)
@one
def test_layers_of_all_kinds_have_the_bits_of_plain_training(kind: str, options: dict[str, Any], share: int) -> None:
    check_one(kind, options, share)


@pytest.mark.long
@few(60)
@one
def test_many_layers_of_all_kinds(kind: str, options: dict[str, Any], share: int) -> None:
    check_one(kind, options, share)


class Layer(nn.Module):
    """One layer, called with states or without."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, states: Any = None) -> Tensor:
        output, final = self.layer(x, states)
        finals = final if isinstance(final, tuple) else (final,)
        return output.square().mean() + sum(one.mean() for one in finals)


def test_gradients_of_states_and_of_a_backward_that_runs_twice() -> None:
    torch.manual_seed(0)
    ours, plain = twins(Layer(nn.LSTM(WIDTH, 2 * HIDDEN, proj_size=HIDDEN, batch_first=True)), "100%")
    found = []
    for model in (ours, plain):
        states = tuple(torch.ones(1, BATCH, size, requires_grad=True) for size in (HIDDEN, 2 * HIDDEN))
        loss = model(sequences(), states)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([*(one.grad for one in states), *(one.grad for one in model.parameters())])
    assert all(torch.equal(mine, its) for mine, its in zip(*found, strict=True))
    with torch.no_grad():
        assert torch.equal(ours(sequences()), plain(sequences()))


class Called(nn.Module):
    """Calls one recurrent layer several times, so that its weights get gradients from all steps of all calls."""

    def __init__(self, kind: Callable[..., nn.RNNBase], calls: int, **options: Any) -> None:
        super().__init__()
        self.layer, self.between, self.calls = kind(HIDDEN, HIDDEN, **options), nn.Linear(HIDDEN, HIDDEN), calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = self.between(self.layer(x)[0][..., :HIDDEN])
        return x.square().mean()


@pytest.mark.parametrize("mem", ["100%", "min"])
@pytest.mark.parametrize("calls", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_is_called_several_times_has_the_bits_of_plain_training(kind: str, calls: int, mem: str) -> None:
    torch.manual_seed(0)
    plain = Called(KINDS[kind], calls, bidirectional=calls == 2)
    ours = fxremat.compile(copy.deepcopy(plain), mem=mem, search=QUICK)
    for _ in range(3):
        x = torch.randn(TIME, BATCH, HIDDEN)
        for model in (plain, ours):
            model.zero_grad(set_to_none=True)
            model(x).backward()
        pairs = zip(plain.parameters(), ours.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)


def test_autocast_is_that_of_the_call() -> None:
    torch.manual_seed(0)
    ours, plain = twins(Stack(nn.GRU, 2), "90%")
    for _ in range(2):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            losses = ours(sequences()), plain(sequences())
        for model, loss in zip((ours, plain), losses, strict=True):
            model.zero_grad()
            loss.backward()
        assert torch.equal(*losses)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(ours.parameters(), plain.parameters(), strict=True))


def test_a_new_length_is_planned_for() -> None:
    torch.manual_seed(0)
    ours, plain = twins(Stack(nn.LSTM), "70%")
    for time in (TIME, TIME + 3, TIME, TIME - 5):
        assert_equal_steps(ours, plain, sequences(time))


class Packed(nn.Module):
    """Reads sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(WIDTH, 64), nn.LSTM(64, 64, batch_first=True), nn.Linear(64, 8)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.first(x).relu(), lengths, batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return self.last(hidden.relu()).square().mean()


@pytest.mark.skipif(torch_release() < (2, 13), reason="dynamo cannot trace pad_packed_sequence")
def test_packed_sequences_run_between_graphs() -> None:
    torch.manual_seed(0)
    ours, plain = twins(Packed(), "100%")
    for _ in range(3):
        assert_equal_steps(ours, plain, sequences(), torch.tensor([20, 11, 5, 2]))
    assert ours.plan.graphs == 2
    with pytest.raises(fxremat.CaptureError):
        fxremat.compile(Packed(), "100%", fullgraph=True)(sequences(), torch.tensor([20, 11, 5, 2]))


@pytest.mark.parametrize("options", [{"offload": Offload()}, {"backend": "inductor"}])
def test_with_other_means(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours, plain = twins(Stack(nn.LSTM), "70%", **options)
    for _ in range(2):
        assert_close_steps(ours, plain, sequences())
    assert peak_of(ours, sequences()) <= ours.plan.budget


def test_a_saved_plan_runs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ours, plain = twins(Stack(nn.LSTM), "70%")
    ours(sequences())
    ours.plan.save(tmp_path / "plan.json")
    again, _ = twins(Stack(nn.LSTM), None, plan=tmp_path / "plan.json")
    again.load_state_dict(plain.state_dict())
    assert_equal_steps(again, plain, sequences())


def test_a_layer_is_captured_while_another_compiled_model_awaits_its_backward() -> None:
    """Train a decoder from the last state of an encoder, each compiled by itself."""
    plain = nn.ModuleList(nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(2))
    ours = [fxremat.compile(one, mem="100%", search=Search(seconds=0.0)) for one in copy.deepcopy(plain)]

    def gradients(layers: Any) -> list[Tensor]:
        states, last = layers[0](sequences())
        outputs, _ = layers[1](states, last)
        return list(torch.autograd.grad(outputs.square().sum(), [p for each in layers for p in each.parameters()]))

    assert all(map(torch.equal, gradients(ours), gradients(plain)))


class Broken(Stack):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


@pytest.mark.parametrize("packed", [False, True])
def test_graphs_around_layers_are_captured_once(packed: bool) -> None:
    if packed and torch_release() < (2, 13):
        pytest.skip("dynamo cannot trace pad_packed_sequence")
    ours, plain = twins(Packed() if packed else Broken(nn.GRU), "100%")
    given = (sequences(), torch.tensor([20, 11, 5, 2])) if packed else (sequences(),)
    assert_equal_steps(ours, plain, *given)
    captured = counters["stats"]["unique_graphs"]
    for _ in range(4):
        assert_equal_steps(ours, plain, *given)
    assert counters["stats"]["unique_graphs"] == captured > 0


def test_a_layer_whose_sizes_are_marked_as_changing_has_fixed_ones() -> None:
    ours, plain = twins(Stack(nn.GRU), "100%")
    for rows in (4, 2, 4):
        given = sequences()[:rows].clone()
        torch._dynamo.maybe_mark_dynamic(given, 0)
        assert_equal_steps(ours, plain, given)


class BrokenBehind(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        held = [x]  # the frame has it twice
        torch._dynamo.graph_break()
        return self.last(self.layers[0](x)[0]).square().mean() + held[0].sin().mean()


def test_behind_a_graph_of_symbolic_sizes_a_layer_has_fixed_ones() -> None:
    ours, plain = twins(BrokenBehind(nn.GRU, 1), "100%")
    for rows in (4, 3, 2, 4):
        assert_equal_steps(ours, plain, sequences()[:rows])


class CastInside(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.layers[0](x)[0]
        return self.last(x.float()).square().mean()


@pytest.mark.parametrize("time", [4, TIME])
def test_autocast_inside_of_the_model_casts_weights_once(time: int) -> None:
    ours, plain = twins(CastInside(nn.GRU, 1), "100%")
    x = sequences(time)
    for _ in range(2):
        assert_equal_steps(ours, plain, x)
    assert peak_of(ours, x) <= min(ours.plan.budget, 1.5 * peak_of(plain, x))


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.layer(x)[0])
        return {"loss": logits.square().mean(), "logits": logits}


def test_a_layer_of_a_model_that_returns_more_than_its_loss(caplog: pytest.LogCaptureFixture) -> None:
    ours, plain = twins(Tagger(), "100%")
    x = sequences()

    def step(model: nn.Module, calls: int) -> Any:
        return step_of(model, lambda: [model(x)["loss"] for _ in range(calls)], lambda found: torch.stack(found).sum())

    for calls in (1, 1, 2, 2):
        assert differences(step(ours, calls), step(plain, calls)) == []
    assert "several graphs" not in caplog.text


def test_no_graph_of_autograd_stays() -> None:
    ours, _ = twins(Stack(nn.GRU, 1), "100%")
    ours(sequences()).backward()
    gc.collect()
    before = sum(isinstance(one, recurrent._Graph) for one in gc.get_objects())
    gc.disable()
    try:
        for _ in range(3):
            ours(sequences()).backward()
        assert sum(isinstance(one, recurrent._Graph) for one in gc.get_objects()) == before
    finally:
        gc.enable()


def test_a_token_that_was_copied_is_refused() -> None:
    layer = nn.LSTM(WIDTH, HIDDEN)
    given = [torch.ones(2, 3, WIDTH), *torch.zeros(2, 1, 3, HIDDEN), *layer.parameters()]
    shapes = tuple(recurrent.Shape.of(one) for one in given)
    numbers = (True, 1, 0.0, True, False, False)
    call = recurrent.Layer("LSTM", numbers, 2, shapes, (0,), (), "")
    with torch.no_grad():
        output, _, _, token, *_ = torch.ops.fxremat.recurrent(given, call.text)
        with pytest.raises(fxremat.FxrematError, match="the token of a recurrent layer was copied"):
            torch.ops.fxremat.recurrent_backward([output], [0], token.clone(), [], call.text, [], [])


STATE = torch.zeros(30_000)  # of dropout, of which cuDNN has one in a process


class LikeCudnn(torch.autograd.Function):
    """`nn.LSTM` as cuDNN does it: weights lie in one storage, or are copied there, and so do their gradients."""

    @staticmethod
    def forward(ctx: Any, numbers: Any, x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> Any:
        if len({storage_of(one) for one in weights}) == 1:
            whole = weights[0].as_strided((sum(one.numel() for one in weights),), (1,), 0)
        else:
            whole = torch.cat([one.reshape(-1) for one in weights])
        dropout, ctx.numbers = numbers[2], (*numbers[:2], 0.0, *numbers[3:])  # masks do not matter here
        made = torch._VF.lstm(x, (h, c), list(weights), *ctx.numbers)
        state = STATE if dropout else torch.empty(0)
        ctx.save_for_backward(x, h, c, *weights, whole, state, torch.zeros(3 * made[0].numel()))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, h, c, *weights, whole, state, _ = ctx.saved_tensors
        assert state.numel() == 0 or state.data_ptr() == STATE.data_ptr()
        parts = whole.split([one.numel() for one in weights])
        leaves = [one.detach().requires_grad_() for one in (x, h, c)]
        leaves += [part.view_as(one).detach().requires_grad_() for part, one in zip(parts, weights, strict=True)]
        with torch.enable_grad():
            made = torch._VF.lstm(leaves[0], leaves[1:3], leaves[3:], *ctx.numbers)
        found = torch.autograd.grad(made, leaves, gradients)
        flat = torch.cat([one.reshape(-1) for one in found[3:]])
        shaped = zip(flat.split([one.numel() for one in weights]), weights, strict=True)
        return None, *found[:3], *(part.view_as(one) for part, one in shaped)


def like_cudnn(layer: recurrent.Layer, given: Sequence[Tensor]) -> list[Tensor]:
    return list(LikeCudnn.apply(layer.numbers, *given))  # type: ignore[no-untyped-call]


def flatten(model: nn.Module) -> None:
    """Move the parameters of each recurrent layer into one storage, as `RNNBase.flatten_parameters` does on CUDA."""
    for layer in model.modules():
        if isinstance(layer, nn.RNNBase):
            weights = list(layer.parameters())
            parts = torch.cat([one.detach().reshape(-1) for one in weights]).split([one.numel() for one in weights])
            for weight, part in zip(weights, parts, strict=True):
                weight.data = part.view_as(weight)


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Layers that run as cuDNN's do, and costs and layouts of their own."""
    monkeypatch.setattr(recurrent.Layer, "run", like_cudnn)
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path))
    recurrent._looks.cache_clear()
    yield
    recurrent._looks.cache_clear()


@pytest.mark.usefixtures("cudnn")
@pytest.mark.parametrize("together", [(True, True), (False, False), (True, False), (False, True)])
def test_weights_in_one_storage(together: tuple[bool, bool]) -> None:
    """The layers' weights lie together or apart, while the step is captured and then while it runs."""
    torch.manual_seed(0)
    model = Stack(nn.LSTM)
    if together[0]:
        flatten(model)
    ours, plain = twins(model, "min")
    for step in range(3):
        if step == 1 and together[0] and not together[1]:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
        elif step == 1 and together[1] and not together[0]:
            flatten(model)
        assert_close_steps(ours, plain, sequences())
    extra = sum(one.nbytes for one in model.layers[0].parameters()) * (len(model.layers) if together[0] else 1)
    assert peak_of(ours, sequences()) <= ours.plan.budget + (extra if together[0] != together[1] else 0)


@pytest.mark.usefixtures("cudnn")
def test_the_state_of_dropout_is_no_activation() -> None:
    torch.manual_seed(0)
    ours = fxremat.compile(Stack(nn.LSTM, num_layers=2, dropout=0.5), mem="100%", search=QUICK)
    for _ in range(3):
        peak = peak_of(ours, sequences())
    assert peak <= ours.plan.predicted_peak <= peak + STATE.nbytes // 4


@pytest.mark.usefixtures("cudnn")
def test_weights_that_lie_in_one_storage_are_not_saved_again() -> None:
    torch.manual_seed(0)
    model = Stack(nn.LSTM)
    apart = fxremat.plan(model, sequences(), mem="100%", search=QUICK).keep_all_peak
    flatten(model)
    together = fxremat.plan(model, sequences(), mem="100%", search=QUICK).keep_all_peak
    assert apart - together > 2 * sum(one.nbytes for one in model.layers[0].parameters())


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_the_first_step_takes_no_copy_of_the_layer(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Run a layer, to see what it returns, on the model's own parameters: copies would take half as much again."""
    monkeypatch.setenv("FXREMAT_CACHE", str(tmp_path))
    recurrent._looks.cache_clear()
    torch.manual_seed(0)
    model = Layer(KINDS[kind](WIDTH, 96, 2))
    ours = fxremat.compile(model, mem="100%", search=QUICK)
    first, second = (peak_of(ours, sequences(6, 3)) for _ in range(2))
    assert second == ours.plan.predicted_peak - ours.plan.costs.sizes.root  # room for a scaled loss
    assert first <= 1.03 * second  # gradients of the final states too, which this loss may not need
