"""An order: what another process needs to plan a graph for other clusters, in a file.

Operators go by their names, as overloads don't pickle. The folder is the launcher's own: what is unpickled
may run code.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from autopar.cluster import ClusterSpec
from autopar.core.graph import Graph
from autopar.planning.asked.request import Request
from autopar.torch_seams.schemas import OpOverload, named_overload, overload_names

ORDERS = "AUTOPAR_ORDERS"  # the environment variable in which the launcher names its folder of orders
SUFFIX = ".order"


@dataclass(frozen=True, slots=True)
class PlanOrder:
    """Says which other clusters a graph is to be planned for, each with the key of its plan.

    What is measured for `cluster` stands in for what isn't for others.
    """

    graph: Graph
    request: Request
    cluster: ClusterSpec
    others: tuple[tuple[str, ClusterSpec], ...]
    costdb: str | None
    book: Path

    def write(self, folder: Path) -> None:
        """Write the order into a folder, whole; raises what pickle or the file system raise."""
        buffer = BytesIO()
        _Pickler(buffer).dump(self)
        draft = folder / f"{self.others[0][0]}.{os.getpid()}"
        draft.write_bytes(buffer.getvalue())
        os.replace(draft, draft.with_name(draft.name + SUFFIX))

    @staticmethod
    def read(path: Path) -> PlanOrder:
        """The order in a file that `write` wrote."""
        order: PlanOrder = pickle.loads(path.read_bytes())
        return order


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, OpOverload):
            return named_overload, overload_names(value)
        return NotImplemented
