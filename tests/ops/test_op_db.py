"""The rules on PyTorch's own sample inputs: what its tests call an operator with, ours can shard.

Each sample is traced to its single ATen call, as a model's trace would have it, and goes through
the generic proof on a few strategies. A sample that traces to several calls, or to a call without
a rule, proves nothing here and is passed over; every operator must have some that count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import autopar.ops  # noqa: F401  (registers every family)
from autopar.core.mesh import Mesh
from autopar.core.strategy import UNSHARDED
from autopar.proof.operators import error, strategies
from autopar.sharding.rule import RULES, Sample

aten = torch.ops.aten
# How many samples of an operator, and how many strategies of each on a mesh, are tried, evenly chosen.
FEW = 5, {Mesh((2,)): 6, Mesh((2, 2)): 1}
MANY = 8, {Mesh((2,)): 8, Mesh((2, 2)): 3}
MOST_ELEMENTS = 4096
NAMES = """
    nn.functional.linear addmm baddbmm addbmm addmv addr matmul bmm mm mv nn.functional.conv1d
    nn.functional.conv2d
    nn.functional.conv3d nn.functional.conv_transpose1d nn.functional.conv_transpose2d
    nn.functional.conv_transpose3d softmax log_softmax logsumexp nn.functional.layer_norm
    nn.functional.group_norm nn.functional.batch_norm nn.functional.instance_norm nn.functional.rms_norm
    nn.functional.scaled_dot_product_attention nn.functional.embedding nn.functional.cross_entropy
    nn.functional.nll_loss nn.functional.mse_loss nn.functional.smooth_l1_loss nn.functional.huber_loss
    nn.functional.binary_cross_entropy_with_logits sum mean amax amin argmax var std cumsum sort topk
    nn.functional.gelu nn.functional.relu nn.functional.silu add sub mul div where masked_fill clamp pow
    transpose permute t view reshape expand split chunk unbind cat stack narrow select nn.functional.pad
    unsqueeze squeeze flatten unflatten einsum fft.fft fft.rfft fft.irfft fft.rfft2 fft.irfft2 fft.fftn
    view_as_complex linalg.solve median nn.functional.grid_sample nn.functional.cosine_similarity
    nn.functional.triplet_margin_loss nn.functional.cosine_embedding_loss
"""
VARIANTS = {"cumsum": ("",), "nn.functional.pad": ("constant", "reflect")}
BROADCASTS = (aten.expand.default, aten.broadcast_tensors.default)  # a loss makes its operands alike first
# Operands that torch cannot differentiate: the weights of a loss.
CONSTANT = {
    aten.cross_entropy_loss.default: ("weight",),
    aten.nll_loss_nd.default: ("weight",),
    aten.binary_cross_entropy_with_logits.default: ("weight", "pos_weight"),
}


def entries(name: str) -> list[Any]:
    wanted = VARIANTS.get(name)
    return [item for item in op_db if item.name == name and (not wanted or item.variant_test_name in wanted)]


def single_call(function: Any, sample: Any) -> Sample | None:
    """The one ATen call, if it has a rule, that `function` makes on the sample."""
    leaves, structure = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors or sum(item.numel() for item in tensors) > MOST_ELEMENTS:
        return None

    def call(*given: torch.Tensor) -> Any:
        queue = iter(given)
        filled = [next(queue) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        first, args, kwargs = pytree.tree_unflatten(filled, structure)
        return function(first, *args, **kwargs)

    graph = make_fx(call, pre_dispatch=True)(*[item.detach().clone() for item in tensors])
    calls = [node for node in graph.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    calls = [node for node in calls if node.target not in BROADCASTS] or calls
    if len(calls) != 1 or calls[0].target not in RULES:
        return None
    known = torch.fx.Interpreter(graph, garbage_collect_values=False)
    known.run(*[item.detach().clone() for item in tensors])
    args = torch.fx.node.map_arg(calls[0].args, known.env.__getitem__)
    kwargs = torch.fx.node.map_arg(calls[0].kwargs, known.env.__getitem__)
    return Sample(calls[0].target, tuple(args), dict(kwargs), constant_operands(calls[0].target, args))


def constant_operands(target: Any, args: Sequence[Any]) -> tuple[str, ...]:
    names = [item.name for item in target._schema.arguments]
    found, count = [], 0
    for name, value in zip(names, args, strict=False):
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                found += [f"operand_{count}"] if name in CONSTANT.get(target, ()) else []
                count += 1
    return tuple(found)


def samples(name: str, most: int) -> Iterator[Sample]:
    found = []
    for entry in entries(name):
        for sample in entry.sample_inputs("cpu", torch.float64, requires_grad=False):
            call = single_call(entry.op, sample)
            sparse = name == "nn.functional.embedding" and sample.kwargs.get("sparse")
            if call is not None and not sparse:
                found.append(call)
    yield from found[:: max(1, len(found) // most)][:most]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tried", [FEW, pytest.param(MANY, marks=pytest.mark.long)], ids=["few", "many"])
@pytest.mark.parametrize("name", NAMES.split())
def test_pytorchs_own_samples_are_sharded_rightly(name: str, tried: tuple[int, dict[Mesh, int]]) -> None:
    torch.manual_seed(0)
    most_samples, meshes = tried
    sharded = 0
    for sample in samples(name, most_samples):
        for mesh, most in meshes.items():
            offered = list(strategies(sample, mesh))
            for one, dims, strategy in offered[:: max(1, -(-len(offered) // most))]:
                sharded += any(option.factor not in UNSHARDED for option in strategy)
                gap = error(one, dims, strategy)
                shapes = [tuple(tensor.shape) for tensor in one.tensors.values()]
                names = [str(option) for option in strategy]
                assert gap < 1e-8, (str(sample.target), shapes, sample.args, str(mesh), names, gap)
    assert sharded, f"no sample of {name} was sharded"
