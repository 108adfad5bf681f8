"""What a tensor doesn't say by its public methods: how often it was written, and whose memory it has."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from autopar.torch_seams.required import expect, required

with required():
    version_of: Callable[[Tensor], int] = attrgetter("_version")
    """How often a tensor or a view of it was written in place; raises RuntimeError for inference tensors."""

    storage_key: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
    """What tells a storage from all others that live: its Python objects are made anew at each call."""

    is_view: Callable[[Tensor], bool] = Tensor._is_view
    """Whether a tensor is a view: torch.export takes sizes of those on the meta device for unknown."""

    sparse_indices: Callable[[Tensor], Tensor] = Tensor._indices
    """The indices of a sparse tensor that need not be coalesced."""

    sparse_values: Callable[[Tensor], Tensor] = Tensor._values
    """The values of a sparse tensor that need not be coalesced."""

    make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass
    """Make a tensor of another class that has a shape and no memory."""

    TensorBase: type[Any] = torch._C.TensorBase
    """The class in C that has most methods and properties of tensors."""

    copy_all: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_
    """Copy tensors, the second list into the first, by one call."""

    unflattened: Callable[[Tensor, list[Tensor]], list[Tensor]]
    unflattened = torch._C._nn.unflatten_dense_tensors
    """Views of a vector of the shapes of tensors, one after the other; those without elements lose theirs."""

    _num_uses: Callable[[int], int] = torch._C._storage_Use_Count

TENSOR_FILE: str = torch._tensor.__file__
"""The file of the methods of tensors that are written in Python."""

TENSOR_MODULE: str = torch._tensor.__name__
"""The module of the methods of tensors that are written in Python."""

TENSOR_HOOKS = {
    "_backward_hooks": "gradient hook",
    "_post_accumulate_grad_hooks": "post-accumulate hook",
}
"""The attributes that hold a parameter's hooks, and what messages call these."""

HOOKS_OF_TENSOR: Callable[[Tensor], tuple[Any, ...]] = attrgetter(*TENSOR_HOOKS)
"""A tensor's own hooks, or None, under each of these names."""

# No tensor is made for it: this may be imported in any mode, and inference tensors have no version.
for _name in ("_version", *TENSOR_HOOKS):
    expect(hasattr(Tensor, _name), f"Tensor.{_name}")
expect(hasattr(torch.UntypedStorage, "_cdata"), "UntypedStorage._cdata")


def num_uses(tensor: Tensor) -> int:
    """How many tensors and handles hold the tensor's storage; what nothing else holds may be used again."""
    return _num_uses(storage_key(tensor.untyped_storage()))


def has_hooks(tensor: Tensor) -> bool:
    """Whether a parameter has hooks of the user's, which a program that reads its leaf wouldn't call."""
    return any(HOOKS_OF_TENSOR(tensor))
