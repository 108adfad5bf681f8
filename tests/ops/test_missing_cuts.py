"""No rule leaves out a cut that works: on PyTorch's samples all cuts of operands into halves are tried.

    x     w          x @ w                          the operator of each rank's halves
    S(0)  R     ->   S(0)    halves of the result      a cut that a rule must offer
    S(1)  S(0)  ->   P       parts of a sum            another one
    R     S(0)  ->   raises                            none

A cut counts where the results of two ranks, each of its parts, are halves or parts of the whole result.
Sizes among the arguments stay those of the whole, so that views prove nothing here. Left out are embeddings,
whose gradients some samples scale by how often a row is read, and solutions of equations, of which columns
aren't cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.core.mesh import Mesh
from autopar.core.placement import Shard
from autopar.proof.operators import OneOperator
from autopar.sharding.atoms import Dims
from autopar.sharding.rule import Sample
from autopar.sharding.strategies import find_atoms, options_of
from tests.ops.test_op_db import samples

Cut = tuple[int | None, ...]  # of each operand the dim that is halved, None where each rank has all of it
MOST_SAMPLES = 8
MOST_OPERANDS = 3
NAMES = """
    nn.functional.linear addmm baddbmm matmul bmm mm mv nn.functional.conv1d nn.functional.conv2d softmax
    log_softmax logsumexp nn.functional.layer_norm nn.functional.group_norm nn.functional.rms_norm
    sum mean amax amin argmax var std cumsum sort topk nn.functional.gelu
    nn.functional.relu nn.functional.silu add sub mul div where masked_fill clamp pow transpose permute t
    cat stack unsqueeze einsum fft.fft median
"""


def halves(tensor: Tensor, dim: int | None) -> tuple[Tensor, Tensor]:
    """The parts of two ranks."""
    if dim is None:
        return tensor, tensor
    first, second = tensor.chunk(2, dim)
    return first, second


def cuts(tensors: list[Tensor]) -> Iterator[Cut]:
    """All cuts of some operand."""
    dims = [[None, *(dim for dim, size in enumerate(item.shape) if size > 1)] for item in tensors]
    for cut in itertools.product(*dims):
        if any(dim is not None for dim in cut):
            yield cut


def computed(sample: Sample, tensors: list[Tensor]) -> Tensor | None:
    """The first result of the operator, None where it takes no such operands."""
    leaves, structure = pytree.tree_flatten((sample.args, sample.kwargs))
    queue = iter(tensors)
    filled = [next(queue) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(filled, structure)
    try:
        result: Any = sample.target(*args, **kwargs)
    except (RuntimeError, IndexError, ValueError):
        return None
    return result if isinstance(result, Tensor) else result[0]


def works(sample: Sample, tensors: list[Tensor], cut: Cut) -> bool:
    """True if both ranks' results are halves of the whole result, or parts of a sum."""
    whole = computed(sample, tensors)
    parts = zip(*(halves(item, dim) for item, dim in zip(tensors, cut, strict=True)), strict=True)
    results = [computed(sample, list(part)) for part in parts]
    if whole is None or any(item is None for item in results):
        return False
    first, second = results
    if not whole.numel() or whole.isnan().any():
        return False
    dims = range(whole.dim()) if first.dim() == second.dim() == whole.dim() else ()
    joined = [torch.cat(results, dim) for dim in dims if _may_join(first, second, dim)]
    if whole.dtype.is_floating_point and first.shape == second.shape == whole.shape:
        joined.append(first + second)
    return any(item.shape == whole.shape and torch.allclose(item, whole) for item in joined)


def _may_join(first: Tensor, second: Tensor, dim: int) -> bool:
    return first[(slice(None),) * dim + (0,)].shape == second[(slice(None),) * dim + (0,)].shape


def offered(sample: Sample) -> set[Cut]:
    """The cuts that the rule offers on an axis of two."""
    one = OneOperator(sample)
    options = options_of(one.graph.operators[0], Dims(one.graph, find_atoms(one.graph), Mesh((2,))))
    return {
        tuple(item.dim if isinstance(item, Shard) else None for item in option.operands) for option in options
    }


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES.split())
def test_every_cut_that_works_is_offered(name: str) -> None:
    torch.manual_seed(0)
    tried = 0
    for sample in samples(name, MOST_SAMPLES):
        tensors = [
            leaf for leaf in pytree.tree_leaves((sample.args, sample.kwargs)) if isinstance(leaf, Tensor)
        ]
        if len(tensors) > MOST_OPERANDS or not all(item.numel() for item in tensors):
            continue
        known = offered(sample)
        working = [cut for cut in cuts(tensors) if works(sample, tensors, cut)]
        tried += len(working)
        missing = [cut for cut in working if cut not in known]
        shapes = [tuple(item.shape) for item in tensors]
        assert not missing, (str(sample.target), shapes, sample.args, missing)
    assert tried, f"no cut of a sample of {name} works"
