"""The promise on a GPU: the caching allocator's own peak, gradients, random state and BatchNorm.

Some CUDA kernels add in an order that changes from run to run. Where plain PyTorch does not repeat itself,
ours may differ from it as far as it differs from itself, and no further.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fxremat
from benchmarks import meter, models
from fxremat.host.files import FileTier
from fxremat.host.pinned import PinnedTier
from fxremat.settings import Inductor, Offload, Search
from tests.runtime.test_recurrent import KINDS, sequences
from tests.runtime.test_recurrent import Stack as Recurrent
from tests.slices.test_models import EXAMPLES, HALF_CLOSE, error, gradients_after
from tests.toys import WIDTH, Loss
from tests.training import Trace, differences, least_budget, train

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("torch_ready", "repeatable")]


@pytest.fixture
def repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels that repeat themselves, where there is a choice."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


@pytest.mark.parametrize("name", models.MAIN)
def test_training_on_a_gpu(name: str) -> None:
    case = models.get(name, "small")
    batch = tuple(t.cuda() for t in case.batch())
    plain = train(case.model().cuda(), case, device="cuda")
    again = train(case.model().cuda(), case, device="cuda")
    minimum = least_budget(case.model().cuda(), lambda compiled: compiled(*batch))
    peaks = []
    for mem in (minimum, "60%", "80%", "100%"):
        torch._dynamo.reset()
        try:
            compiled = fxremat.compile(case.model().cuda(), mem=mem)
            trace = train(compiled, case, device="cuda")
        except fxremat.BudgetTooSmall:
            continue
        _assert_same(trace, plain, again)
        measured = meter.model_peak(compiled, batch, "cuda")
        assert measured <= compiled.plan.budget, f"mem={mem}"
        assert abs(compiled.plan.predicted_peak - measured) <= 0.02 * measured, f"mem={mem}"
        peaks.append((compiled.plan.budget, measured))
    assert [peak for _, peak in sorted(peaks)] == sorted(peak for _, peak in peaks)


@pytest.mark.parametrize("random", ["inductor", "eager"])
@pytest.mark.parametrize("name", ["gpt", "unet", "mixer"])
def test_compiled_regions_on_a_gpu(name: str, random: str) -> None:
    case = models.get(name, "small")
    batch = tuple(t.cuda() for t in case.batch())
    plain = case.model().cuda()
    compiled = fxremat.compile(case.model().cuda(), mem="80%", backend=Inductor(random=random))
    by_inductor = torch.compile(plain, backend="inductor", dynamic=False) if random == "inductor" else plain
    losses = []
    for model in (compiled, by_inductor):
        torch.manual_seed(3)
        loss = model(*batch)
        loss.backward()
        losses.append(float(loss.detach()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    compiled.zero_grad(set_to_none=True)
    measured = meter.model_peak(compiled, batch, "cuda")
    assert measured <= compiled.plan.budget
    assert abs(compiled.plan.predicted_peak - measured) <= 0.02 * measured


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_full_size_at_60_percent(name: str) -> None:
    case = models.get(name)
    batch = tuple(t.cuda() for t in case.batch())
    compiled = fxremat.compile(case.model().cuda(), mem="60%")
    measured = meter.model_peak(compiled, batch, "cuda")
    assert measured <= compiled.plan.budget
    assert abs(compiled.plan.predicted_peak - measured) <= 0.02 * measured


@pytest.mark.parametrize("name", ["ignored", "tied", "logits beside", "equal layers", "images", "bf16"])
def test_regions_run_in_slices_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # rounds by more than slices do
    example = EXAMPLES[name]
    model, inputs = example.made()
    model, inputs = model.cuda(), tuple(x.cuda() for x in inputs)

    def step_of(module: nn.Module) -> Callable[[], torch.Tensor]:
        def step() -> torch.Tensor:
            output = module(*inputs)
            loss: torch.Tensor = output[0] if isinstance(output, tuple) else output
            loss.backward()
            return loss.detach()

        return step

    plain = gradients_after(model, step_of(model))
    compiled = fxremat.compile(model, mem=example.mem, slices=True, search=Search(seconds=0.0), example_inputs=inputs)
    assert compiled.plan.slices
    step = step_of(compiled)
    ours = gradients_after(model, step)
    limit = HALF_CLOSE if example.dtype is torch.bfloat16 else 1e-5  # cuBLAS takes other kernels for other rows
    assert {key for key in plain if error(ours[key], plain[key]) > limit} == set()
    measured = meter.peak_bytes(step, "cuda")
    assert measured <= compiled.plan.budget
    assert abs(compiled.plan.predicted_peak - measured) <= 0.02 * measured


def test_batch_norm_statistics_are_updated_once() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(6)]
    model = nn.Sequential(*layers).cuda()
    x = torch.randn(8, 8, 32, 32, device="cuda")
    minimum = least_budget(model, lambda compiled: compiled(x))
    compiled = fxremat.compile(model, mem=minimum)
    for _ in range(2):
        compiled(x).mean().backward()
    assert all(int(layer[1].num_batches_tracked) == 2 for layer in layers)  # type: ignore[arg-type]


def test_dropout_draws_as_plain_pytorch_does() -> None:
    """A recomputed dropout has the masks of its first run; the generator ends where the plain one does."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.3)) for _ in range(8))
    ).cuda()
    x = torch.randn(256, 64, device="cuda")
    minimum = least_budget(model, lambda compiled: compiled(x))
    results = []
    for make in (lambda: model, lambda: fxremat.compile(model, mem=minimum)):
        candidate = make()
        candidate(x)  # plans, where there is something to plan
        model.zero_grad()
        torch.manual_seed(5)
        candidate(x).square().mean().backward()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        results.append([torch.cuda.get_rng_state(), *gradients])
    for plain, ours in zip(*results, strict=True):
        assert torch.equal(plain, ours)


def test_the_first_step_is_within_its_budget_as_the_next_ones_are() -> None:
    case = models.get("gpt", "small")
    batch = tuple(t.cuda() for t in case.batch())
    compiled = fxremat.compile(case.model().cuda(), mem="60%", example_inputs=batch)
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    compiled(*batch).backward()
    assert torch.cuda.max_memory_allocated() - start <= compiled.plan.budget


def test_auto_takes_what_is_free() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).cuda()
    compiled = fxremat.compile(model, mem="auto")
    compiled(torch.randn(64, 64, device="cuda")).mean().backward()
    free, total = torch.cuda.mem_get_info()
    assert 0.5 * free <= compiled.plan.budget <= total


def _assert_same(trace: Trace, plain: Trace, again: Trace) -> None:
    if differences(again, plain) == []:
        assert differences(trace, plain) == []
        return
    assert torch.equal(trace.rng, plain.rng)
    for ours, theirs in zip(trace.losses, plain.losses, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    for ours_by_name, theirs_by_name, repeat in zip(
        trace.gradients, plain.gradients, again.gradients, strict=True
    ):
        for name, theirs in theirs_by_name.items():
            mine, other = ours_by_name[name], repeat[name]
            if theirs is None or mine is None or other is None:
                assert theirs is mine is other is None
                continue
            noise = 10 * float((other - theirs).abs().max()) + 1e-6 * float(theirs.abs().max())
            assert float((mine - theirs).abs().max()) <= noise, name


def test_files_are_copied_in_the_order_of_the_caller_s_stream() -> None:
    large, tier = torch.zeros(1 << 24, device="cuda"), FileTier()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for turn in range(3):
            torch.cuda._sleep(50_000_000)
            large.fill_(turn + 1.0)
            host = tier.host_like(large)
            tier.store(large, host)
            tier.release(host)
            assert float(host.min()) == turn + 1.0, "written before it was copied"
            back = tier.prefetch(host, large.device)
            tier.wait(host)
            assert torch.equal(back, large)
            del host, back


@pytest.mark.parametrize("name", models.MAIN)
def test_offloading_on_a_gpu(name: str) -> None:
    case = models.get(name, "small")
    batch = tuple(t.cuda() for t in case.batch())
    plain = train(case.model().cuda(), case, device="cuda")
    again = train(case.model().cuda(), case, device="cuda")
    torch._dynamo.reset()
    minimum = least_budget(case.model().cuda(), lambda compiled: compiled(*batch), offload=True)
    for mem in (minimum, "60%", "100%"):
        torch._dynamo.reset()
        compiled = fxremat.compile(case.model().cuda(), mem=mem, offload=True)
        trace = train(compiled, case, device="cuda")
        compiled.zero_grad(set_to_none=True)
        peak = meter.peak_bytes(meter.training_step(compiled, batch), "cuda")
        assert peak <= compiled.plan.budget
        assert differences(trace, plain) == [] or differences(again, plain) != []


def test_a_gpu_s_step_takes_less_than_its_ops_and_its_copies_one_after_the_other() -> None:
    case = models.get("gpt")
    batch = tuple(t.cuda() for t in case.batch())
    options = {"mem": "50%", "example_inputs": batch, "solver": "keep_all"}
    compiled = fxremat.compile(case.model().cuda(), offload=True, **options)
    swapped = compiled.plan.chosen.transfers
    assert swapped is not None
    steps = [meter.step_from_none(model, batch) for model in (case.model().cuda(), compiled)]
    plain, ours = meter.step_times(steps, clock=meter.cuda_clock)
    assert ours < plain + sum(swapped.copying)


def test_a_model_whose_weights_are_on_the_host_trains_on_a_gpu() -> None:
    torch.manual_seed(0)
    plain = deep_rows()
    ours = copy.deepcopy(plain)  # stays on the CPU: its parameters never need to fit the GPU together
    plain.cuda()
    batch = torch.randn(512, 256, device="cuda")
    theirs, mine = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (plain, ours))
    wanted = [train_step(plain, theirs, batch) for _ in range(4)]
    theirs.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    mem = 2 * sum(p.nbytes for p in ours.parameters())  # half of parameters, gradients and state
    before = torch.cuda.memory_allocated()
    options = {"offload": Offload(weights=True, activations=False), "optimizer": mine, "example_inputs": batch}
    compiled = fxremat.compile(ours, mem=mem, **options)
    losses = [train_step(compiled, mine, batch) for _ in range(2)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    losses += [train_step(compiled, mine, batch) for _ in range(2)]
    torch.cuda.synchronize()
    assert losses == wanted
    assert torch.cuda.max_memory_allocated() - before <= mem
    hosted = compiled._fxremat.backend.weights.hosted
    assert hosted
    assert all(home.is_pinned() for home in hosted.values())
    for (name, theirs_), mine_ in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(theirs_.cpu(), mine_.detach().cpu()), name
    compiled.fxremat.to_device()
    assert all(p.is_cuda for p in ours.parameters())
    assert train_step(ours, mine, batch) == train_step(plain, theirs, batch)


def test_weights_and_activations_leave_a_gpu_together() -> None:
    torch.manual_seed(0)
    plain = deep_rows()
    ours = copy.deepcopy(plain)
    plain.cuda()
    batch = torch.randn(4096, 256, device="cuda")
    theirs, mine = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (plain, ours))
    wanted = [train_step(plain, theirs, batch) for _ in range(3)]
    options = {"offload": Offload(weights=True), "optimizer": mine, "example_inputs": batch}
    compiled = fxremat.compile(ours, mem="40%", **options)
    assert [train_step(compiled, mine, batch) for _ in range(3)] == wanted


def deep_rows() -> nn.Module:
    return Loss(
        nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1)) for _ in range(12)))
    )


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    torch.manual_seed(5)
    optimizer.zero_grad()
    loss = model(batch)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_have_cudnn_s_bits(kind: str, together: bool) -> None:
    """cuDNN's layers, whose weights lie in one storage, as `.cuda()` leaves them, or each in its own, as copies do."""
    torch.manual_seed(0)
    base = Recurrent(KINDS[kind], 3).cuda()
    plain, batch = _copy(base, together), (sequences(128, 64).cuda(),)
    wanted = _step(plain, batch)
    for mem in ("100%", "min"):
        torch._dynamo.reset()
        ours = fxremat.compile(_copy(base, together), mem=mem, search=Search(seconds=0.3, progress=False))
        for _ in range(3):
            assert all(map(torch.equal, _step(ours, batch), wanted))
        measured = meter.model_peak(ours, batch, "cuda")
        assert 0.98 * ours.plan.predicted_peak <= measured <= ours.plan.budget


@pytest.mark.parametrize("mem", ["100%", "min"])
def test_dropout_of_cudnn_goes_on_as_in_plain_training(mem: str) -> None:
    """Recurrent layers with dropout between dropout of PyTorch, which is drawn again, and one seed for four steps."""
    torch.manual_seed(0)
    base = _Dropping().cuda()
    batch, losses = (sequences(128, 64).cuda(),), []
    ours = fxremat.compile(_copy(base, True), mem=mem, search=Search(seconds=0.3, progress=False))
    for model in (ours, _copy(base, True)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        losses.append([])
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]


class _Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.3) for _ in range(2))
        wide = (nn.Linear(WIDTH, 16 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(16 * WIDTH, WIDTH))
        self.wide = nn.ModuleList(copy.deepcopy(nn.Sequential(*wide)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, wide in zip(self.layers, self.wide, strict=True):
            x = x + wide(layer(x)[0])
        return x.square().mean()


def _copy(model: nn.Module, together: bool) -> nn.Module:
    made = copy.deepcopy(model)
    for layer in made.modules():
        if together and isinstance(layer, nn.RNNBase):
            layer.flatten_parameters()
    return made


def _step(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = model(*batch)
    loss.backward()
    return [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@two_gpus
def test_copies_of_a_gpu_that_is_not_the_current_one() -> None:
    """Every copy waits for, and is waited for by, the streams of its own device: device 0 is current throughout."""
    tier, device = PinnedTier(), torch.device("cuda", 1)
    with torch.cuda.device(0):
        for seed in range(20):
            x = torch.randn(1 << 22, device=device, generator=torch.Generator(device).manual_seed(seed))
            wanted = x.double().sum()
            host = tier.offload(x)
            tier.release(host)
            del x
            torch.full((1 << 22,), float("nan"), device=device)  # takes the memory that was let go
            back = tier.prefetch(host, device)
            tier.wait(host)
            assert torch.equal(back.double().sum(), wanted)


@two_gpus
def test_offloading_on_a_gpu_that_is_not_the_current_one() -> None:
    torch.manual_seed(0)
    plain = deep_rows()
    ours = copy.deepcopy(plain)
    plain.to("cuda:1")
    batch = torch.randn(512, 256, device="cuda:1")
    theirs, mine = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (plain, ours))
    before = torch.cuda.memory_allocated(0)
    with torch.cuda.device(0):
        wanted = [train_step(plain, theirs, batch) for _ in range(3)]
        options = {"offload": Offload(weights=True), "optimizer": mine, "example_inputs": batch}
        compiled = fxremat.compile(ours, mem="40%", **options)
        assert [train_step(compiled, mine, batch) for _ in range(3)] == wanted
        assert torch.cuda.memory_allocated(0) == before


def test_memory_that_a_side_stream_writes_is_not_given_away_after_an_exception() -> None:
    tier, device = PinnedTier(), torch.device("cuda")
    hosts = [torch.full((1 << 26,), float(number)).pin_memory() for number in range(4)]
    for host in hosts:
        tier.prefetch(host, device)  # dropped at once, as after an error before `wait`
    others = [torch.full((1 << 26,), -1.0, device=device) for _ in hosts]
    torch.cuda.synchronize()
    assert all(bool((other == -1.0).all()) for other in others)
    tier.synchronize()
    tier.close()
    before = torch.cuda.memory_allocated()
    del others
    assert torch.cuda.memory_allocated() == before - 4 * (1 << 28)
