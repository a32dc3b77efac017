"""Parameters that are updated inside the step, and that may live on the host between their uses.

    update(w, gradient, primal, weights)     the optimizer's own step of one parameter, in place on `w`

`w` is what is on the device: the parameter itself, or a copy that came from the host. The step is that of an optimizer
of the user's class that holds this one parameter and the user's settings of the moment (learning rates may change), so
its bits are those of the plain step. Its state is the user's optimizer's: `optimizer.state_dict()` has it, on the host
where the parameter lives there.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import torch
from torch import fx, nn

from fxremat._torch import shell_of
from fxremat.errors import FxrematError
from fxremat.runtime.host import HostTier

ELEMENTWISE = (  # what they do to one parameter depends on that one alone, element by element
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Rprop,
)

_numbers = count()
_known: weakref.WeakValueDictionary[str, Weights] = weakref.WeakValueDictionary()


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise `FxrematError` for an optimizer whose step of one parameter may depend on others."""
    if type(optimizer) not in ELEMENTWISE:
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise FxrematError(
            f"a {type(optimizer).__name__} cannot step inside the backward, parameter by parameter; "
            f"of torch.optim these can: {names}"
        )


class Weights:
    """The parameters of an optimizer, each with an optimizer of its own that shares its state.

    Raises:
        FxrematError: what `check_optimizer` raises.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, tier: HostTier) -> None:
        check_optimizer(optimizer)
        self.name = f"weights-{next(_numbers)}"
        _known[self.name] = self
        self.optimizer, self.tier = optimizer, tier
        self.hosted: dict[int, nn.Parameter] = {}  # by id
        self._homes: set[int] = set()  # addresses of what is on the host; parameters and state keep it alive
        self._single: dict[int, tuple[torch.optim.Optimizer, nn.Parameter]] = {}
        self._at: dict[int, nn.Parameter] = {}
        self.updated: set[int] = set()  # ids of parameters that the last backward has updated
        self.settle(())
        optimizer.register_step_pre_hook(self._stepped)

    def _stepped(self, *_: Any) -> None:
        """The user's `optimizer.step()`: all is done, so it finds no gradients."""
        self.updated.clear()
        for parameter in self.parameters():
            if isinstance(parameter.grad, Spent):
                parameter.grad = None

    def begin(self) -> None:
        """A step begins. Raises `FxrematError` where the last one was not ended by `optimizer.step()`."""
        if self.updated:
            raise FxrematError(
                "the last backward has updated the parameters, and optimizer.step() was not called since: with "
                "offload_weights every backward is a step, so gradients of several cannot be accumulated"
            )
        self._send_states_home()

    @contextlib.contextmanager
    def telling_what_is_new(self) -> Iterator[None]:
        """Around a backward: an exception in the middle says how many parameters are new; the others are old."""
        try:
            yield
        except BaseException as error:
            count, all_of = len(self.updated), len(self.parameters())
            error.add_note(
                f"fxremat: {count} of {all_of} parameters were updated before this happened, with their optimizer "
                "state; each of the others is as it was"
            )
            self.updated.clear()
            raise

    def parameters(self) -> list[nn.Parameter]:
        """All of the optimizer's."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def settle(self, hosted: Iterable[nn.Parameter]) -> None:
        """Move these parameters, and what state they have, to the host; their numbers do not change."""
        for parameter in hosted:
            if id(parameter) not in self.hosted:
                self.hosted[id(parameter)] = parameter
                parameter.data = self._home(parameter.data)
        self._send_states_home()
        self._at = {p.data_ptr(): p for p in self.parameters() if p.numel()}

    def _send_states_home(self) -> None:
        """Move state of hosted parameters to the host; what `optimizer.load_state_dict` brought is not there yet."""
        for parameter in self.hosted.values():
            state = self.optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                    state[key] = self._home(value)

    def _home(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself where it is on the host already, else a copy there."""
        if tensor.data_ptr() in self._homes:
            return tensor
        host = self.tier.host_like(tensor)
        host.copy_(tensor)
        self._homes.add(host.data_ptr())
        return host

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, primal: torch.Tensor) -> None:
        """The optimizer's step of the parameter whose storage `primal` shows."""
        parameter = self._at.get(primal.data_ptr())
        if parameter is None:
            raise FxrematError(
                "a parameter has been replaced since the step was planned; compile the model again after moving it"
            )
        single, shell = self._single_for(parameter)
        shell.data, shell.grad = weight, gradient
        state = self.optimizer.state[parameter]
        away = id(parameter) in self.hosted
        counts = {  # of steps: tensors of one number, which the optimizer changes in place
            key: value.item()
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and not value.dim()
        }
        if state:
            single.state[shell] = self._fetched(state, parameter) if away else state
        try:
            single.step()
            after = single.state.pop(shell, {})
            if away:
                self._store(weight, after, parameter)
            else:
                self.optimizer.state[parameter] = after
        except BaseException:
            for key, count in counts.items():
                state[key].fill_(count)
            raise
        finally:
            shell.grad = None
            shell.data = parameter.data
        self.updated.add(id(parameter))
        parameter.grad = shell_of(Spent, parameter)

    def _single_for(self, parameter: nn.Parameter) -> tuple[torch.optim.Optimizer, nn.Parameter]:
        group = next(g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"]))
        settings = {key: value for key, value in group.items() if key != "params"}
        if id(parameter) not in self._single:
            shell = nn.Parameter(parameter.data, requires_grad=True)
            made: Any = type(self.optimizer)
            self._single[id(parameter)] = (made([shell]), shell)
        single, shell = self._single[id(parameter)]
        single.param_groups[0].update(settings)
        return single, shell

    def _fetched(self, state: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
        found = {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                back = self.tier.prefetch(value, value.device)
                self.tier.wait(value)
                found[key] = back
            else:
                found[key] = value
        return found

    def _store(self, weight: torch.Tensor, after: dict[str, Any], parameter: nn.Parameter) -> None:
        """Send the new numbers home. What can fail comes first: a parameter is all old or all new."""
        state = self.optimizer.state[parameter]
        tensors = {
            key: value
            for key, value in after.items()
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape
        }
        homes = {key: state[key] if key in state else self._home(value) for key, value in tensors.items()}
        self.tier.store(weight, parameter.data)  # whoever needs the memory waits for it
        for key, value in tensors.items():
            self.tier.store(value, homes[key])
        state.update(after | homes)
        for home in homes.values():
            self.tier.release(home)


def check_unscaled(gradient: torch.Tensor) -> None:
    """Raise `FxrematError` where the loss was scaled before its backward: updates would be those of another loss."""
    if gradient.numel() == 1 and float(gradient) != 1.0:
        raise FxrematError(
            f"the gradient of the loss is {float(gradient):g}, not 1: a GradScaler, or a factor for accumulation; with "
            "offload_weights the step is taken inside the backward, for the loss as the model returns it"
        )


class Spent(torch.Tensor):
    """What stands in `.grad` once the step has used the gradient up: any use of it is an error that says so."""

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Only `zero_grad(set_to_none=False)` may touch it."""
        if op in (torch.ops.aten.zero_.default, torch.ops.aten.detach.default):
            return args[0]
        raise FxrematError(
            f"{op} asks for a gradient, but with offload_weights each parameter is updated as soon as its gradient is "
            "there, and the gradient is gone: clipping by the norm of all, GradScaler and what else needs all "
            "gradients at once work with a plan without offload_weights"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return "Spent()"


def weights_named(name: str) -> Weights:
    """The living weights of a name. Raises `FxrematError`."""
    found = _known.get(name)
    if found is None:
        raise FxrematError(f"the parameters {name} are gone; keep the module that fxremat.compile returned")
    return found


def update(weight: torch.Tensor, gradient: torch.Tensor, primal: torch.Tensor, weights: str) -> None:
    """The optimizer's step of one parameter."""
    weights_named(weights).update(weight, gradient, primal)


fx.node.has_side_effect(update)
