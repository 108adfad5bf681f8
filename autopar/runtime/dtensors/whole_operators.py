"""Operators of DTensors that are computed on whole tensors: draws, writes to rows, and means of losses.

    p.normal_(), torch.rand_like(p)     torch draws the same numbers for the different rows of all ranks
    p.index_add_(0, rows, values)       torch takes the numbers of rows for those of each rank's part
    F.mse_loss(p, start)                torch divides gradients and unequal parts by the sizes of parts

All ranks gather the operands, compute what a serial model does, and keep their parts. Draws are those of the
mesh's first rank, so that what lies whole stays equal where random states differ. Collective.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from autopar.runtime.collectives.roll_call import collective
from autopar.torch_seams.dtensors import handlers, part_of
from autopar.torch_seams.pytree import tree_leaves, tree_map, tree_map_only
from autopar.torch_seams.schemas import schema_of

aten = torch.ops.aten

_DRAWS = (
    *("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial"),
    *("native_dropout", "normal", "normal_", "poisson", "rand_like", "randint_like", "randn_like"),
    *("random_", "uniform_"),
)
_WRITES = (
    *("addbmm_", "addmm_", "addmv_", "baddbmm_", "cumprod_", "cumsum_", "index_add_", "index_copy_"),
    *("index_fill_", "index_put_", "index_reduce_", "masked_scatter_", "put_", "renorm_", "scatter_"),
    *("scatter_add_", "scatter_reduce_", "tril_", "triu_"),
)
_MEANS = tuple(  # of which torch takes each rank's own
    name + end
    for name in ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss")
    for end in ("", "_backward")
)
_OVERLOADS = (aten.fill_.Tensor, aten.masked_fill_.Tensor)  # of operators that are elementwise otherwise


class IsOurs(Protocol):
    """Whether a mesh is one of autopar's; raises an error for operators that can't be right on it."""

    def __call__(self, name: str, mesh: DeviceMesh, *, by_rows: bool, draws: bool) -> bool: ...


def compute_wholly(is_ours: IsOurs) -> None:
    """Compute draws and writes to rows of DTensors on our meshes on whole tensors from now on."""
    for operator in _operators():
        handlers.setdefault(operator, _handler(is_ours))


def _operators() -> Iterator[Any]:
    yield from _OVERLOADS
    for name in (*_DRAWS, *_WRITES, *_MEANS, "binary_cross_entropy_with_logits"):
        packet = getattr(aten, name)
        yield from (getattr(packet, overload) for overload in packet.overloads() if "out" not in overload)


def _handler(is_ours: IsOurs) -> Callable[..., Any]:
    def compute(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        first = next(item for item in tree_leaves((args, kwargs)) if isinstance(item, DTensor))
        name = schema_of(operator).name.partition("::")[2]
        draws = name in _DRAWS
        by_rows = name.endswith("_") and not draws
        ours = is_ours(name, first.device_mesh, by_rows=by_rows, draws=draws)
        if ours and first.device_mesh.size() > 1:
            return _compute(operator, name, args, kwargs)
        handlers.pop(operator)
        try:
            return operator(*args, **kwargs)
        finally:
            handlers[operator] = compute

    return compute


@torch.no_grad()
def _compute(operator: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    first = next(item for item in tree_leaves((args, kwargs)) if isinstance(item, DTensor))
    with collective(f"{name} of a parameter or gradient"):
        written = name.endswith("_")
        whole = tree_map_only(DTensor, lambda item: whole_values(item, copied=written), (args, kwargs))
        results = operator(*whole[0], **whole[1])
        if name in _DRAWS:
            for result in tree_leaves(results):
                dist.broadcast(result, group=first.device_mesh.get_group(0), group_src=0)
                for axis in range(1, first.device_mesh.ndim):
                    dist.broadcast(result, group=first.device_mesh.get_group(axis), group_src=0)
        if not written:
            return tree_map(lambda result: laid_as(first, result), results)
        part_of(args[0]).copy_(part_of(laid_as(args[0], results)))
        return args[0]


def whole_values(tensor: DTensor, *, copied: bool = False) -> Tensor:
    """The full tensor on every rank, gathered one axis after the other; collective."""
    placements = list(tensor.placements)
    for axis in reversed(range(len(placements))):
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    local = tensor.to_local()
    return local.clone() if copied else local


def laid_as(owner: DTensor, whole: Tensor) -> DTensor:
    """A full tensor as a DTensor that lies as `owner` does where it has that one's shape, else whole."""
    mesh = owner.device_mesh
    result = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    if whole.shape != owner.shape or any(isinstance(item, Partial) for item in owner.placements):
        return result
    return result.redistribute(placements=owner.placements)
