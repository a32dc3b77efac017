"""Parameters that are updated inside the step, and that may live on the host between their uses.

    w = wait(prefetch(d), ...)    a copy on device d of a parameter that lives on the host, before its first reader
    update(w, gradient)           the optimizer's update of one parameter, in place on `w`; a copy to the host begins
    release(w)                    waits until that copy has ended
    prefetch_state, wait_for_state, release_state     the same for the parameter's optimizer state, around the update

With `Weights(..., later=True)` the updates run in the user's `optimizer.step()` instead, one parameter after the other;
`update` then adds the gradient to the parameter's `.grad`, and that travels in the place of the optimizer state.

Graphs name parameters by their number: the index among the optimizer's parameters. An update is the `step` of a second
optimizer of the user's class, which holds one parameter and has the user's current settings (learning rates may
change), so its bits are those of the plain step. Its state belongs to the user's optimizer: `optimizer.state_dict()`
has it, on the host if the parameter lives there.

Between steps a hosted parameter is an ordinary CPU tensor in the host's memory, to be read, saved and loaded. While the
forward is called it looks like a tensor of the device that has no memory, so that a model whose parameters never were
on the device is captured as one whose parameters are.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import fx, nn

from fxremat.errors import FxrematError
from fxremat.host.tier import HostTier
from fxremat.ops.spent import Spent
from fxremat.torch_private import first_after_step, scaling_of, shell_of, storage_of, without_memory

USUAL = frozenset(  # settings of optimizers that do not affect how many bytes they need
    ("lr", "betas", "eps", "weight_decay", "momentum_decay", "alpha", "lr_decay", "etas", "step_sizes", "dampening")
)
ELEMENTWISE = (  # classes of optimizers that update each element of a parameter independently of all others
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


def kind_of_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Return an optimizer's class with the settings that are switched on, which determine the size of its state.

    >>> kind_of_optimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9))
    'SGD(momentum)'
    """
    switched = sorted(name for name, value in optimizer.defaults.items() if name not in USUAL and value)
    return f"{type(optimizer).__name__}({', '.join(switched)})"


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise `FxrematError` for an optimizer whose update of one parameter may depend on other parameters."""
    if type(optimizer) not in ELEMENTWISE:
        names = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise FxrematError(
            f"a {type(optimizer).__name__} cannot step inside the backward, parameter by parameter; "
            f"of torch.optim these can: {names}"
        )


class Weights:
    """The parameters of an optimizer, which a step updates one by one; each is on the device or on the host.

    Args:
        tier: where they live on the host.
        device: where the model computes.
        later: update the parameters in `optimizer.step()`, not in the backward.

    Raises:
        FxrematError: the optimizer's update of one parameter may depend on others.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, tier: HostTier, device: torch.device, *, later: bool = False
    ) -> None:
        check_optimizer(optimizer)
        self.later = later
        self._gradients: dict[int, torch.Tensor] = {}  # by number: the host's memory of a gradient that waits there
        self._sums: dict[int, torch.Tensor] = {}  # the same of the backward that runs, where several graphs make it
        self._aside: dict[int, torch.Tensor] = {}  # gradients that the user's `step` does not see, as they are used
        self._updating = False  # True inside of the user's `step`, where updates run later
        self.name = f"weights-{next(_numbers)}"
        _known[self.name] = self
        self.optimizer, self.tier, self.device = optimizer, tier, device
        self.hosted: dict[int, torch.Tensor] = {}  # index of a parameter on the host -> its tensor there
        # index of a parameter on the host -> a tensor of its shape without memory, which the forward receives
        self._shells: dict[int, torch.Tensor] = {}
        # addresses of the tensors on the host that parameters and optimizer state are stored in
        self._homes: set[int] = set()
        self._single: dict[int, tuple[torch.optim.Optimizer, nn.Parameter]] = {}
        self._coming: dict[int, dict[str, torch.Tensor]] = {}  # optimizer state that is being copied to the device
        self._leaving: dict[int, dict[str, torch.Tensor]] = {}  # optimizer state that is being copied to the host
        self._going: dict[int, torch.Tensor] = {}  # updated parameters that are being copied to the host
        self.updated: set[int] = set()  # indices of the parameters that the last backward has updated
        self._all = self.parameters()  # the optimizer's parameters when the step begins
        self._watching = False  # True once a hook on the user's optimizer's step is registered
        self._process = os.getpid()

    def _before_step(self, closure: Callable[[], Any] | None) -> Any:
        """Run when the user's `optimizer.step` calls its closure, which is after all hooks before the step.

        Update what waits for the step, and let the optimizer find no gradients. Return the closure's loss.

        Args:
            closure: what the user gave to `step`; it may run forward and backward.
        """
        loss = closure() if closure else None
        if self.later:
            self._update_all()
        self.updated.clear()
        for parameter in self.parameters():
            if isinstance(parameter.grad, Spent):
                parameter.grad = None
        return loss

    def _after_step(self) -> None:
        """Run after the user's `optimizer.step()`: gradients stay until `zero_grad`, as ever."""
        parameters = self.parameters()
        for number, gradient in self._aside.items():
            parameters[number].grad = gradient
        self._aside = {}

    def _update_all(self) -> None:
        """Update all parameters with gradients; each that lives on the host comes for that, and goes back."""
        self._all = self.parameters()
        self._take_replaced()
        self._send_states_home()
        self._updating = True
        try:
            with torch.no_grad(), self.telling_what_is_new():
                for number, parameter in enumerate(self._all):
                    if parameter.grad is not None:
                        self._update_alone(number, parameter.grad)
                        self._aside[number], parameter.grad = parameter.grad, None
        finally:
            self._updating = False

    def _update_alone(self, number: int, gradient: torch.Tensor) -> None:
        if number not in self.hosted:
            self._update(self._all[number].data, gradient, number)
            return
        weight, here = self.prefetch(self.device, number), self.tier.prefetch(gradient, self.device)
        self.prefetch_state(number)
        self.wait(weight, number)
        self.tier.wait(gradient)
        self.wait_for_state(number)
        self._update(weight, here, number)
        if any(value is not None for value in scaling_of(self.optimizer).values()):  # it has unscaled the gradient
            self.tier.store(here, gradient)
            self.tier.release(gradient)
        self.release(weight, number)
        self.release_state(number)

    def begin(self) -> None:
        """Begin a step. Raises `FxrematError` if `optimizer.step()` was not called after the last backward."""
        if self.updated:
            raise FxrematError(
                "the last backward has updated the parameters, and optimizer.step() was not called since: with "
                "weights on the host every backward is a step, unless gradients are to be added up: "
                'Offload(weights=True, updates="step")'
            )
        self._all = self.parameters()
        self._watch()
        self._take_replaced()
        self._send_states_home()

    def _watch(self) -> None:
        """Register a hook on the user's `optimizer.step`, once; the hook is removed when this object is freed."""
        if self._watching:
            return
        self._watching, myself = True, weakref.ref(self)

        def before(_: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if (weights := myself()) is None:
                return None
            optimizer, *positional = arguments
            closure = partial(weights._before_step, positional[0] if positional else named.get("closure"))
            return (optimizer,), {**named, "closure": closure}

        def after(*_: Any) -> None:
            if (weights := myself()) is not None:
                weights._after_step()

        for hook in (self.optimizer.register_step_pre_hook(before), first_after_step(self.optimizer, after)):
            weakref.finalize(self, hook.remove).atexit = False

    @contextlib.contextmanager
    def telling_what_is_new(self) -> Iterator[None]:
        """Within this context, add a note to exceptions that tells how many parameters were updated before.

        When the context ends, with or without an exception, all copies to the host have ended.
        """
        try:
            yield
            self.tier.synchronize()  # code between steps reads the new parameters on the host
        except BaseException as error:
            count, all_of = len(self.updated), len(self.parameters())
            if count or not self.later:
                error.add_note(
                    f"fxremat: {count} of {all_of} parameters were updated before this happened, with their optimizer "
                    "state; each of the others is as it was"
                )
            self._abandon()
            self._after_step()
            raise

    def _abandon(self) -> None:
        """Wait for unfinished copies after an exception."""
        self.updated.clear()
        for number in list(self._going):
            self.release(self._going[number], number)
        for number in list(self._leaving):
            self.release_state(number)
        for number in list(self._coming):
            self.wait_for_state(number)
            del self._coming[number]
        self.tier.synchronize()

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the optimizer, in order."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def settle(self, hosted: Iterable[int]) -> None:
        """Move the parameters with these indices, and their optimizer state, to the host and all others to the device.

        Parameters that are views of one storage get memory of their own if some of them move.
        """
        self._leave_parent()
        hosted, left = set(hosted), set()
        for number, parameter in enumerate(self.parameters()):
            if number in hosted and number not in self.hosted:
                left.add(storage_of(parameter))
                self.hosted[number] = parameter.data = self._home(parameter.data)
                self._shells[number] = without_memory(parameter.data, self.device)
        for number, parameter in enumerate(self.parameters()):
            if number not in hosted and parameter.device != self.device:
                parameter.data = parameter.data.to(self.device)
                self._bring_state(parameter)
                # a view that stays would keep the whole shared storage alive, so it gets memory of its own
            elif number not in hosted and storage_of(parameter) in left:
                parameter.data = _moved(parameter.data, self.device)
        self._send_states_home()

    def _bring_state(self, parameter: nn.Parameter) -> None:
        """Move to the device the optimizer state of a parameter that has just moved there.

        Step counts stay on the host, except those of fused and capturable optimizers, which read them on the
        device.
        """
        state, group = self.optimizer.state.get(parameter, {}), self._group_of(parameter)
        counts = _counts(state) if group.get("fused") or group.get("capturable") else {}
        for key, value in (_large(state, parameter) | counts).items():
            state[key] = value.to(self.device)

    def _group_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        return next(g for g in self.optimizer.param_groups if any(p is parameter for p in g["params"]))

    def _leave_parent(self) -> None:
        """Copy parameters on the host in a forked child, since the files belong to the parent."""
        if self._process == os.getpid():
            return
        self._process, parameters = os.getpid(), self.parameters()
        self._homes = set()
        for number in self.hosted:
            self.hosted[number] = parameters[number].data = self._home(parameters[number].data)

    def back_to_device(self) -> None:
        """Undo `settle`: move all parameters and state to the device, where the user's optimizer can update them."""
        parameters = self.parameters()
        for number in self.hosted:
            parameter = parameters[number]
            parameter.data = _moved(parameter.data, self.device)
            state = self.optimizer.state.get(parameter, {})
            for key, value in _large(state, parameter).items():
                state[key] = _moved(value, self.device)
            if parameter.grad is not None and not isinstance(parameter.grad, Spent):
                parameter.grad = _moved(parameter.grad, self.device)
        self.hosted, self._shells, self._homes, self.updated, self._gradients = {}, {}, set(), set(), {}

    @contextlib.contextmanager
    def seen_on_the_device(self) -> Iterator[None]:
        """Within this context, parameters on the host appear to the model as device tensors without memory."""
        parameters = self.parameters()
        there = {number: parameters[number].data for number in self.hosted}
        shells = {number: self._shells[number] for number in self.hosted}
        gradients = {number: parameters[number].grad for number in self.hosted}  # they are on the host
        for number, parameter in enumerate(parameters):
            if number not in there and parameter.device != self.device:
                there[number] = parameter.data
                shells[number] = without_memory(parameter.data, self.device)
        try:
            for number in gradients:
                parameters[number].grad = None
            for number, shell in shells.items():
                parameters[number].data = shell
            yield
        finally:
            for number, data in there.items():
                parameters[number].data = data
            for number, gradient in gradients.items():
                parameters[number].grad = gradient

    def _take_replaced(self) -> None:
        """Copy data that was newly assigned to a parameter on the host into its memory there."""
        parameters = self.parameters()
        for number, home in self.hosted.items():
            parameter = parameters[number]
            if parameter.data.data_ptr() != home.data_ptr():
                if parameter.shape != home.shape or parameter.dtype != home.dtype:
                    raise FxrematError(
                        f"parameter {number} of the optimizer is now {parameter.dtype} of {tuple(parameter.shape)}, "
                        f"and the step was planned for {home.dtype} of {tuple(home.shape)}; compile the model again"
                    )
                home.copy_(parameter.data)
                parameter.data = home

    def _send_states_home(self) -> None:
        """Move state and gradients of hosted parameters to the host, such as state of `optimizer.load_state_dict`."""
        parameters = self.parameters()
        for number in self.hosted:
            gradient, home = parameters[number].grad, self._gradients.get(number)
            if gradient is None or isinstance(gradient, Spent):
                self._gradients.pop(number, None)
            elif home is None or gradient.data_ptr() != home.data_ptr():  # the user has assigned another one
                self._gradients[number] = home = self.tier.host_like(self.hosted[number])
                parameters[number].grad = home.copy_(gradient)
            state = self.optimizer.state.get(parameters[number], {})
            for key, value in _large(state, parameters[number]).items():
                state[key] = self._home(value)

    def _home(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself if it is on the host already, else a copy of it there."""
        if tensor.data_ptr() in self._homes:
            return tensor
        host = self._place_for(tensor)
        host.copy_(tensor)
        return host

    def _place_for(self, tensor: torch.Tensor) -> torch.Tensor:
        host = self.tier.host_like(tensor)
        self._homes.add(host.data_ptr())
        return host

    def prefetch(self, device: torch.device, number: int) -> torch.Tensor:
        """Allocate memory on the device for a parameter, begin to copy it from the host, and return it."""
        return self.tier.prefetch(self._at_home(number), device)

    def wait(self, back: torch.Tensor, number: int) -> torch.Tensor:
        """Wait until a parameter is copied into `back`, its memory on the device, and return `back`."""
        self.tier.wait(self.hosted[number])
        return back

    def release(self, weight: torch.Tensor, number: int) -> None:
        """Wait for the copy of an updated parameter to the host; the caller then drops its reference to `weight`."""
        self._going.pop(number, None)
        self.tier.release(self.hosted[number])

    def prefetch_state(self, number: int) -> None:
        """Allocate memory on the device for a parameter's optimizer state, if it has any, and begin to copy it."""
        self._coming[number] = {
            key: self.tier.prefetch(home, self.device) for key, home in self._travelling(number).items()
        }

    def wait_for_state(self, number: int) -> None:
        """Wait until a parameter's optimizer state is on the device."""
        for home in self._travelling(number).values():
            self.tier.wait(home)

    def release_state(self, number: int) -> None:
        """Wait until a parameter's optimizer state is on the host, and free its memory on the device."""
        for home in self._travelling(number).values():
            self.tier.release(home)
        self._leaving.pop(number, None)

    def _travelling(self, number: int) -> dict[str, torch.Tensor]:
        """Return what the host has of a parameter for `update`, by key: its optimizer state, or its gradient so far."""
        parameter = self._all[number]
        if self._adds_up:
            return {"grad": self._gradients[number]} if number in self._gradients else {}
        return _large(self.optimizer.state.get(parameter, {}), parameter)

    @property
    def _adds_up(self) -> bool:
        """True if gradients are added up now, and not used for updates."""
        return self.later and not self._updating

    def update(self, weight: torch.Tensor, gradient: torch.Tensor, shared: bool, number: int) -> None:
        """Run the optimizer's update of one parameter.

        If it is stored on the host, begin to copy it there with its state.

        Where updates run later, add the gradient to the parameter's instead.

        Args:
            weight: the parameter's memory on the device, which is overwritten.
            shared: the gradient's memory is not the parameter's own: another parameter has the same gradient, or the
                caller has it.
        """
        if not self._all[number].requires_grad:  # frozen since the step was captured, which torch 2.11 does not notice
            self._coming.pop(number, None)
        elif self._adds_up:
            self._add(gradient, shared, number)
        else:
            self._update(weight, gradient, number)
            self._all[number].grad = shell_of(Spent, self._all[number])

    def _add(self, gradient: torch.Tensor, shared: bool, number: int) -> None:
        """Add to the gradient of a parameter, which lives where the parameter does, in the parameter's layout."""
        parameter, home = self._all[number], self._gradients.get(number)
        if number not in self.hosted:
            if parameter.grad is None:
                parameter.grad = _copied(gradient, parameter) if shared else _alone(gradient, parameter)
            else:
                parameter.grad += gradient
            return
        before = self._coming.pop(number, {}).get("grad")
        total = _alone(gradient, parameter) if before is None else before.add_(gradient)
        if home is None:
            self._gradients[number] = parameter.grad = home = self.tier.host_like(self.hosted[number])
        self.tier.store(total, home)
        self._leaving[number] = {"grad": total}

    def add_up(self, number: int, gradient: torch.Tensor) -> None:
        """Add a gradient to those that the running backward has made of a parameter on the host, which live there.

        They are parts of one gradient, from several graphs; `add_sum` adds it to those of earlier backwards.
        """
        parameter, home = self._all[number], self._sums.get(number)
        if not parameter.requires_grad:
            return
        if home is None:
            total = _alone(gradient, parameter)
            self._sums[number] = home = self.tier.host_like(self.hosted[number])
        else:
            total = self.tier.prefetch(home, self.device)
            self.tier.wait(home)
            total.add_(gradient)
        self.tier.store(total, home)
        self.tier.release(home)

    def add_sum(self, number: int) -> None:
        """Add what the running backward has made of a parameter's gradient to that of earlier backwards."""
        home, before = self._sums.pop(number, None), self._gradients.get(number)
        if home is None:
            return
        if before is None:
            self._gradients[number] = self._all[number].grad = home
            return
        total, here = self.tier.prefetch(before, self.device), self.tier.prefetch(home, self.device)
        self.tier.wait(before)
        self.tier.wait(home)
        self.tier.store(total.add_(here), before)
        self.tier.release(before)

    def forget_sums(self) -> None:
        """Discard what a backward has made of gradients that autograd did not ask for, or because it failed."""
        self._sums = {}
        self.tier.synchronize()

    def _update(self, weight: torch.Tensor, gradient: torch.Tensor, number: int) -> None:
        """Run the optimizer's update of one parameter, and send it home with its state if it lives on the host."""
        parameter = self._all[number]
        single, shell = self._single_for(number, weight)
        shell.data, shell.grad = weight, gradient
        state = self.optimizer.state[parameter]
        counts = {  # step counts are saved as numbers; reading one on the device would wait for all submitted work
            key: value.item() if value.device.type == "cpu" else value.clone()
            for key, value in _counts(state).items()
        }
        coming = self._coming.pop(number, {})
        if state:
            single.state[shell] = {**state, **coming}
        try:
            single.step()
            after = single.state.pop(shell, {})
            if number in self.hosted:
                self._store(weight, after, number)
            else:
                self.optimizer.state[parameter] = after
        except BaseException:
            for key, count in counts.items():
                state[key].copy_(count) if isinstance(count, torch.Tensor) else state[key].fill_(count)
            raise
        finally:
            shell.grad = None
            shell.data = shell.data.new_empty(0)
        self.updated.add(number)

    def _single_for(self, number: int, weight: torch.Tensor) -> tuple[torch.optim.Optimizer, nn.Parameter]:
        parameter = self._all[number]
        settings = {key: value for key, value in self._group_of(parameter).items() if key != "params"}
        if number not in self._single:
            shell = nn.Parameter(weight.data, requires_grad=True)
            made: Any = type(self.optimizer)
            self._single[number] = (made([shell]), shell)
        single, shell = self._single[number]
        single.param_groups[0].update(settings)
        vars(single).update(scaling_of(self.optimizer))
        return single, shell

    def _store(self, weight: torch.Tensor, after: dict[str, Any], number: int) -> None:
        """Begin to copy an updated parameter and its state to the host.

        Memory is allocated first, which can fail: a parameter is either entirely old or entirely new.

        Args:
            after: the state after the update.
        """
        parameter = self._all[number]
        state = self.optimizer.state[parameter]
        tensors = _large(after, parameter)
        homes = {
            key: state[key] if key in state else self._place_for(value) for key, value in tensors.items()
        }
        self.tier.store(weight, self.hosted[number])
        self._going[number] = weight
        for key, value in tensors.items():
            self.tier.store(value, homes[key])
        self._leaving[number] = tensors
        state.update(after | homes)

    def check_unscaled(self, gradients: Sequence[torch.Tensor]) -> None:
        """Raise `FxrematError` if updates run in the backward, and the loss was scaled: they would be wrong.

        Args:
            gradients: the gradients of the model's scalar outputs. One output is the loss; others may be unused or
                reweighted.
        """
        found = [] if self.later else [float(gradient) for gradient in gradients]
        if found and 1.0 not in found:
            what = "gradient of the loss is" if len(found) == 1 else "gradients of the model's scalar outputs are"
            numbers = ", ".join(f"{number:g}" for number in found)
            raise FxrematError(
                f"the {what} {numbers}, not 1: a GradScaler, or a factor for accumulation; with weights on the host "
                "the step is taken inside the backward, for the loss as the model returns it, unless updates wait for "
                'the optimizer: Offload(weights=True, updates="step")'
            )

    def _at_home(self, number: int) -> torch.Tensor:
        if number not in self.hosted:
            raise FxrematError(
                "weights that live on the host are moved there by the module that fxremat.compile returns; "
                "call that one"
            )
        return self.hosted[number]


def _counts(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the step counts in an optimizer state: tensors with one number, which the optimizer changes in place."""
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor) and not value.dim()}


def _large(state: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the state tensors with the parameter's shape, which are large enough to be worth copying."""
    return {
        key: value
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == parameter.shape
    }


def _alone(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient in the parameter's layout and in memory of its own, as autograd would put it into `.grad`."""
    if gradient.stride() == parameter.stride() and gradient.untyped_storage().nbytes() == gradient.nbytes:
        return gradient.detach()
    return _copied(gradient, parameter)


def _copied(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a copy of a gradient in the parameter's layout."""
    return torch.empty_like(parameter, device=gradient.device, requires_grad=False).copy_(gradient)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on the device, in a storage of its own."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return copy.copy_(tensor)


def weights_named(name: str) -> Weights:
    """Return the `Weights` with this name. Raises `FxrematError` if it does not exist any more."""
    found = _known.get(name)
    if found is None:
        raise FxrematError(f"the parameters {name} are gone; keep the module that fxremat.compile returned")
    return found


def prefetch(device: torch.device, number: int, weights: str) -> torch.Tensor:
    """Begin to copy a parameter from the host to the device; return its memory there."""
    return weights_named(weights).prefetch(device, number)


def wait(back: torch.Tensor, number: int, weights: str) -> torch.Tensor:
    """Wait until a parameter is copied into `back`, its memory on the device, and return `back`."""
    return weights_named(weights).wait(back, number)


def update(weight: torch.Tensor, gradient: torch.Tensor, shared: bool, number: int, weights: str) -> None:
    """Run the optimizer's update of one parameter; if it is stored on the host, begin to copy it there with its state.
    """
    weights_named(weights).update(weight, gradient, shared, number)


def release(weight: torch.Tensor, number: int, weights: str) -> None:
    """Wait until an updated parameter is copied to the host; the caller then drops its reference to `weight`."""
    weights_named(weights).release(weight, number)


def prefetch_state(number: int, weights: str) -> None:
    """Begin to copy a parameter's optimizer state from the host to the device."""
    weights_named(weights).prefetch_state(number)


def wait_for_state(number: int, weights: str) -> None:
    """Wait until a parameter's optimizer state is on the device."""
    weights_named(weights).wait_for_state(number)


def release_state(number: int, weights: str) -> None:
    """Wait until a parameter's optimizer state is copied to the host."""
    weights_named(weights).release_state(number)


for _function in (prefetch, wait, update, release, prefetch_state, wait_for_state, release_state):
    fx.node.has_side_effect(_function)
