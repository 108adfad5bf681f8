"""How much of what backward needs may wait in the host's memory meanwhile."""

from __future__ import annotations

from enum import Enum

from autopar.core.placement import Layout

OffloadedTensor = tuple[str, Layout]  # a tensor of the graph in the layout in which it is offloaded


class Offload(Enum):
    """Activations to offload: none, all that are large enough, or under a memory cap those whose copies
    hide."""

    NONE = "none"
    ALL = "all"
    AUTO = "auto"
