"""Writes to a result that is its argument, or looks into it, reach the argument as in eager code."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from autopar.core.graph import Graph
from autopar.core.mesh import Mesh
from autopar.errors import TraceError
from autopar.sharding.strategies import dims_of
from autopar.trace.export import trace
from tests.forced_programs import Forced, check_against_serial, force_kinds

ITSELF: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout of probability 0": lambda h: F.dropout(h, 0.0),
    "dropout outside of training": lambda h: F.dropout(h, 0.5, training=False),
    "torch.dropout": lambda h: torch.dropout(h, 0.0, True),
    "a module": nn.Dropout(0.0),
    "alpha dropout": lambda h: F.alpha_dropout(h, 0.5, training=False),
    "dropout of features": lambda h: F.feature_alpha_dropout(h, 0.0),
    "einsum of nothing": lambda h: torch.einsum("ij->ij", h),
    "sum to its own size": lambda h: h.sum_to_size(h.shape),
    "to dense": lambda h: h.to_dense(),
    "positive": lambda h: +h,
    "the real part": lambda h: h.real,
    "expand": lambda h: h.expand(h.shape),
    "view": lambda h: h.view(h.shape),
    "type": lambda h: h.type(h.dtype),
    "two of them": lambda h: torch.einsum("...->...", F.dropout(h, 0.0).view_as(h)),
    "a product of one": lambda h: torch.cartesian_prod(h[0]),
    "broadcast tensors": lambda h: torch.broadcast_tensors(h.new_ones(6, 6), h)[1],
    "a mesh of one": lambda h: torch.meshgrid(h[0], indexing="ij")[0],
    "a slice of one": lambda h: torch.einsum("ij->ij", h)[1:3],
    "one of a slice": lambda h: torch.einsum("ij->ij", h[1:3]),
}
COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": torch.clone,
    "cat of one": lambda h: torch.cat([h]),
    "roll by nothing": lambda h: h.roll(0),
    "a dropout that drops all": lambda h: F.dropout(h, 1.0),
    "a reshape of a transposed one": lambda h: h.view(6, 2, 3).transpose(1, 2).reshape(6, 6),
    "a part that is made flat": lambda h: h[:, :4].flatten(),
    "contiguous": lambda h: h.t().contiguous(),
    "a product with one": lambda h: torch.einsum("ij,->ij", h, torch.ones(())),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "narrow": lambda h: h.narrow(1, 1, 3),
    "narrow from the end": lambda h: h.narrow(1, -2, 2),
    "narrow to nothing": lambda h: h.narrow(1, 0, 0),
    "another shape": lambda h: h.view(-1, 2, 3),
    "a part of another shape": lambda h: h.narrow(1, 1, 4).unflatten(1, (2, 2))[:, 1],
    "flat": lambda h: h.view(-1, 2, 3).flatten(1, 2),
    "one dim more": lambda h: h.unsqueeze(1)[:, :, 2:],
    "one dim less": lambda h: h[:, None].squeeze(1)[:, :2],
    "transposed": lambda h: h.t()[1:3],
    "permuted": lambda h: h.view(6, 2, 3).permute(2, 0, 1)[1],
    "moved": lambda h: h.view(6, 2, 3).movedim(0, 2).mT[0],
}
OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "einsum that transposes": lambda h: torch.einsum("ij->ji", h),
    "einsum of a diagonal": lambda h: torch.einsum("ii->i", h),
    "unsafe chunks": lambda h: h.unsafe_chunk(2)[0],
}


class Written(nn.Module):
    """Writes to what `function` gives, and uses its argument."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function = nn.Linear(6, 6), function

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        y = self.function(h)
        y.add_(1).mul_(2)
        return h.tanh() * y.sum()


TWO = Mesh((2,))


def batch() -> Tensor:
    return torch.randn(6, 6, dtype=torch.float64)


def in_batches(graph: Graph, mesh: Mesh) -> Forced:
    dims = dims_of(graph, mesh)
    return dims, force_kinds(graph, dims, ["batch"])


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ITSELF, *COPIES])
def test_a_write_to_a_result_that_is_the_argument_is_a_write_to_that_alone(name: str) -> None:
    model = Written((ITSELF | COPIES)[name])
    check_against_serial(model.double(), TWO, batch(), by=in_batches)


@pytest.mark.parametrize("name", VIEWS)
def test_a_write_through_a_view_reaches_what_it_is_a_view_of(name: str) -> None:
    check_against_serial(Written(VIEWS[name]).double(), TWO, batch(), by=in_batches)


@pytest.mark.parametrize("name", OTHERS)
def test_a_write_to_another_view_that_no_schema_tells_of_is_refused_where_its_argument_is_used(
    name: str,
) -> None:
    with pytest.raises(TraceError, match=r"test_written_aliases\.py:\d+: .*in-place write"):
        trace(Written(OTHERS[name]), (torch.randn(6, 6),))


SHAPED: dict[str, Callable[[Tensor], Any]] = {
    "a dim more": lambda h: h.unsqueeze_(1),
    "a dim less": lambda h: h.unsqueeze_(0).squeeze_(),
    "one dim less": lambda h: h.unsqueeze_(0).squeeze_(0),
    "transposed": lambda h: h.t_(),
    "two dims changed": lambda h: h.unsqueeze_(1).transpose_(0, 2),
}


class Shaped(nn.Module):
    """Changes the shape of what it made, of a buffer or of its input, and goes on with that."""

    def __init__(self, function: Callable[[Tensor], Any], of: str = "its own") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.function, self.of = nn.Linear(6, 6), function, of
        self.register_buffer("table", torch.ones(6, 6))

    def forward(self, x: Tensor) -> Any:
        h = self.linear(x)
        y = {"its own": h * 2, "a buffer": self.table, "its input": x}[self.of]
        self.function(y)
        return y.add_(1).square().sum() + (h * y.reshape(h.shape).tanh()).sum()


@pytest.mark.parametrize("name", SHAPED)
def test_what_changes_its_shape_in_place_is_a_view_from_there_on(name: str) -> None:
    check_against_serial(Shaped(SHAPED[name]).double(), TWO, batch(), by=in_batches)


@pytest.mark.parametrize("of", ["a buffer", "its input"])
def test_the_shapes_of_inputs_and_buffers_stay(of: str) -> None:
    with pytest.raises(TraceError, match=r"input .*(input_0|table)") as told:
        trace(Shaped(SHAPED["a dim more"], of), (torch.randn(6, 6),))
    assert "unsqueeze(0)" in str(told.value)


def _sharing(results: Any, given: list[Tensor]) -> list[list[bool]]:
    """Which results share memory with which of the arguments."""
    return [
        [item.untyped_storage()._cdata == other.untyped_storage()._cdata for other in given]
        for item in pytree.tree_leaves(results)
        if isinstance(item, Tensor) and item.layout is torch.strided and item.numel()
    ]


def _told(op: Any, sample: Any) -> tuple[Any, Any] | None:
    """What eager code shares and what a trace says of it; None for calls that can't be traced."""
    leaves, structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    told: list[Any] = []

    def call(*tensors: Tensor) -> Any:
        filled = [*leaves]
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        first, args, kwargs = pytree.tree_unflatten(filled, structure)
        told.append(_sharing(results := op.op(first, *args, **kwargs), [*tensors]))
        return results

    given = [leaves[place] for place in places]
    try:
        call(*given)
        make_fx(call, tracing_mode="fake", pre_dispatch=True)(*given)
    except Exception:  # sparse tensors, sizes by values: refused elsewhere
        return None
    return told[0], told[1]


@pytest.mark.long
def test_a_trace_knows_of_all_functions_of_torch_what_shares_memory() -> None:
    warnings.simplefilter("ignore")
    wrong, count = set(), 0
    for op in op_db:
        if torch.float32 in op.dtypes and op.name != "nn.functional.dropout":  # which ITSELF has
            for sample in [*op.sample_inputs("cpu", torch.float32)][:8]:
                told = _told(op, sample)
                count += told is not None
                wrong |= {op.name} if told is not None and told[0] != told[1] else set()
    assert count > 2000 and not wrong
