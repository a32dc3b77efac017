"""Runs pipeline plans on PyTorch's engine; contains all uses of private names of torch.distributed.pipelining.

    plan.orders(n)     F (forward) and B (backward) of each rank; any rank may have any stages
    lowered            the same actions with the sends and receives that the engine adds
    engine             runs the actions: a _PipelineScheduleRuntime with LeanStages

The engine allocates the receive buffers of all micro-batches of a step and keeps them for good, and it keeps
the tensors it sent until the step ends (torch 2.13; pytorch#136380). A `LeanStage` has each buffer only from
the receive to the backward, and frees sent tensors once they have arrived.
"""

from __future__ import annotations

import contextlib
import csv
import logging
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from fxremat.solvers.pipeline.model import PipelinePlan


@dataclass(frozen=True)
class Action:
    """One action of a rank: F, B, SEND_F, RECV_F, SEND_B or RECV_B of one micro-batch of one stage.

    F is a forward and B a backward; the others send and receive activations (F) and gradients (B).
    """

    stage: int
    kind: str
    microbatch: int


def lowered(plan: PipelinePlan, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each rank, sends and receives included, in the order in which the engine runs them.

    They are made by `_add_send_recv` and `_Action` of `torch.distributed.pipelining.schedules` (torch 2.13).
    """
    from torch.distributed.pipelining.schedules import _Action, _add_send_recv

    rank_of = [stage.device for stage in plan.stages]
    computed = {
        rank: [_Action.from_str(text) for text in row]
        for rank, row in enumerate(rows(plan, microbatches))
        if row
    }
    with_copies = _add_send_recv(computed, rank_of.__getitem__, len(plan.stages))
    return tuple(
        tuple(
            Action(action.stage_index, action.computation_type.value, action.microbatch_index or 0)
            for action in with_copies.get(rank, [])
        )
        for rank in range(plan.machines.devices)
    )


def rows(plan: PipelinePlan, microbatches: int) -> list[list[str]]:
    """Return each rank's forwards and backwards as the engine spells them: "2F0" is stage 2, forward, micro-batch 0."""
    return [
        [f"{work.stage}{work.kind.value}{work.microbatch}" for work in works]
        for works in plan.orders(microbatches)
    ]


class LeanStage(PipelineStage):
    """A pipeline stage that allocates receive buffers only for micro-batches between receive and backward.

    Shapes are passed in, so that the engine runs nothing to infer them. Overrides (torch 2.13 to 2.15):

        _prepare_forward_infra, _create_grad_recv_info   allocate buffers of all micro-batches; here without memory
        get_fwd_recv_ops, get_bwd_recv_ops               called when a receive starts; here they allocate its buffer
        get_fwd_send_ops, get_bwd_send_ops               return sends to the engine, which keeps them; here they send
        forward_one_chunk, backward_one_chunk            here they also pass the target, and free used buffers
    """

    def __init__(
        self, module: nn.Module, number: int, count: int, device: torch.device,
        entering: tuple[Tensor, ...], leaving: Tensor, group: dist.ProcessGroup | None,
    ) -> None:  # fmt: skip
        super().__init__(
            module, number, count, device, input_args=entering, output_args=(leaving,), group=group
        )
        self.targets: Sequence[Tensor] = ()
        self.in_flight = 0
        self.most_in_flight = 0
        self._sent: dict[int, list[Sent]] = {}
        self._gradient_sent: Sent | None = None

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._prepare_forward_infra(*args, **kwargs)

    def _create_grad_recv_info(self, *args: Any, **kwargs: Any) -> Any:
        with self._without_memory():
            return super()._create_grad_recv_info(*args, **kwargs)

    @contextlib.contextmanager
    def _without_memory(self) -> Iterator[None]:
        device, self.device = self.device, torch.device("meta")
        try:
            yield
        finally:
            self.device = device

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the stage's input into a new buffer."""
        self._allocate(self.args_recv_info[fwd_chunk_id], trained=True)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the gradient of the stage's output into a new buffer."""
        self._allocate(self.grad_recv_info[bwd_chunk_id], trained=False)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _allocate(self, infos: Sequence[Any], *, trained: bool) -> None:
        for info in infos:
            # it is None in torch 2.15, which allocates the buffer itself when the receive starts
            if info.buffer is not None:
                info.buffer = torch.empty_like(info.buffer, device=self.device).requires_grad_(trained)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the stage's output, which is kept for the backward anyway, and return no ops for the engine to run."""
        self._sent[fwd_chunk_id] = [_send(op) for op in super().get_fwd_send_ops(fwd_chunk_id)]
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradient of the stage's input after the previous one has arrived, so that only one is in flight.

        Waiting cannot deadlock: sends and receives are in the order of a run in which one action at a time is
        executed.
        """
        for op in super().get_bwd_send_ops(bwd_chunk_id):
            if self._gradient_sent is not None:
                self._gradient_sent.wait()
            self._gradient_sent = _send(op)
        return []

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Run the forward of one micro-batch; the last stage is also passed the micro-batch's target."""
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if self.is_last:
            kwargs = {"target": self.targets[fwd_chunk_id]}
        return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """Run the backward of one micro-batch, and free its input and the gradient of its output."""
        for sent in self._sent.pop(bwd_chunk_id, ()):
            sent.wait()  # returns at once: the gradient of the sent tensor has already come back
        super().backward_one_chunk(bwd_chunk_id, *args, **options)
        self.in_flight -= 1
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
            if getattr(info, "buffer", None) is not None:
                info.buffer = torch.empty_like(info.buffer, device="meta")

    def begin(self, targets: Sequence[Tensor]) -> None:
        """Prepare for a step with these targets, one per micro-batch."""
        self.targets, self.in_flight, self.most_in_flight = targets, 0, 0

    def finish(self) -> None:
        """Wait at the end of a step until the last gradient sent has arrived."""
        if self._gradient_sent is not None:
            self._gradient_sent.wait()
        self._gradient_sent = None


@dataclass(frozen=True)
class Sent:
    """An asynchronous send, with its tensor, which some backends require to be kept alive until it has arrived."""

    work: dist.Work
    tensor: Tensor

    def wait(self) -> None:
        """Wait until the tensor has arrived."""
        self.work.wait()


def _send(op: dist.P2POp) -> Sent:
    work = dist.isend(op.tensor, op.peer, group=op.group, tag=op.tag)
    assert work is not None  # isend returns None only on ranks outside of the group
    return Sent(work, op.tensor)


Step = Callable[..., list[Tensor]]


def group_of(plan: PipelinePlan) -> dist.ProcessGroup | None:
    """Return a process group of the ranks that have stages; None (the default group) if all ranks have some.

    The engine requires every rank of its group to have a stage. Every rank has to call this function.
    """
    used = sorted({stage.device for stage in plan.stages})
    return None if len(used) == dist.get_world_size() else dist.new_group(used)


def engine(stages: list[LeanStage], plan: PipelinePlan, microbatches: int, *, scale_grads: bool) -> Step:
    """Return a function that runs a step on this rank: (*model inputs, target=) -> losses, on the last stage's rank.

    `_PipelineScheduleRuntime(stages, n, loss_fn)._load_csv(path)` (torch 2.13) reads a row of actions for each
    rank, derives the rank of each stage from them, and adds sends and receives. A rank without stages gets a
    function that does nothing.
    """
    if not stages:
        return lambda **_: []
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    runtime = _PipelineScheduleRuntime(
        stages, microbatches, loss_fn=_computed_already, scale_grads=scale_grads
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "works.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(filter(None, rows(plan, microbatches)))
        runtime._load_csv(str(path))

    def step(*inputs: Tensor, target: Tensor | None) -> list[Tensor]:
        parts = () if target is None else torch.tensor_split(target, microbatches)
        for stage in stages:
            stage.begin(parts)
        losses: list[Tensor] = []
        with _own_words():
            runtime.step(*inputs, target=target, losses=losses, return_outputs=False)
            for stage in stages:
                stage.finish()
        return losses

    return step


def _computed_already(loss: Tensor, _: Tensor) -> Tensor:
    """Return the last stage's output unchanged; as the engine's loss function, since that stage computes the loss."""
    return loss


@contextlib.contextmanager
def _own_words() -> Iterator[None]:
    """Within this context, silence the engine's logger, which prints the full schedule when a step fails."""
    logger = logging.getLogger("torch.distributed.pipelining.schedules")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
