"""What of a call is a tensor, what is a constant, and what can be neither."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from autopar.errors import InputError
from autopar.signature import flatten_arguments, split_inputs


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


def test_any_mapping_names_the_arguments() -> None:
    assert split_inputs(UserDict(x=X)) == ((), {"x": X})


SPARSE = {
    "sparse_coo": torch.eye(2).to_sparse(),
    "sparse_csr": torch.eye(2).to_sparse_csr(),
    "nested": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]),
    "nested jagged": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_and_nested_arguments_are_refused_by_name_all_at_once(name: str) -> None:
    layout = name.split()[0]
    wanted = f"argument input_1_edges, argument mask: found a {layout} tensor, a {layout} tensor, .*to_dense"
    with pytest.raises(InputError, match=wanted):
        flatten_arguments((X, {"edges": SPARSE[name]}), {"mask": SPARSE[name]})
