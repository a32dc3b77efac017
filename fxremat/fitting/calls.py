"""The lines of Python that train as an answer says: in plain PyTorch, with Trainer, TRL and Lightning."""

from __future__ import annotations

from fxremat.fitting.loaded import Loaded
from fxremat.fitting.optimizers import CODE
from fxremat.fitting.settings import Training
from fxremat.fitting.ways import Way

OWN_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"  # with which the reserve is estimated


def calls(loaded: Loaded, training: Training, way: Way) -> dict[str, str]:
    """Return the code for each library that trains such a model, by name."""
    compiled = _compiled(training, way)
    made = {"PyTorch": _plain(loaded, training, way, compiled)}
    if loaded.library == "transformers" and training.optimizer != "muon" and way.how != "weights":
        made["Trainer"] = _trainer(training, compiled, "transformers.Trainer", "transformers.TrainingArguments")
        if "length" in loaded.sizes and "image" not in loaded.sizes:
            made["TRL"] = _trainer(training, compiled, "trl.SFTTrainer", "trl.SFTConfig")
    made["Lightning"] = _lightning(loaded, training, compiled)
    return made


def _compiled(training: Training, way: Way) -> str:
    mem = f'mem="{max(1, way.budget // 2**20)}MiB"'
    if way.how == "weights":
        updates = ', updates="step"' if training.accumulate > 1 else ""
        return f"fxremat.compile(model, {mem}, offload=fxremat.Offload(weights=True{updates}), optimizer=optimizer)"
    offload = ", offload=True" if way.how else ""
    return f"fxremat.compile(model, {mem}{offload})"


def _plain(loaded: Loaded, training: Training, way: Way, compiled: str) -> str:
    lines = [*loaded.code, *_wrapped(loaded, training, way), f"optimizer = {CODE[training.optimizer]}"]
    lines.append(f"model = {compiled}")
    if training.shard == "ddp":
        lines.append("model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)")
    call = "model(**batch)" if isinstance(loaded.inputs, dict) else "model(*batch)"
    loss = f"{call}.loss" if loaded.library == "transformers" else call
    lines.append(f"for number, batch in enumerate(loader):  # batches of {training.batch}")
    if training.dtype == "autocast":
        lines += ['    with torch.autocast("cuda", torch.bfloat16):', f"        loss = {loss}"]
    else:
        lines.append(f"    loss = {loss}")
    lines.append("    loss.backward()")
    inner = "    "
    if training.accumulate > 1:
        lines.append(f"    if (number + 1) % {training.accumulate} == 0:")
        inner = "        "
    lines += [f"{inner}optimizer.step()", f"{inner}optimizer.zero_grad()"]
    return "\n".join(lines)


def _wrapped(loaded: Loaded, training: Training, way: Way) -> list[str]:
    """Return the lines that put the model on its device, or among several."""
    if training.shard == "fsdp":
        return [
            "for layer in layers:  # the model's list of layers",
            "    torch.distributed.fsdp.fully_shard(layer)",
            "torch.distributed.fsdp.fully_shard(model)",
        ]
    return [] if way.how == "weights" or training.shard == "tp" else ["model = model.cuda()"]


def _trainer(training: Training, compiled: str, trainer: str, settings: str) -> str:
    bf16 = ", bf16=True" if training.dtype == "autocast" else ", bf16=False"
    return "\n".join(
        (
            f"optimizer = {CODE[training.optimizer]}",
            f"trainer = {trainer}(",
            f"    {compiled},",
            f"    args={settings}(",
            f'        output_dir="run", per_device_train_batch_size={training.batch},',
            f"        gradient_accumulation_steps={training.accumulate}, gradient_checkpointing=False{bf16},",
            "    ),",
            "    train_dataset=dataset,",
            "    optimizers=(optimizer, None),",
            ")",
            "trainer.train()",
        )
    )


def _lightning(loaded: Loaded, training: Training, compiled: str) -> str:
    call = "self.net(**batch)" if isinstance(loaded.inputs, dict) else "self.net(*batch)"
    loss = f"{call}.loss" if loaded.library == "transformers" else call
    precision = {"bf16": "bf16-true", "fp32": "32-true", "autocast": "bf16-mixed"}[training.dtype]
    strategy = f', devices={training.devices}, strategy="{training.shard}"' if training.shard == "ddp" else ""
    made = CODE[training.optimizer].replace("model.parameters()", "self.parameters()")
    return "\n".join(
        (
            "class Task(lightning.LightningModule):",
            "    def __init__(self, net):",
            "        super().__init__()",
            "        self.net = net",
            "",
            "    def training_step(self, batch, number):",
            f"        return {loss}",
            "",
            "    def configure_optimizers(self):",
            f"        return {made}",
            "",
            f"task = Task({compiled})",
            "trainer = lightning.Trainer(",
            f'    precision="{precision}", accumulate_grad_batches={training.accumulate}{strategy}',
            ")",
            "trainer.fit(task, loader)",
        )
    )
