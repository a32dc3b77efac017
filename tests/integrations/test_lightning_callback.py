"""`Remat`, the callback of Lightning: the bits of plain training within a budget."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxremat

lightning = pytest.importorskip("lightning")

from fxremat.integrations.lightning import Remat  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("torch_ready"),
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]


class Task(lightning.LightningModule):  # type: ignore[name-defined, misc]
    """A classifier whose loss is in `training_step`."""

    def __init__(self, inside: bool = False) -> None:
        super().__init__()
        self.inside = inside
        layers = (nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU()) for _ in range(5))
        self.net = nn.Sequential(*layers, nn.Linear(64, 10))
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        self.losses.append(float(F.cross_entropy(self.net(batch[0]), batch[1])))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(task: Any, callbacks: list[Any]) -> None:
    data = torch.utils.data.TensorDataset(torch.randn(512, 64), torch.randint(10, (512,)))
    loader = torch.utils.data.DataLoader(data, batch_size=128)
    trainer = lightning.Trainer(
        max_epochs=2, logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        enable_checkpointing=False, gradient_clip_val=0.1, callbacks=callbacks,
    )  # fmt: skip
    trainer.fit(task, loader, loader)


@pytest.mark.parametrize("network", [None, "net"])
def test_fit_with_the_callback_is_fit_without(network: str | None) -> None:
    torch.manual_seed(0)
    plain = Task()
    ours = copy.deepcopy(plain)
    callback = Remat(mem="70%", network=network, search=fxremat.Search(seconds=0.2, progress=False))
    for task, callbacks in ((plain, []), (ours, [callback])):
        torch.manual_seed(1)
        fit(task, callbacks)
    assert ours.losses == plain.losses
    states = zip(ours.state_dict().values(), plain.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in states)
    assert callback.plan.predicted_peak <= callback.plan.budget
    assert "training_step" not in ours.__dict__
    assert "_compiled_call_impl" not in ours.net.__dict__
