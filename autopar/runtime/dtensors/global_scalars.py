"""Numbers that are read from DTensors of our meshes are the serial model's, on every rank.

    gradient (Shard) --norm--> a share on each rank (Partial) --.item()--> torch: this rank's own share
                                                                           here: the whole norm

torch reads the local part of such a scalar, so that ranks clip by different factors, or one of them steps and
another skips. Its dispatcher keeps a table of handlers by operator, the door used here: for meshes that are
registered, the scalar is made whole first. That is a collective: all ranks read a number, or none.

A stage of a pipeline holds parameters of its own, and a number of theirs is not the model's. So it is refused
there, as torch's clipping is, and so are scalars of several parameters put together, and vectors of them:
torch.nn.utils.parameters_to_vector would give one stage's, and vector_to_parameters begin anew at each.

A block of rows (every head of q, k and v) doesn't lie in the order that the DTensor says. Sums, norms,
extremes and comparisons of equally laid tensors don't care.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from autopar.errors import InputError, cut_text
from autopar.runtime.collectives.roll_call import collective
from autopar.torch_seams.dtensors import (
    DTensorSpec,
    NormPartial,
    OpSpec,
    OpStrategy,
    TupleStrategy,
    forget_shardings,
    handlers,
    laying,
    part_of,
    propagating,
    spec_of,
)
from autopar.torch_seams.optimizers import parameters_of_vectors
from autopar.torch_seams.pytree import tree_leaves
from autopar.torch_seams.replaced import wrapped
from autopar.torch_seams.torch_version import RANGE
from autopar.trace.call.user_source import calling_line, first_line

aten = torch.ops.aten

_meshes: list[weakref.ref[DeviceMesh]] = []
_staged: list[weakref.ref[DeviceMesh]] = []
_with_numbers: list[weakref.ref[DeviceMesh]] = []  # those of stages whose parameters may be single numbers
_READING = (  # the last two in inference mode, in which torch takes no operator apart
    aten._local_scalar_dense.default,
    aten.item.default,
    aten.is_nonzero.default,
)
_JOINING = (aten.stack.default, aten.cat.default)
_ADDING = (aten.add.Tensor, aten.add_.Tensor, aten.maximum.default, aten.logical_and.default)
_OF_SOMETHING = (  # reductions that may be undefined for no elements
    aten.max.default,
    aten.min.default,
    aten.amax.default,
    aten.amin.default,
    aten.linalg_vector_norm.default,
    aten._foreach_norm.Scalar,
)
_LINEAR = (  # in which torch 2.13 takes shares of norms for shares of sums
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.mean.default,
    aten.mean.dim,
    aten.nansum.default,
    aten.cumsum.default,
    aten.dot.default,
    aten.mv.default,
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
)
_WHOLE = frozenset((*_OF_SOMETHING, *_LINEAR))
_OF_VECTORS = "_check_param_device"  # which torch calls for each parameter of a vector


def read_whole_scalars(mesh: DeviceMesh, *, staged: bool, with_numbers: bool = False) -> None:
    """Make numbers of DTensors on `mesh` be read whole from now on, or refused with `staged`; a collective.

    `with_numbers` says that parameters without dims are among them, which optimizers add up as well as a norm
    by hand does. Raises InputError where this version of torch reads them past the handlers.
    """
    _know(mesh, _staged if staged else _meshes)
    if with_numbers:
        _know(mesh, _with_numbers)
    _install()
    forget_shardings()  # of an equal mesh of a world that has ended, or of a user's own
    if not staged and mesh.size() > 1:
        _try_out(mesh)


def _know(mesh: DeviceMesh, known: list[weakref.ref[DeviceMesh]]) -> None:
    known[:] = [reference for reference in known if reference() is not None] + [weakref.ref(mesh)]


def plain_gradient(gradient: Tensor) -> Tensor | None:
    """A hook for what a program returns: its gradient is plain, also where a DTensor was added to it."""
    return gradient.full_tensor() if isinstance(gradient, DTensor) else None


def _install() -> None:
    for operator in _READING:
        handlers.setdefault(operator, _local_scalar)
    handlers.setdefault(aten.allclose.default, _allclose)
    if aten.as_strided.default in handlers:
        handlers[aten.as_strided.default] = wrapped(handlers[aten.as_strided.default], _refusing)
    laying.wrap(_on_whole)
    propagating.wrap(_guard)
    parameters_of_vectors.wrap(_of_whole_models)


def _try_out(mesh: DeviceMesh) -> None:
    """Read a number of which every rank holds a share."""
    share = DTensor.from_local(torch.ones((), device=mesh.device_type), mesh, [Partial()] * mesh.ndim)
    if share.item() != mesh.size():
        raise _unknown_version(f"{share.item()} as the sum of {mesh.size()} ones")


def _unknown_version(found: str) -> InputError:
    return InputError(
        where=f"DTensor of torch {torch.__version__}",
        found=found,
        wanted="numbers of sharded tensors that are the same on all ranks",
        remedy=f"run pip install '{RANGE}'",
    )


# -- reading --------------------------------------------------------------------------------------


def _local_scalar(operator: Any, args: tuple[Any, ...], _kwargs: Mapping[str, Any]) -> Any:
    (tensor,) = args
    if _is_among(tensor.device_mesh, _staged):
        raise _of_one_stage("a number of a parameter or gradient")
    parts = not all(isinstance(placement, Replicate) for placement in tensor.placements)
    if parts and _is_among(tensor.device_mesh, _meshes):
        with torch.no_grad(), collective("reading a number of a sharded tensor"):
            tensor = _whole(tensor.detach())
    return operator(part_of(tensor))


def _allclose(_operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Compute allclose as torch composes it of plain tensors; of DTensors it knows no way."""
    return bool(torch.isclose(*args, **kwargs).all().item())


def _whole(tensor: DTensor) -> DTensor:
    """Gather one axis after the other: torch warns of several at once."""
    placements = list(tensor.placements)
    for axis in reversed(range(len(placements))):
        placements[axis] = Replicate()
        tensor = tensor.redistribute(placements=placements)
    return tensor


def _is_among(mesh: DeviceMesh, meshes: Iterable[weakref.ref[DeviceMesh]]) -> bool:
    """Whether a mesh equals one of `meshes`: what operators return is laid on the mesh of the first like
    it."""
    return any(known() == mesh for known in meshes)


def _of_one_stage(found: str) -> InputError:
    return InputError(
        where=calling_line(),
        found=f"{found} of one pipeline stage, which other stages don't have",
        wanted="one number over all stages",
        remedy="call clip_grad_norm_ of the parallel module, which returns the norm, or take full tensors: "
        "parallel.gather(name, tensor) on every rank, with None where a stage has no such tensor",
    )


# -- operators ------------------------------------------------------------------------------------


def _guard(propagate: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses what makes one number of several parameters of a stage."""

    def guarded(operator: Any, args: Any, *rest: Any, **named: Any) -> Any:
        specs = [spec_of(item) for item in tree_leaves(args) if isinstance(item, DTensor)]
        if any(_is_among(spec.mesh, _staged) for spec in specs):
            _refuse_together(operator, specs)
        try:
            return propagate(operator, args, *rest, **named)
        except (RuntimeError, NotImplementedError, AssertionError) as error:
            if any(_is_among(spec.mesh, _meshes + _staged) for spec in specs):
                raise _cannot_split(operator, error) from error
            raise

    return guarded


def _refusing(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses by name what torch's own handler doesn't know how to do."""

    def guarded(operator: Any, args: Any, kwargs: Any) -> Any:
        try:
            return handler(operator, args, kwargs)
        except RuntimeError as error:
            if _is_among(args[0].device_mesh, _meshes + _staged):
                raise _cannot_split(operator, error) from error
            raise

    return guarded


def _cannot_split(operator: Any, error: Exception) -> InputError:
    return InputError(
        where=calling_line(),
        found=f"{operator} of a sharded parameter or gradient: {cut_text(first_line(error), 40)}",
        wanted="an operator of elements, a sum or a norm",
        remedy="compute it in forward or loss_fn, in `with autopar.full(parallel) as model:`, or of "
        "parallel.gather(name, tensor)",
    )


def _refuse_together(operator: Any, specs: list[Any]) -> None:
    if operator is aten.equal.default:
        raise _of_one_stage("a comparison of parameters")
    numbers = [spec for spec in specs if not spec.shape]
    refused = _JOINING if any(_is_among(spec.mesh, _with_numbers) for spec in numbers) else _JOINING + _ADDING
    if operator in refused and len(numbers) > 1:
        raise _of_one_stage("a norm or sum of several parameters")
    if operator in _JOINING and any(len(spec.shape) == 1 for spec in specs):
        raise _of_one_stage("a vector of the parameters")


def _of_whole_models(check: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses parameters of a stage where torch makes a vector of a model's, or cuts one."""

    def guarded(parameter: Tensor, *args: Any) -> Any:
        if isinstance(parameter, DTensor) and _is_among(parameter.device_mesh, _staged):
            raise _of_one_stage("a vector of the parameters")
        return check(parameter, *args)

    return guarded


def _on_whole(operands: Callable[..., Any]) -> Callable[..., Any]:
    """Takes whole tensors on our meshes where a rank holds no element, or holds its share of a norm."""

    def guarded(schema: Any) -> Any:
        found = operands(schema)
        if schema.op not in _WHOLE:
            return found
        return replace(found, args_schema=tuple(map(_made_whole, found.args_schema)))

    return guarded


def _made_whole(argument: Any) -> Any:
    if isinstance(argument, TupleStrategy):
        return TupleStrategy(tuple(map(_made_whole, argument.children)))
    if not isinstance(argument, OpStrategy):
        return argument
    spec = argument.strategies[0].output_spec
    shares = any(isinstance(placement, NormPartial) for placement in spec.placements)
    if not (shares or _has_empty_part(spec)) or not _is_among(spec.mesh, _meshes + _staged):
        return argument
    return OpStrategy([OpSpec(DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, spec.tensor_meta))])


def _has_empty_part(spec: DTensorSpec) -> bool:
    """Whether some rank's part is empty: of chunks of chunks the last is the smallest."""
    least = list(spec.shape)
    for axis, placement in enumerate(spec.placements):
        if isinstance(placement, Shard):
            count = spec.mesh.size(axis)
            size = -(-least[placement.dim] // count)
            least[placement.dim] = max(0, least[placement.dim] - size * (count - 1))
    return 0 in least and 0 not in spec.shape
