"""How much of what backward needs may wait in the host's memory meanwhile."""

from __future__ import annotations

from enum import Enum

from autopar.core.placement import Layout

OffloadedTensor = tuple[str, Layout]  # a tensor of the graph in the layout in which it is offloaded


class Offload(Enum):
    """Nothing, all that is large enough, or under a memory cap what hides behind compute."""

    NONE = "none"
    ALL = "all"
    AUTO = "auto"
