"""What has been done to the parameters of a parallel module since its last call, for ranks to compare.

    call 6   optimizer.step(), lr 0.1   p.mul_(3)   call 7 says: 1 step, lr 0.1, a write to p

Of weights that are split no rank has what another has: that a rank has left out a step, taken it with another
rate, or written by itself, shows here alone. Writes are seen by the counters of versions that tensors have,
which those to `.data` escape.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from autopar.runtime.collectives.statements import StatementPart
from autopar.runtime.optimizers.optimizers import at_steps, makes_state
from autopar.runtime.parameters.parameters import local
from autopar.runtime.tree.user_tree import UserTree
from autopar.torch_seams.modes import without_subclass_functions
from autopar.torch_seams.modules import own_parameters
from autopar.torch_seams.tensors import version_of

KEPT = 16  # steps between two calls, of which rates are compared
_STEPS = "step on all ranks after the same calls"
_RATES = "give optimizers on all ranks the same options; schedules follow from what all ranks have"
_WRITES = "write the same parameters on all ranks, or call load_state_dict of the parallel module"
_CHOSEN = ("params", "param_names", "foreach", "fused", "lr")  # that are no options, or told apart
_PLAIN = (int, float, bool, str, tuple, type(None))


class ParameterChanges:
    """Changes of the parameters in `tree`, by steps and beside them.

    With stages ranks have different parameters, perhaps in groups of different rates: where ranks differ in
    rates at their first steps, these are compared no more (`let_differ`).
    """

    def __init__(self, tree: UserTree, *, staged: bool) -> None:
        self._tree, self._staged = tree, staged
        self._steps = 0
        self._rates: list[tuple[str, str, str]] = []  # of steps since the last call: optimizer, lr, options
        self._versions = self._read()
        self._first, self._compares_rates = True, True
        self.written: tuple[str, ...] = ()  # names of what `parts` told last of as written beside steps
        mine = weakref.ref(self)

        def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            changes = mine()
            if changes is not None:
                changes.stepped(optimizer)

        at_steps(register_optimizer_step_post_hook, self, after)

    def parts(self) -> Iterator[StatementPart]:
        """Changes of parameters since ranks compared last; a new count begins."""
        yield StatementPart(
            "the count of optimizer steps since the last call", _STEPS, str(self._steps).encode()
        )
        for kind, rate, options in self._rates if self._compares_rates else ():
            yield StatementPart(f"lr of {kind}", _RATES, rate.encode())
            yield StatementPart(f"options of {kind}", _RATES, options.encode())
        self.written = tuple(self._written())
        text = ", ".join(self.written) or "none"
        if self._staged and self.written:
            text = "some"
        yield StatementPart("writes to parameters beside steps", _WRITES, text.encode())
        self._first = self._first and not self._steps
        self._steps = 0
        self._rates.clear()

    @property
    def free(self) -> set[str]:
        """Names of parts in which ranks may differ, as these are the first steps and ranks are stages."""
        if not (self._staged and self._first and self._compares_rates):
            return set()
        return {f"{word} of {kind}" for kind, *_ in self._rates for word in ("lr", "options")}

    def let_differ(self) -> None:
        """Compare rates no more."""
        self._compares_rates = False

    def accept(self) -> None:
        """Take the parameters as they are: what has been written was, on all ranks, by one call."""
        self._versions = self._read()

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        own = {*map(id, self._tree.parameters()), *map(id, self._tree.nothing)}
        if not any(id(item) in own for group in optimizer.param_groups for item in group["params"]):
            return
        made = makes_state()
        self._steps += not made
        self._count_writes(optimizer)
        if len(self._rates) < KEPT and not made:
            self._rates.append((type(optimizer).__name__, *_options(optimizer.param_groups)))
        self._versions = self._read()

    def _count_writes(self, optimizer: torch.optim.Optimizer) -> None:
        """Let parts of DTensors count what a step has written: foreach and fused steps leave no trace."""
        for group in () if self._tree.is_plain else optimizer.param_groups:
            for item in group["params"]:
                if isinstance(item, DTensor) and item.grad is not None and not local(item).is_inference():
                    increment_version(local(item))

    def _read(self) -> list[tuple[Any, tuple[int, int]]]:
        """The parts of DTensors, by references, and what writes change: the place in memory, and versions. A
        DTensor's counts writes to it, its part's those to that.

        Of a part there is one reference as long as that is kept; an id would be that of a later part, too.
        """
        held = [*self._tree.parameters()]
        if self._tree.is_plain and not any(map(Tensor.is_inference, held)):
            states = zip(map(Tensor.data_ptr, held), map(version_of, held), strict=True)
            return [(None, state) for state in states]
        with without_subclass_functions():  # or a property takes thrice as long
            pairs = [(item, local(item)) for item in held]
            return [
                (_reference(item, part), (part.data_ptr(), _versions(item, part))) for item, part in pairs
            ]

    def _written(self) -> list[str]:
        """Names of parameters that were written beside steps; with stages one of them may be converted by
        itself, which puts other tensors in their place."""
        now, before = self._read(), self._versions
        self._versions = now
        if self._tree.is_plain and now == before:
            return []
        if len(now) != len(before):
            return ["their number"]
        pairs = enumerate(zip(now, before, strict=True))
        changed = [(at, new is old) for at, ((new, n), (old, o)) in pairs if new is not old or n != o]
        names = self._names() if changed else []
        return [names[at] for at, is_same in changed if is_same or not self._staged]

    def _names(self) -> list[str]:
        """Qualified names of DTensor parameters, in the order of `_read`."""
        return [
            f"{path}.{name}".lstrip(".")
            for path, module in self._tree.root.named_modules()
            for name, item in own_parameters(module).items()
            if item is not None
        ]


def _reference(item: Tensor, part: Tensor) -> weakref.ref[Tensor] | None:
    return None if part is item else weakref.ref(part)


def _versions(item: Tensor, part: Tensor) -> int:
    """The versions of both; tensors of torch.inference_mode have none."""
    return 0 if part.is_inference() else version_of(item) + version_of(part)


def _options(groups: list[dict[str, Any]]) -> tuple[str, str]:
    """The learning rates of an optimizer's groups, and their other options, each once."""
    rates = dict.fromkeys(_shown(group.get("lr")) for group in groups)
    others = dict.fromkeys(_others(group) for group in groups)
    return ", ".join(rates), repr(list(others))


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return repr(value.item()) if value.is_cpu else "on a GPU"  # which would be waited for
    return repr(value)


def _others(group: Mapping[str, Any]) -> Hashable:
    return tuple(
        (name, repr(value))
        for name, value in group.items()
        if name not in _CHOSEN and isinstance(value, _PLAIN)
    )
