"""What of a call is a tensor, what is a constant, and what can be neither."""

from __future__ import annotations

from collections import UserDict
from copy import copy
from dataclasses import InitVar, dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, Normal

from autopar.errors import InputError, TraceError
from autopar.trace.call.call_signature import (
    flatten_arguments,
    flatten_results,
    leaves_out_loss,
    split_for_loss,
    split_inputs,
)
from autopar.trace.export import trace


@dataclass
class Batch:
    x: Tensor


@dataclass(slots=True)
class Slotted:
    x: Tensor


@dataclass
class Told:
    x: Tensor


class Mode(Enum):
    FAST = 1


X = torch.arange(3.0)


@pytest.mark.parametrize(
    "held",
    [Batch(X), Slotted(X), SimpleNamespace(inner=Batch(X)), SimpleNamespace(each=[X]), np.arange(3)],
    ids=["dataclass", "slots", "nested", "list", "array"],
)
def test_tensors_in_an_object_would_be_those_of_the_first_call_and_are_refused(held: Any) -> None:
    with pytest.raises(InputError, match="argument batch: .* that holds tensors or arrays"):
        flatten_arguments((X,), {"batch": held})


def test_a_dataclass_that_torch_knows_of_is_taken_apart() -> None:
    torch.export.register_dataclass(Told)
    call = flatten_arguments((Told(X),), {})
    assert len(call.tensors) == 1 and call.tensors[0] is X
    (again,), _ = call.rebuild((X + 1,))
    assert torch.equal(again.x, X + 1)


def test_objects_without_tensors_are_constants_of_the_call() -> None:
    call = flatten_arguments((X, Mode.FAST, SimpleNamespace(rate=0.1)), {"act": torch.relu})
    assert call.tensors == (X,)
    assert call.key != flatten_arguments((X, Mode.FAST, SimpleNamespace(rate=0.2)), {"act": torch.relu}).key


def test_an_object_is_what_it_holds_and_not_what_the_modules_that_it_names_hold() -> None:
    cyclic: dict[str, Any] = {"lib": np}
    cyclic["again"] = cyclic
    first, second = SimpleNamespace(lib=torch, rate=0.1, near=cyclic), SimpleNamespace(lib=torch, rate=0.1)
    assert flatten_arguments((X, first), {}).constants[1] is first
    assert flatten_arguments((X, second), {}).key == flatten_arguments((X, copy(second)), {}).key


def test_any_mapping_names_the_arguments() -> None:
    assert split_inputs(UserDict(x=X)) == ((), {"x": X})


SPARSE = {
    "hybrid sparse_coo": torch.eye(2).to_sparse(1),
    "sparse_coo 3-dim": torch.ones(2, 2, 2).to_sparse(),
    "sparse_csr 3-dim": torch.ones(2, 2, 2).to_sparse_csr(),
    "sparse_bsr": torch.ones(2, 2).to_sparse_bsr((1, 1)),
    "sparse_coo that learns": torch.eye(2).to_sparse().requires_grad_(),
    "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "nested jagged": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_and_nested_arguments_are_refused_by_name_all_at_once(name: str) -> None:
    layout = "nested" if "nested" in name else name
    found = f"found a {layout}.* tensor, a {layout}.* tensor, .*to_dense"
    wanted = f"argument input_1_edges, argument mask: {found}"
    with pytest.raises(InputError, match=wanted):
        flatten_arguments((X, {"edges": SPARSE[name]}), {"mask": SPARSE[name]})


def test_edges_in_a_type_of_pytorch_geometric_are_refused_by_name() -> None:
    geometric = pytest.importorskip("torch_geometric")
    edges = geometric.EdgeIndex([[0, 1], [1, 0]], sparse_size=(2, 2))
    with pytest.raises(InputError, match=r"argument input_1: found a EdgeIndex \(by as_tensor\(\)"):
        flatten_arguments((X, edges), {})


# Outputs


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    y: tuple[Tensor, None]


@dataclass
class Doubled:
    """What it holds isn't what it was made of."""

    x: Tensor
    factor: InitVar[int]
    norm: Tensor = field(init=False)
    unset: Tensor = field(init=False)

    def __post_init__(self, factor: int) -> None:
        self.x = self.x * factor
        self.norm = self.x.sum()
        self.beside = self.x[0]


def test_dataclasses_in_an_output_are_taken_apart_and_made_again_at_any_depth() -> None:
    output = {"a": Frozen(X, (X + 1, None)), "b": [Batch(Frozen(X + 2, (X + 3, None)))], "c": (Batch, "c")}
    tensors, results = flatten_results(output)
    assert [tensor[0] for tensor in tensors] == [0, 1, 2, 3]
    again = results.rebuild(tuple(10 * tensor for tensor in tensors))
    first, second, (kind, name) = again["a"], again["b"][0].x, again["c"]
    assert type(first) is type(second) is Frozen and type(again["b"][0]) is Batch
    found = [first.x, first.y[0], second.x, second.y[0]]
    assert all(map(torch.equal, found, [10 * X, 10 * (X + 1), 10 * (X + 2), 10 * (X + 3)]))
    assert first.y[1] is second.y[1] is kind is None and name == "c"
    assert results.dropped == ("['c'][0] (type)",)


def test_a_dataclass_is_made_as_it_was_not_as_its_init_would_make_it() -> None:
    tensors, results = flatten_results([Doubled(X + 1, 2)])
    [again] = results.rebuild(tensors)
    assert type(again) is Doubled and not hasattr(again, "unset")
    assert torch.equal(again.x, 2 * X + 2) and again.norm == 12 and again.beside == 2


def test_outputs_of_transformers_are_made_again_at_any_depth() -> None:
    outputs = pytest.importorskip("transformers.modeling_outputs")
    made = outputs.BaseModelOutput(last_hidden_state=X, hidden_states=(X + 1, X + 2))
    tensors, results = flatten_results((X, {"inner": made}))
    again = results.rebuild(tensors)[1]["inner"]
    assert type(again) is type(made) and list(again) == ["last_hidden_state", "hidden_states"]
    assert again["last_hidden_state"] is X and torch.equal(again[1][1], X + 2) and again.attentions is None


class Two(torch.nn.Module):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return x


def plain(output: Tensor) -> Tensor:
    return output


def one(output: Tensor, target: Tensor, weight: float = 1.0) -> Tensor:
    return output


def two(output: Tensor, target: Tensor, other: Tensor, *, scale: float = 1.0) -> Tensor:
    return output


@pytest.mark.parametrize(
    ("loss_fn", "args", "kwargs", "model", "loss"),
    [
        (None, (1, 2), {}, ((1, 2), {}), ((), {})),
        (plain, (1, 2), {}, ((1, 2), {}), ((), {})),
        (one, (1, 2), {}, ((1,), {}), ((2,), {})),
        (one, (1, 2, 3), {}, ((1, 2), {}), ((3,), {})),
        (two, (1, 2, 3), {}, ((1,), {}), ((2, 3), {})),
        (two, (1, 2), {"mask": 5, "other": 3}, ((1,), {"mask": 5}), ((2,), {"other": 3})),
        (two, (1,), {"target": 2, "other": 3}, ((1,), {}), ((), {"target": 2, "other": 3})),
        (one, (1, 2), {"weight": 3}, ((1,), {}), ((2,), {"weight": 3})),  # which it doesn't require
        (two, (1, 2, 3), {"scale": 4}, ((1,), {}), ((2, 3), {"scale": 4})),
        (torch.nn.MSELoss(), (1, 2), {}, ((1,), {}), ((2,), {})),
    ],
)
def test_a_loss_takes_the_last_inputs_that_it_requires_and_names_that_the_model_does_not_know(
    loss_fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], model: Any, loss: Any
) -> None:
    found = split_for_loss(Two(), loss_fn, args, kwargs)
    assert (found[:2], found[2:]) == (model, loss)


def test_a_loss_that_requires_more_than_there_is_is_refused() -> None:
    with pytest.raises(InputError, match="loss_fn two: found 1 positional inputs, wanted at least 2"):
        split_for_loss(Two(), two, (1,), {})


@pytest.mark.parametrize(
    ("loss_fn", "args", "kwargs", "left_out"),
    [
        (one, (1,), {}, True),
        (one, (), {"x": 1}, True),
        (one, (1,), {"mask": 2}, True),
        (two, (1, 2), {}, True),  # too few for the loss, and all that the model wants
        (one, (1, 2), {}, False),  # the mask may be left out, targets may not
        (one, (1,), {"target": 2}, False),
        (two, (1,), {"target": 2}, False),  # one of the loss's is there, the other was forgotten
        (plain, (1,), {}, False),
        (None, (1,), {}, False),
        (one, (), {}, False),
    ],
)
def test_a_call_leaves_out_the_loss_if_the_model_needs_all_its_inputs(
    loss_fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], left_out: bool
) -> None:
    assert leaves_out_loss(Two(), loss_fn, args, kwargs) == left_out


@pytest.mark.parametrize("event", [False, True])
def test_a_distribution_may_go_to_the_loss_but_not_out(event: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Distribution]:
            normal = Normal(self.linear(x), 1.0)
            return x, Independent(normal, 1) if event else normal

    x = torch.randn(4, 3)
    graph = trace(Net(), (x, x), loss_fn=lambda output, y: -output[1].log_prob(y).mean()).graph
    assert len(graph.outputs) == 1
    with pytest.raises(
        TraceError, match=r"output\[1\] \((Normal|Independent)\): .*make it of them after the call"
    ):
        trace(Net(), (x,))
