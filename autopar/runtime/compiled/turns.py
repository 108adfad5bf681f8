"""One order of collectives on all ranks, whatever a compiler moves.

A compiler orders operators by what they read and write. Collectives that don't depend on each other it may
turn around, by sizes, which uneven ranks don't share: then ranks wait for each other forever, or take one
tensor for another. So in every compiled graph those operators write to one tensor, in the order in which the
graph has them:

    turn = begin_turns("6f2c...")          the graph's collectives, in a word: ranks compare it the first time
    y = p_to_r_in_turn(x, "a@2", turn)
    z = s_to_b_in_turn(w, "a@2", 0, 1, [4, 3], turn)

The order of the graph is that of the program, which ranks share, and in backward autograd's, turned around.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, fx

from autopar.errors import CheckError
from autopar.runtime import registry
from autopar.runtime.collectives import groups, transport
from autopar.torch_seams.inductor import CustomGraphPass, get_hash_for_files
from autopar.torch_seams.pytree import tree_leaves

_SEEN = "eager_input_vals"
_compared: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()  # by world


class InTurn(CustomGraphPass):
    """Orders the collectives of a graph that is about to be compiled."""

    def __call__(self, graph: fx.Graph) -> None:
        ordered = [(node, twin) for node in graph.nodes if (twin := registry.in_turn(node.target))]
        if not ordered:
            return
        names = [_name(node) for node, _ in ordered]
        keys = sorted({key for node, _ in ordered for key in _keys(node)})
        first = next(node for node in graph.nodes if node.op != "placeholder")
        with graph.inserting_before(first):
            turn = graph.call_function(registry.operator("begin_turns"), (_digest(names), keys))
        with _fake_mode(ordered[0][0]):
            turn.meta["val"] = _begin_shape("", ())
        for node, twin in ordered:
            node.target, node.args = twin, (*node.args, turn)
            if _SEEN in node.meta:  # how tensors lie in memory, which the compiler must keep to
                args, kwargs = node.meta[_SEEN]
                node.meta[_SEEN] = (*args, turn.meta["val"]), kwargs

    def uuid(self) -> Any:
        return get_hash_for_files((__file__, registry.__file__))


def _fake_mode(node: fx.Node) -> Any:
    (value, *_) = tree_leaves(node.meta["val"])
    return value.fake_mode


def _name(node: fx.Node) -> str:
    """Name the operator and its group: what ranks share of a call."""
    return " ".join((str(node.target), *_keys(node)))


def _keys(node: fx.Node) -> list[str]:
    return [item for item in node.args if isinstance(item, str) and "@" in item]


def _digest(names: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(names).encode(), digest_size=7).hexdigest()


def _begin(digest: str, keys: Sequence[str]) -> Tensor:
    """Make what the operators of a graph write to; raises CheckError where other ranks have other ones."""
    world = dist.group.WORLD
    compared = _compared.setdefault(world, set()) if world is not None else {digest}
    if digest not in compared:
        for key in keys:
            _compare(digest, key)
        compared.add(digest)
    return torch.zeros(1)


def _compare(digest: str, key: str) -> None:
    group, mine = groups.group(key), int(digest, 16)
    device = "cuda" if dist.get_backend(group) == dist.Backend.NCCL else "cpu"
    found = torch.tensor([mine, -mine], device=device)
    transport.all_reduce(found, group, dist.ReduceOp.MAX)
    most, least = int(found[0]), -int(found[1])
    if most != least:
        raise CheckError(
            where="the compiled program",
            found="other collectives, or in another order, than on other ranks",
            wanted="the same on all ranks",
            remedy="parallelize without compile, and report this model",
        )


def _begin_shape(digest: str, keys: Sequence[str]) -> Tensor:
    return torch.empty(1)


registry.define("begin_turns", "(str digest, str[] keys) -> Tensor", _begin, shape=_begin_shape)
registry.all_in_turn()
