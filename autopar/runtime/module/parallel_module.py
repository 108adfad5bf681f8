"""The parallel module: the serial model's names and calls, this rank's part of its work.

What it does with them is its runner's (runner.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import cache
from operator import attrgetter
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from autopar.core.part import Part
from autopar.errors import InputError
from autopar.results.plan.plan import Plan
from autopar.runtime.executable import Executable, StagedExecutable
from autopar.runtime.module.already_parallel import refuse_wrappers
from autopar.runtime.module.runner import TIMEOUT, Runner, SamplerOptions
from autopar.runtime.module.sampler import BatchSampler
from autopar.runtime.module.transforms import entered
from autopar.runtime.programs.call_programs import Compile
from autopar.runtime.tree import serial_model
from autopar.runtime.tree.user_tree import placed_parameters

runner_of: Callable[[ParallelModule], Runner] = attrgetter("_autopar")
"""What runs a parallel module: its attribute has a name that no user's model has."""


class ParallelModule(nn.Module):
    """The user's module itself, of a class that runs its forward in parallel.

    Classes, attributes, methods, hooks of the root and `isinstance` are the user's. Parameters are DTensors,
    or plain where every rank has all of them whole; `state_dict` and `load_state_dict` speak serial names and
    full tensors. What a trace has read may change: attributes of any module, modes, modules without
    parameters, numbers of the loss. Modules below the root can't be called by themselves. Names of the user's
    that this class has, too, are the user's in forward.

    Every rank passes the global batch, or with `local_inputs` its own `samples` of it. The gradient
    of an input is then that of the rows that the rank passed.

    With `broadcast_parameters` all ranks start from rank 0's values. Values of a model on the meta
    device are NaN until `load_state_dict`. Raises InputError for a model whose hooks or wrappers a
    traced program would drop. `describe` is what printing the module shows of a program; `quiet` says
    nothing on stderr.
    """

    _autopar: Runner

    def __new__(cls, model: Any, *args: Any, **kwargs: Any) -> Any:
        """`model`, of another class."""
        if cls is not ParallelModule:  # a slice of an nn.Sequential makes one of its own class
            return _serial_class(cls)(model, *args, **kwargs)
        if isinstance(model, ParallelModule) and not runner_of(model).tensors.is_placed:  # another try
            model.__class__ = _serial_class(type(model))
            vars(model).update(runner_of(model).tree.own)
        serial_model.check(model, placed_parameters())
        refuse_wrappers(lambda module: isinstance(module, ParallelModule))
        kind: Any = type(model)
        model.__class__ = _parallel_class(kind)
        return model

    def __init__(
        self,
        model: nn.Module,
        compile: Compile,
        *,
        describe: Callable[[Executable | StagedExecutable], str],
        device: torch.device,
        timeout: timedelta = TIMEOUT,
        broadcast_parameters: bool = True,
        bucket_bytes: int | None = None,
        by_steps: bool = False,
        exact_random: bool = False,
        local_inputs: bool = False,
        local_outputs: bool = False,
        quiet: bool = False,
    ) -> None:
        self.__dict__["_autopar"] = Runner(
            self,
            _serial_class(type(self)),
            compile,
            describe=describe,
            device=device,
            timeout=timeout,
            broadcast_parameters=broadcast_parameters,
            bucket_bytes=bucket_bytes,
            by_steps=by_steps,
            exact_random=exact_random,
            local_inputs=local_inputs,
            local_outputs=local_outputs,
            quiet=quiet,
        )

    # -- calls ----------------------------------------------------------------------------------

    @entered
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The serial model's output; every rank passes the global batch, or its samples of it.

        With pipeline stages it is without gradients, and backward from it raises: `train_step` trains.
        """
        return self._autopar.forward(*args, **kwargs)

    @entered
    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward of one global batch, micro-batch by micro-batch; returns its loss.

        Gradients are added to the parameters' `.grad`, and the optimizer's step stays the user's. The
        loss is that of the batch, on every rank: micro-batches count in it by their share of what it is a
        mean of (samples, labels that are kept, a mask), and as they are in a sum. Every rank passes the
        global batch.
        """
        return self._autopar.train_step(*args, **kwargs)

    def scaled_by(self, scaler: torch.amp.GradScaler) -> AbstractContextManager[None]:
        """Within, backward of each `train_step` starts from the loss times the scaler's factor.

            with parallel.scaled_by(scaler):
                loss = parallel.train_step(*batch)
            scaler.step(optimizer)
            scaler.update()

        The loss that it returns is the loss itself.
        """
        return self._autopar.scaled_by(scaler)

    @entered
    def eval_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of one global batch on every rank, as `train_step` returns it, without gradients."""
        return self._autopar.eval_step(*args, **kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Plan and compile for a call with such a global batch, without running it; the first time,
        place the parameters. With local inputs, calls are known by the batches that were prepared."""
        self._autopar.prepare(*args, **kwargs)

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile the programs of this rank from now on, each at its next call, as `torch.compile(parallel)`
        does. Takes no options of torch.compile: a program is compiled whole, for its shapes alone."""
        if args or options:
            raise InputError(
                where="compile of the parallel module",
                found=f"options of torch.compile: {', '.join((*map(repr, args), *options))}",
                wanted="none: programs are compiled whole, by Inductor, for their own shapes",
                remedy="call parallel.compile()",
            )
        self._autopar.compile()

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Scale all gradients in place so that their norm, over all ranks and stages, is at most
        `max_norm`; returns the norm before. As torch.nn.utils.clip_grad_norm_; a collective."""
        return self._autopar.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)

    # -- plan and samples -----------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the program that ran last; the first call's before that."""
        return self._autopar.plan

    @property
    def output_parts(self) -> tuple[Part, ...]:
        """Parts of the global outputs that this rank returns, by the program that ran last; the tensors of
        the output in their order."""
        return self._autopar.output_parts

    @property
    def samples(self) -> range:
        """The rows of the global batch that this rank passes; of the batch that was planned first."""
        return self._autopar.samples

    def region(self, name: str) -> tuple[slice, ...]:
        """The box of the global input `name` that this rank's program reads, a slice for each dim.

        Positional inputs are `input_0`, `input_1` and so on, with those of the loss at their end.

        With `inputs="local"` nothing else of it is: pass a tensor of a file that is mapped into memory, or an
        empty one with this region filled in. Halos come from neighbours. Empty for an input that only other
        stages read.
        """
        return self._autopar.region(name)

    def sampler(self, dataset: Sized, **options: Unpack[SamplerOptions]) -> BatchSampler:
        """For `DataLoader(dataset, batch_sampler=...)`: this rank's rows of each global batch.

        All ranks draw one order from `seed` and the epoch (`set_epoch`). `batch_size` is the global
        batch's, one that is prepared; that of the first plan by default. See `BatchSampler`.
        """
        return self._autopar.sampler(dataset, **options)

    # -- what nn.Module does with tensors -------------------------------------------------------

    def _named_members(self, *args: Any, **kwargs: Any) -> Iterator[Any]:  # parameters() and buffers() too
        self._autopar.tensors.require_placed()
        yield from super()._named_members(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The parameters of this rank.

        On a pipeline rank where none requires gradients one more comes, without a name and without elements:
        no optimizer takes an empty list.
        """
        requires_grad = False
        for item in super().parameters(recurse):
            requires_grad = requires_grad or item.requires_grad
            yield item
        for item in () if requires_grad else self._autopar.tensors.nothing:
            item.requires_grad_()  # again, where all were frozen before
            yield item

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return nn.Module's state dict, with serial names and full tensors on all ranks; a collective."""
        with self._autopar.saving("state_dict"):
            state = super().state_dict(*args, **kwargs)
        return self._autopar.tree.in_order(state, kwargs.get("prefix", ""))

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load nn.Module's state dict of full tensors, of which every rank copies its part in place."""
        self._autopar.tensors.require_placed()
        result = super().load_state_dict(state_dict, *args, **kwargs)
        self._autopar.tensors.accept_changes()
        return result

    def gather(self, name: str, tensor: Tensor | None) -> Tensor:
        """The full tensor, in serial order, of what lies as parameter or buffer `name` does: itself,
        its gradient, an optimizer's state; a collective. Ranks of other stages pass None."""
        return self._autopar.tensors.gather(name, tensor)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._autopar.tensors.require_placed()
        self._autopar.untie()
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A parallel module of its own, with the same values."""
        return self._autopar.copied(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InputError(
            where="pickling or copying a parallel module",
            found="this rank's parts and program, which mean nothing elsewhere",
            wanted="its state_dict(), which holds full tensors",
            remedy="save that on one rank, or the model inside `with autopar.full(parallel) as model:`; "
            "a copy is made by copy.deepcopy",
        )

    def __repr__(self) -> str:
        """The plan, and this rank's program."""
        return self._autopar.describe()


@cache
def _parallel_class(kind: type) -> type:
    """A class of the same names below ParallelModule and `kind`: libraries write them into files."""
    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    names["_serial_class"] = kind
    names["forward"] = _forward_like(kind)
    made: type = type(kind)(kind.__name__, (ParallelModule, kind), names)
    return made


def _forward_like(kind: Any) -> Callable[..., Any]:
    """Our forward with the signature of the user's, by which frameworks choose the columns of a batch."""

    @entered
    def forward(self: ParallelModule, *args: Any, **kwargs: Any) -> Any:
        return self._autopar.forward(*args, **kwargs)

    forward.__doc__ = kind.forward.__doc__
    forward.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    return forward


def _serial_class(kind: type) -> type:
    """The user's class of which this is the parallel one."""
    return cast(type, vars(kind)["_serial_class"])
