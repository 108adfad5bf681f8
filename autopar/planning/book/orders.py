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

import torch

from autopar.cluster import ClusterSpec
from autopar.planning.agree import overload_of, parts_of_overload
from autopar.planning.asked.request import Request

ORDERS = "AUTOPAR_ORDERS"  # the environment variable in which the launcher names its folder of orders
SUFFIX = ".order"


@dataclass(frozen=True, slots=True)
class Order:
    """A graph that is planned for `cluster`, and is to be planned for others, each with the key of its plan.

    What is measured for `cluster` stands in for what isn't for others.
    """

    graph: Any  # of autopar.core.graph
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
    def read(path: Path) -> Order:
        """The order in a file that `write` wrote."""
        order: Order = pickle.loads(path.read_bytes())
        return order


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch._ops.OpOverload):
            return overload_of, parts_of_overload(value)
        return NotImplemented
