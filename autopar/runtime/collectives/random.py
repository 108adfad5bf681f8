"""Masks for random operators on ranks: the serial mask, or one for each shard."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_library = torch.library.Library("autopar", "FRAGMENT")


def _dropout_mask(shape: Sequence[int], p: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The mask that the serial F.dropout draws: 0 or 1 / (1 - p), from the default generator."""
    if p >= 1.0:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device).bernoulli_(1 - p).div_(1 - p)


def _shard_mask(
    shape: Sequence[int], p: float, dtype: torch.dtype, shard: int, device: torch.device
) -> Tensor:
    """A mask of one shard: the seed comes from the default generator, which stands alike on all
    ranks, and from the shard's number; replicas of a shard draw one mask."""
    if device.type == "meta":  # has no generators, and a shape must not move the default one
        return torch.empty(shape, dtype=dtype, device=device)
    seed = int(torch.randint(2**31, ()))
    generator = torch.Generator(device=device).manual_seed(seed * 65_537 + shard)
    if p >= 1.0:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.empty(shape, dtype=dtype, device=device).bernoulli_(1 - p, generator=generator).div_(1 - p)


def differ_by_stage(stage: int) -> None:
    """Move the default generator to another place for each pipeline rank: alike within a stage, as the
    masks of its replicas must be, and different from the masks of the others."""
    torch.manual_seed((torch.initial_seed() + 1_000_003 * stage) % 2**63)


def share_state() -> None:
    """All ranks go on with rank 0's CPU generator: replicas must draw one mask; collective."""
    state = torch.get_rng_state()
    box = [state]
    dist.broadcast_object_list(box, src=0)
    torch.set_rng_state(box[0])


def _register(name: str, schema: str, kernel: object) -> None:
    tags = (torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag)
    _library.define(f"{name}{schema}", tags=tags)
    _library.impl(name, kernel, "CompositeExplicitAutograd")


_register(
    "dropout_mask", "(SymInt[] shape, float p, ScalarType dtype, Device device) -> Tensor", _dropout_mask
)
_register(
    "shard_mask",
    "(SymInt[] shape, float p, ScalarType dtype, int shard, Device device) -> Tensor",
    _shard_mask,
)
