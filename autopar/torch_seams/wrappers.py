"""What of torch's shards or replicates a model; importing this takes the import of torch.distributed.fsdp."""

from __future__ import annotations

from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from autopar.torch_seams.replaced import Replaceable
from autopar.torch_seams.required import expect_parameters, required

with required():
    from torch.distributed.fsdp._fully_shard import _fully_shard

    sharded_modules = Replaceable(_fully_shard, "_validate_module")
    """Where fully_shard checks the module that it is given."""

    wrapped_modules = tuple(
        Replaceable(kind, "__init__")
        for kind in (DistributedDataParallel, DataParallel, FullyShardedDataParallel)
    )
    """The making of what wraps a module."""

expect_parameters(sharded_modules.now, "module")
for _made in wrapped_modules:
    expect_parameters(_made.now, "self", "module")
