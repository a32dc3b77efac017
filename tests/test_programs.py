"""Whole programs around the module: trainers, adapters, data parallelism. Each runs with and without fxremat.

What a program leaves behind (logged losses, parameters, files) is the same to the bit, and it trained inside a budget.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat
from benchmarks.meter import peak_bytes
from fxremat.settings import Search
from tests.training import same

pytestmark = [
    pytest.mark.usefixtures("torch_ready"),
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # of the libraries
]
FAST: Any = {"search": Search(seconds=0.0)}
WORDS = 60


def compiled(model: nn.Module, mem: str = "100%") -> Any:
    return fxremat.compile(model, mem, **FAST)


def texts(count: int = 12, length: int = 10) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(WORDS, (count, length), generator=draw)
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in rows]


def gpt() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=32, n_embd=32, n_layer=3, n_head=2, resid_pdrop=0.1, loss_type="ForCausalLM"
    )
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    return transformers.BertForMaskedLM(config)  # type: ignore[no-any-return]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same_states(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    assert [name for name in theirs if not same(ours[name], theirs[name])] == []


# --- transformers.Trainer -----------------------------------------------------------------------------------


def trained_by_transformers(
    model: nn.Module, folder: Path, given: dict[str, Any] | None = None, **settings: Any
) -> tuple[Any, list[Any]]:
    """A trainer that has trained, and what it logged of losses and gradients."""
    transformers = pytest.importorskip("transformers")
    arguments = {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 2, "logging_steps": 1,
        "report_to": [], "use_cpu": True, "save_strategy": "no", "seed": 3, "disable_tqdm": True, "learning_rate": 1e-2,
    }  # fmt: skip
    options = transformers.TrainingArguments(**arguments | settings)
    data = {"train_dataset": texts(), "eval_dataset": texts(4)} | (given or {})
    trainer = transformers.Trainer(model, options, **data)
    trainer.train()
    told = ("loss", "eval_loss", "grad_norm")
    return trainer, [[entry.get(name) for name in told] for entry in trainer.state.log_history]


TRAINERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "accumulation and clipping": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5},
    "evaluation in between": {"eval_strategy": "steps", "eval_steps": 2},
    "bfloat16": {"bf16": True},
    "another compiler asked for": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
}


@pytest.mark.parametrize("make", [gpt, bert])
@pytest.mark.parametrize("way", TRAINERS)
def test_transformers_trainer(way: str, make: Callable[[], nn.Module], tmp_path: Path) -> None:
    plain, model = make(), make()
    for dropout in [m for whole in (plain, model) for m in whole.modules() if isinstance(m, nn.Dropout)]:
        dropout.p = 0.0 if way == "bfloat16" else dropout.p  # rounds otherwise in every captured graph
    module = compiled(model)
    _, theirs = trained_by_transformers(plain, tmp_path / "plain", **TRAINERS[way])
    torch._dynamo.reset()
    _, ours = trained_by_transformers(module, tmp_path / "ours", **TRAINERS[way])
    assert ours == theirs
    assert_same_states(state(module), state(plain))
    assert module.plan is not None


@pytest.mark.parametrize("make", [gpt, bert])
def test_transformers_trainer_saves_and_resumes(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """GPT-2's weights are tied; a checkpoint has the model's configuration, and loads without fxremat."""
    saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 3}
    plain, module = make(), compiled(make())
    trained_by_transformers(plain, tmp_path / "plain", **saving)
    trained_by_transformers(module, tmp_path / "ours", **saving)
    assert_same_states(state(module), state(plain))
    for checkpoint in ("checkpoint-2", "checkpoint-4"):
        files = [sorted(f.name for f in (tmp_path / kind / checkpoint).iterdir()) for kind in ("ours", "plain")]
        assert files[0] == files[1]
        texts_of = [(tmp_path / kind / checkpoint / "config.json").read_text() for kind in ("ours", "plain")]
        assert json.loads(texts_of[0]) == json.loads(texts_of[1])
    loaded = type(plain).from_pretrained(tmp_path / "ours" / "checkpoint-4")  # type: ignore[attr-defined]
    assert_same_states(state(loaded), state(plain))
    resumed = compiled(make())
    transformers = pytest.importorskip("transformers")
    options = transformers.TrainingArguments(
        output_dir=str(tmp_path / "ours"), max_steps=4, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        save_strategy="no", seed=3, disable_tqdm=True, learning_rate=1e-2,
    )  # fmt: skip
    trainer = transformers.Trainer(resumed, options, train_dataset=texts())
    trainer.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert_same_states(state(resumed), state(plain))
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "config.json").exists()


def texts_of_many_lengths(count: int = 90) -> list[dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 33, (count,), generator=draw).tolist()
    rows = [torch.randint(WORDS, (length,), generator=draw) for length in lengths]
    return [{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in rows]


def padded(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    filling = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)
        for name, value in filling.items()
    }


@pytest.mark.parametrize("make", [gpt, bert])
def test_transformers_trainer_on_thirty_lengths(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    """Rows come three at a time; the budget holds at all lengths, and the weights are those of the plain run."""
    plain, model = make(), make()
    everything = fxremat.plan(model, padded([{k: torch.zeros(32).long() for k in texts()[0]}] * 3), mem="100%", **FAST)
    mem = int(0.6 * everything.keep_all_peak)
    module = fxremat.compile(model, mem, **FAST)
    settings = {"max_steps": 30, "per_device_train_batch_size": 3}
    given = {"train_dataset": texts_of_many_lengths(), "data_collator": padded}
    _, theirs = trained_by_transformers(plain, tmp_path / "plain", given, **settings)
    _, ours = trained_by_transformers(module, tmp_path / "ours", given, **settings)
    assert ours == theirs
    assert_same_states(state(module), state(plain))
    for length in range(8, 33):
        batch = padded([texts_of_many_lengths()[0] | {k: torch.ones(length).long() for k in texts()[0]}] * 3)

        def step(batch: dict[str, Tensor] = batch) -> object:
            output = module(**batch)
            output.loss.backward()
            return output

        module.zero_grad()
        step()
        module.zero_grad()
        assert peak_bytes(step) <= mem, length


def test_generation_uses_the_plain_model() -> None:
    plain, module = gpt().eval(), compiled(gpt()).eval()
    given = texts(2)[0]["input_ids"][None]
    results = [m.generate(given, max_new_tokens=5, do_sample=False) for m in (plain, module)]  # type: ignore[operator]
    assert torch.equal(*results)
    assert module.plan is None


# --- adapters -------------------------------------------------------------------------------------------------


def adapted(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["c_attn"], lora_dropout=0.1))


@pytest.mark.parametrize("order", ["inside", "outside"])
def test_lora(order: str, tmp_path: Path) -> None:
    plain = adapted(gpt())
    module = compiled(adapted(gpt())) if order == "inside" else adapted(compiled(gpt()))
    _, theirs = trained_by_transformers(plain, tmp_path / "plain")
    trainer, ours = trained_by_transformers(module, tmp_path / "ours")
    assert ours == theirs
    assert_same_states(state(module), state(plain))
    trainer.save_model(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "adapter_config.json").exists()
    with plain.disable_adapter(), module.disable_adapter(), torch.no_grad():
        given = texts(2)[0]["input_ids"][None]
        assert same(module.eval()(given).logits, plain.eval()(given).logits)


@pytest.mark.parametrize("reentrant", [True, False])
def test_lora_with_gradient_checkpointing(reentrant: bool, tmp_path: Path) -> None:
    """Reentrant checkpoints need frozen embeddings to return what requires gradients, by a hook: it is left out."""
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    plain, model = adapted(gpt()), adapted(gpt())
    for one in (plain, model):
        one.enable_input_require_grads()
    module = compiled(model)
    _, theirs = trained_by_transformers(plain, tmp_path / "plain", **settings)
    _, ours = trained_by_transformers(module, tmp_path / "ours", **settings)
    assert ours == theirs
    assert_same_states(state(module), state(plain))
    assert module.plan is not None


# --- TRL ------------------------------------------------------------------------------------------------------


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]


def trained_by_trl(kind: str, way: str, folder: Path, *, lora: bool, with_adapters: bool) -> tuple[Any, list[Any]]:
    """An SFTTrainer or DPOTrainer that has trained, and the losses that it logged."""
    trl, peft = pytest.importorskip("trl"), pytest.importorskip("peft")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", unk_token="w2")

    def texts(seed: int) -> list[str]:
        numbers = torch.randint(3, WORDS, (8, 12), generator=torch.Generator().manual_seed(seed)).tolist()
        return [" ".join(f"w{i}" for i in row) for row in numbers]

    model: Any = llama()
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1) if lora else None
    torch.manual_seed(1)
    if with_adapters:
        model, adapters = peft.get_peft_model(model, adapters), None
    model = compiled(model) if way.startswith("compiled") else model
    settings = {
        "output_dir": str(folder), "max_steps": 3, "per_device_train_batch_size": 2, "report_to": [], "use_cpu": True,
        "save_strategy": "no", "logging_steps": 1, "learning_rate": 1e-2, "disable_tqdm": True, "max_length": 32,
    }  # fmt: skip
    if kind == "SFT":
        data = Dataset.from_dict({"text": texts(0)})
        trainer = trl.SFTTrainer(
            model, trl.SFTConfig(**settings), train_dataset=data, processing_class=tokenizer, peft_config=adapters
        )
    else:
        data = Dataset.from_dict({"prompt": texts(0), "chosen": texts(1), "rejected": texts(2)})
        trainer = trl.DPOTrainer(
            model, None if lora else llama(), trl.DPOConfig(**settings), train_dataset=data,
            processing_class=tokenizer, peft_config=adapters,
        )  # fmt: skip
    if way == "trainer first":
        trainer.model = trainer.model_wrapped = compiled(trainer.model)
    trainer.train()
    return trainer, [entry.get("loss") for entry in trainer.state.log_history]


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("kind", ["SFT", "DPO"])
@pytest.mark.parametrize("way", ["compiled first", "compiled with its adapters", "trainer first"])
def test_trl(way: str, kind: str, lora: bool, tmp_path: Path) -> None:
    if way == "compiled with its adapters" and not lora:
        pytest.skip("there are none")
    given: dict[str, Any] = {"lora": lora, "with_adapters": way == "compiled with its adapters"}
    plain, theirs = trained_by_trl(kind, "plain", tmp_path / "plain", **given)
    torch._dynamo.reset()
    trainer, ours = trained_by_trl(kind, way, tmp_path / "ours", **given)
    assert ours == theirs
    assert_same_states(state(trainer.model), state(plain.model))
    assert any(getattr(module, "plan", None) for module in trainer.model.modules())


# --- accelerate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["compiled first", "prepared first"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(order: str, precision: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")

    def run(compile_it: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=precision)
        model = gpt()
        for dropout in [m for m in model.modules() if isinstance(m, nn.Dropout)]:
            dropout.p = 0.0
        if compile_it and order == "compiled first":
            model = compiled(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = torch.utils.data.DataLoader(texts(), batch_size=3)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if compile_it and order == "prepared first":
            model = compiled(model)
        torch.manual_seed(2)
        losses = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
        kept = state(model)
        accelerator.save_state(str(tmp_path / f"{compile_it}"), safe_serialization=False)
        optimizer.zero_grad()
        accelerator.load_state(str(tmp_path / f"{compile_it}"))
        assert_same_states(state(model), kept)
        if compile_it:
            assert model.plan is not None
        return losses, kept

    theirs, ours = run(False), run(True)
    assert all(same(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
    assert_same_states(ours[1], theirs[1])


# --- Lightning --------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Linear layers, dropout and BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        first = (nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.layers = nn.Sequential(*first, nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.mark.parametrize("what", ["submodule", "whole"])
def test_lightning(what: str, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Task(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.net(x), y)

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss: Tensor = self(*batch)
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("val", self(*batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def run(compile_it: bool) -> tuple[dict[str, Tensor], Any]:
        lightning.seed_everything(0, verbose=False)
        net: Any = Net()
        task = Task(compiled(net) if compile_it and what == "submodule" else net)
        task = compiled(task) if compile_it and what == "whole" else task
        data = torch.utils.data.TensorDataset(torch.randn(24, 8), torch.arange(24) % 2)
        loader = torch.utils.data.DataLoader(data, batch_size=6)
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, accumulate_grad_batches=2,
            gradient_clip_val=0.5, default_root_dir=tmp_path / f"{compile_it}", enable_model_summary=False,
        )  # fmt: skip
        torch.manual_seed(1)
        trainer.fit(task, loader, loader)
        kept = state(task)
        planned = task if what == "whole" else task.net
        if compile_it:
            assert planned.plan is not None
        path = tmp_path / f"{compile_it}.ckpt"
        trainer.save_checkpoint(path)
        loaded = torch.load(path, weights_only=False)["state_dict"]
        assert_same_states(dict(loaded), kept)
        return kept, trainer

    theirs, ours = run(False), run(True)
    assert_same_states(ours[0], theirs[0])


@pytest.mark.parametrize("order", ["compiled first", "set up first"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_fabric(order: str, precision: Any, tmp_path: Path) -> None:
    fabrics = pytest.importorskip("lightning.fabric")

    def run(compile_it: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        fabric = fabrics.Fabric(accelerator="cpu", devices=1, precision=precision)
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2))
        model = compiled(model) if compile_it and order == "compiled first" else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = fabric.setup(model, optimizer)
        model = compiled(model) if compile_it and order == "set up first" else model
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(model(torch.ones(4, 8)).square().mean())
            fabric.backward(losses[-1])
            optimizer.step()
        assert not compile_it or model.plan is not None
        return losses, state(model)

    theirs, ours = run(False), run(True)
    assert all(map(same, ours[0], theirs[0]))
    assert_same_states(ours[1], theirs[1])


# --- copies, averages, wrappers -----------------------------------------------------------------------------------


def test_averaged_models_and_batch_norm_updates() -> None:
    def run(compile_it: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net: Any = Net()
        model = compiled(net) if compile_it else net
        averaged = torch.optim.swa_utils.AveragedModel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = [torch.randn(6, 8) for _ in range(3)]
        for x in data:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            averaged.update_parameters(model)
        torch.optim.swa_utils.update_bn(data, averaged)
        return state(averaged)

    assert_same_states(run(True), run(False))


# --- data parallelism over two processes ----------------------------------------------------------------------------


def _rank(rank: int, folder: str, compile_it: bool, settings: dict[str, Any]) -> None:
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{compile_it}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1)) for _ in range(8)))
    model: Any = compiled(net, "70%") if compile_it else net
    parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.02, **settings)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-2)
    torch.manual_seed(10 + rank)
    losses = []
    for step in range(4):
        x = torch.randn(64, 64)
        if step == 1 and not settings.get("static_graph"):
            with parallel.no_sync():
                parallel(x).square().mean().backward()
        loss = parallel(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if compile_it:
        assert len(model.fxremat.plans) == 1  # DistributedDataParallel did not split the graph by its buckets
    torch.save((losses, state(parallel)), f"{folder}/{compile_it}-{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "settings", [{}, {"static_graph": True}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}],
    ids=lambda settings: "-".join(settings) or "plain",
)  # fmt: skip
def test_distributed_data_parallel(settings: dict[str, Any], tmp_path: Path) -> None:
    for compile_it in (False, True):
        torch.multiprocessing.spawn(_rank, (str(tmp_path), compile_it, settings), nprocs=2)  # type: ignore[no-untyped-call]
    for rank in range(2):
        ours, theirs = (torch.load(tmp_path / f"{kind}-{rank}.pt") for kind in (True, False))
        assert all(same(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
        assert_same_states(ours[1], theirs[1])


def _parallel_rank(rank: int, folder: str) -> None:
    import os

    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["FXREMAT_CACHE"] = f"{folder}/cache"  # empty: every op, collectives included, is measured
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def model() -> Any:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        return parallelize_module(layers, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    plain, ours = model(), model()
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    plain(x).square().mean().backward()
    compiled(ours)(x).square().mean().backward()
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    assert all(same(p.grad.to_local(), q.grad.to_local()) for p, q in pairs)
    dist.destroy_process_group()


def test_tensor_parallel_models_are_measured_without_hanging(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(_parallel_rank, (str(tmp_path),), nprocs=2)  # type: ignore[no-untyped-call]


def test_copies_train_alike() -> None:
    torch.manual_seed(0)
    module = compiled(Net())
    twin = copy.deepcopy(module)
    x = torch.randn(6, 8)
    for model in (module, twin):
        torch.manual_seed(5)
        model(x).square().mean().backward()
    assert all(same(p.grad, q.grad) for p, q in zip(module.parameters(), twin.parameters(), strict=True))
