"""Stores through which ranks meet, and collectives by their names of each version."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from autopar.torch_seams.required import required

with required():
    from torch._C._distributed_c10d import PrefixStore as PrefixStore
    from torch._C._distributed_c10d import Store as Store
    from torch._C._distributed_c10d import TCPStore as TCPStore

    default_store: Callable[[], Any] = dist.distributed_c10d._get_default_store
    """The store of the world's process group: what one rank writes others read, without a collective."""

    # torch 2.13 renamed these two and warns at the old names.
    all_gather_single: Callable[..., Any] = (
        getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    )
    reduce_scatter_single: Callable[..., Any] = (
        getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    )
