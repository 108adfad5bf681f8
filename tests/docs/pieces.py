"""Runs pieces of Python of the pages on two ranks, each with the names that it takes for granted.

Whatever a piece reads before it has set it is given: a model, a batch, a parallel module, an optimizer of it.
"""

from __future__ import annotations

import ast
import builtins
import symtable
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autopar

NUM_SAMPLES = 16


def taken_for_granted(text: str) -> list[str]:
    """Names of the module that a piece, or a function in it, reads and nobody sets before."""
    table = symtable.symtable(text, "piece", "exec")
    tables, names = [table], dict[str, None]()
    while tables:
        now = tables.pop()
        tables += now.get_children()
        for symbol in now.get_symbols():
            is_global = symbol.is_global() or now is table
            set_here = now is table and symbol.is_assigned() and not _read_first(text, symbol.get_name())
            if is_global and symbol.is_referenced() and not set_here and not symbol.is_imported():
                names[symbol.get_name()] = None
    return list(names)


def _read_first(text: str, name: str) -> bool:
    """Whether a piece reads a name in the statement that first sets it, as `model = wrap(model)` does."""
    for statement in ast.parse(text).body:
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name) and node.id == name]
        if names:
            reads = any(isinstance(node.ctx, ast.Load) for node in names)
            return reads and isinstance(statement, (ast.Assign, ast.Expr))
    return False


class Neighbours(nn.Module):
    """A net on a graph: a layer of the sum of what comes along edges."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layer(torch.zeros_like(x).index_add(0, edge_index[1], x[edge_index[0]]))
        return found


class Given:
    """The names, each made when it is asked for."""

    def __init__(self, text: str) -> None:
        self.text, self.made = text, dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        if name not in self.made:
            self.made[name] = getattr(self, f"make_{name}", lambda: MODULES[name])()
        return self.made[name]

    def make_model(self) -> nn.Module:
        torch.manual_seed(0)
        if "edge_index" in self.text:
            return Neighbours()
        return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def make_cluster(self) -> Any:
        return autopar.ClusterSpec.detect()

    def make_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self["dataset"][:NUM_SAMPLES]  # type: ignore[no-any-return]

    def make_example_batch(self) -> Any:
        return self["batch"]

    def make_batches(self) -> Callable[[], Any]:
        return lambda: [self["batch"]] * 2

    def make_dataset(self) -> TensorDataset:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(32, 16, generator=generator), torch.randint(4, (32,), generator=generator)
        return TensorDataset(x, y)

    def make_edge_index(self) -> torch.Tensor:
        vertices = torch.arange(NUM_SAMPLES)
        return torch.stack((vertices, vertices.roll(1)))  # a ring

    def make_x(self) -> torch.Tensor:
        return self["batch"][0]  # type: ignore[no-any-return]

    def make_labels(self) -> torch.Tensor:
        return self["batch"][1]  # type: ignore[no-any-return]

    def make_parallel(self) -> Any:
        return autopar.parallelize(
            self["model"],
            self["cluster"],
            self["batch"],
            loss_fn=F.cross_entropy,
            measure=False,
            micro_batches=2 if "train_step" in self.text else 1,
        )

    def make_optimizer(self) -> Any:
        return torch.optim.SGD(self["parallel"].parameters(), lr=0.1)

    def make_scaler(self) -> Any:
        return torch.amp.GradScaler("cpu")


MODULES = {"autopar": autopar, "torch": torch, "F": F, "nn": nn, "DataLoader": DataLoader}


def run_pieces(texts: Sequence[str], kind: type[Given] = Given) -> list[str | None]:
    """On every rank: what each piece raised, None where it ended well."""
    torch.set_num_threads(1)
    return [_raised(text, kind(text)) for text in texts]


def _raised(text: str, given: Given) -> str | None:
    space: dict[str, Any] = {"__name__": "piece"}
    try:
        names = [name for name in taken_for_granted(text) if not hasattr(builtins, name)]
        space |= {name: given[name] for name in names}
        exec(compile(text, "piece", "exec"), space)
    except Exception:
        return traceback.format_exc()
    return None
