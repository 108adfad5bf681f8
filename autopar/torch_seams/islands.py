"""A process group between ranks of different worlds, which torch.distributed's own functions don't make."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from autopar.torch_seams.collectives import PrefixStore
from autopar.torch_seams.required import required

with required():
    from torch._C._distributed_c10d import ProcessGroupGloo

    def gloo_group(name: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        """Join the group `name` of a store; its tensors lie on CPUs. Collective over its ranks."""
        return ProcessGroupGloo(PrefixStore(name, store), rank, size, timeout)
