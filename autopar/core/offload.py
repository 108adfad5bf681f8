"""What may lie in the host's memory while the device doesn't need it."""

from __future__ import annotations

from enum import Enum

from autopar.core.placement import Layout

OffloadedTensor = tuple[str, Layout]  # a tensor of the graph in the layout in which it is offloaded


class Offload(Enum):
    """What waits in the host's memory: nothing, all activations that are large enough, the state of all
    weights, or what a cap asks for: activations whose copies hide, or state where nothing else will do."""

    NONE = "none"
    ALL = "all"
    STATE = "state"
    AUTO = "auto"
