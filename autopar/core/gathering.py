"""When a weight that is stored in shards is gathered, and what of it stays on the device.

| gathering | all-gather              | reduce-scatter  | resident beside the shards            | known as |
|-----------|-------------------------|-----------------|---------------------------------------|----------|
| ONCE      | once a step             | once a step     | full copy, sum of full gradients      | ZeRO-1   |
| KEEP      | in every micro-batch    | in its backward | full copy, from forward to backward   | ZeRO-2   |
| REGATHER  | in forward and backward | in its backward | nothing                               | FSDP     |

Where a weight is cast before it is gathered, its cast has a way: KEEP, or REGATHER from the cast shard.
"""

from __future__ import annotations

from enum import Enum


class Gathering(Enum):
    """Moment at which a weight that is stored in shards is gathered."""

    ONCE = "once"
    KEEP = "keep"
    REGATHER = "again"


class ShardState(Enum):
    """The part of trainable weights' state that is stored in shards, as far as dims are long enough."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    WEIGHTS = "weights"
    AUTO = "auto"  # as is fastest under the memory cap, for each weight

    @property
    def gatherings(self) -> tuple[Gathering, ...]:
        """The ways in which weights may be gathered."""
        match self:
            case ShardState.NONE:
                return ()
            case ShardState.OPTIMIZER:
                return (Gathering.ONCE,)
            case ShardState.GRADIENTS:
                return (Gathering.KEEP,)
            case ShardState.WEIGHTS:
                return (Gathering.REGATHER,)
            case ShardState.AUTO:
                return (Gathering.KEEP, Gathering.REGATHER, Gathering.ONCE)

    @property
    def is_forced(self) -> bool:
        """Whether every trainable weight is to be stored in shards."""
        return len(self.gatherings) == 1
