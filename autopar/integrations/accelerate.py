"""accelerate: an Accelerator for parallel modules.

accelerator = Accelerator(gradient_accumulation_steps=2)
model, optimizer, loader, scheduler = accelerator.prepare(parallel, optimizer, loader, scheduler)

prepare     the module stays as it is; loaders give every rank the whole batch, in one order
gather      what a rank has is what all have; what is split between processes, all of it
clip, save  over all ranks, and stages; files by the main process
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator as _Accelerator
from accelerate.utils import operations, recursively_apply
from torch import Tensor, nn

from autopar.errors import InputError
from autopar.integrations.versions import check_version
from autopar.runtime.module.parallel_module import ParallelModule, runner_of
from autopar.trace.call.user_source import calling_line

check_version("accelerate")


class OneBatch:
    """Overrides an Accelerator's methods where processes are ranks of one parallel module and pass one batch.
    It comes before Accelerator among the bases."""

    knows_parallel = True
    device: torch.device
    state: Any
    gradient_state: Any
    dataloader_config: Any
    flag_tensor: Tensor | None
    _models: list[nn.Module]
    _dataloaders: list[Any]

    @property
    def num_processes(self) -> int:
        """Number of processes that pass different batches: one."""
        return 1

    @property
    def dispatch_batches(self) -> bool:
        """Every rank reads the data itself."""
        return False

    @property
    def even_batches(self) -> bool:
        """No batch is filled up with samples of others."""
        return False

    @even_batches.setter
    def even_batches(self, value: bool) -> None:
        self.dataloader_config.even_batches = value

    # -- preparing ----------------------------------------------------------------------------------

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """The parallel module itself; any other model is for evaluation alone."""
        if not isinstance(model, ParallelModule):
            if not evaluation_mode and any(item.requires_grad for item in model.parameters()):
                raise _serial(type(model).__name__)
            return super().prepare_model(  # type: ignore[misc,no-any-return]
                model, device_placement=device_placement, evaluation_mode=True
            )
        if self.state.dynamo_plugin.backend.value != "NO":
            raise _compiled()
        _last[:] = [weakref.ref(self)]
        _exchange_nothing()
        if not any(model is known for known in self._models):
            super().prepare_model(model, device_placement=False, evaluation_mode=True)  # type: ignore[misc]
        return model

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """A scheduler that makes one step for each of the optimizer's."""
        prepared = super().prepare_scheduler(scheduler)  # type: ignore[misc]
        prepared.split_batches = True
        return prepared

    # -- what processes exchange --------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """The tensors themselves, which all ranks have."""
        self._require_whole("gather")
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The data themselves, of the last batch those that its samples fill, as on one process."""
        self._require_whole("gather_for_metrics")
        count = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
        if count <= 0:
            return input_data
        if use_gather_object:
            return input_data[:count]
        return recursively_apply(lambda tensor: tensor[:count] if tensor.dim() else tensor, input_data)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The tensors themselves: there is nothing to add up."""
        self._require_whole("reduce")
        return tensor

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False
    ) -> Any:
        """The tensors themselves, which are equally long on all ranks."""
        self._require_whole("pad_across_processes")
        return tensor

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """All the inputs: ranks call one module together."""
        yield inputs

    def _require_whole(self, call: str) -> None:
        """Raise InputError where each rank loads its own samples, of which no other knows."""
        if any(
            isinstance(model, ParallelModule) and runner_of(model).has_local_inputs for model in self._models
        ):
            raise InputError(
                where=f"Accelerator.{call}, {calling_line()}",
                found="a parallel module with local inputs",
                wanted="what all ranks have: outputs and losses are whole, inputs and labels are not",
                remedy='use outputs as they are, and for metrics parallelize(..., inputs="global")',
            )

    def check_trigger(self) -> bool:
        """Whether some rank has set the trigger; a collective."""
        flag = torch.tensor(self.flag_tensor is not None, dtype=torch.int64, device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        if flag:
            self.flag_tensor = None
        return bool(flag)

    # -- gradients ----------------------------------------------------------------------------------

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip gradients as accelerate does; those of a parallel module by its own method, which knows all
        stages."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for model in self._models:
            if isinstance(model, ParallelModule) and _are_all_of(given, model):
                self.unscale_gradients()  # type: ignore[attr-defined]
                return model.clip_grad_norm_(max_norm, norm_type)
        return super().clip_grad_norm_(given, max_norm, norm_type)  # type: ignore[misc,no-any-return]


class Accelerator(OneBatch, _Accelerator):  # type: ignore[misc]
    """An Accelerator for a parallel module."""


_MARK = "_knows_parallel"
_last: list[weakref.ref[Any]] = []  # the accelerator that was given a parallel module last


def _exchange_nothing() -> None:
    """Let functions of accelerate.utils that exchange be methods of the accelerator of a parallel module.

    They are `gather`, `gather_object` and `reduce`, wherever they are imported, while there is one.
    """
    known = {name: getattr(operations, name) for name in ("_gpu_gather", "_gpu_gather_object")}
    if any(hasattr(function, _MARK) for function in known.values()):
        return
    for name, function in known.items():
        setattr(operations, name, _of_accelerator("gather", function))
    names = operations.reduce.__code__.co_freevars  # of the check around it
    cell = operations.reduce.__closure__[names.index("function")]
    cell.cell_contents = _of_accelerator("reduce", cell.cell_contents)


def _of_accelerator(method: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def exchange(data: Any, *args: Any, **kwargs: Any) -> Any:
        accelerator = _last[0]()
        function_of = function if accelerator is None else getattr(accelerator, method)
        return function_of(data, *args, **kwargs)

    setattr(exchange, _MARK, True)
    return exchange


def become_parallel(accelerator: Any) -> None:
    """Let one of accelerate's own be such an Accelerator from now on; raises InputError if it is too late."""
    if accelerator._dataloaders or accelerator._schedulers:  # noqa: SLF001  (accelerate's)
        raise InputError(
            where=f"Accelerator.prepare, {calling_line()}",
            found="a loader or scheduler that was prepared before the parallel module",
            wanted="the module first: accelerate has split batches among processes",
            remedy="prepare(parallel, optimizer, loader, scheduler) in one call, or use the Accelerator of "
            "autopar.integrations.accelerate",
        )
    accelerator.__class__ = _parallel_class(cast(type, type(accelerator)))


@cache
def _parallel_class(kind: type) -> type:
    """The class of accelerators of a parallel module below any other."""
    return Accelerator if kind is _Accelerator else type(kind.__name__, (OneBatch, kind), {})


def _are_all_of(given: list[Any], model: ParallelModule) -> bool:
    """Whether these are all parameters of a model that have gradients, and no others."""
    held = {id(item) for item in model.parameters()}
    learning = {id(item) for item in model.parameters() if item.grad is not None}
    return learning <= {id(item) for item in given} <= held


def _serial(name: str) -> InputError:
    return InputError(
        where="Accelerator.prepare",
        found=f"a serial {name} that learns, beside a parallel module",
        wanted="one parallel module, which holds all that learns",
        remedy="parallelize a module that has both, or prepare it by an Accelerator of accelerate's own",
    )


def _compiled() -> InputError:
    return InputError(
        where="Accelerator.prepare",
        found="a dynamo backend, which would compile the parallel module",
        wanted="a parallel module as it is",
        remedy='leave out dynamo_backend (ACCELERATE_DYNAMO_BACKEND="no")',
    )
