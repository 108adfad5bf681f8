"""Rows that were sorted only to meet the matrix that each chooses stay where they lie."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.api import verify
from autopar.cluster import ClusterSpec
from autopar.trace.experts.routed_experts import ROUTED_EXPERTS
from autopar.trace.export import trace
from autopar.trace.rewrites.routed_products import ROUTED_MM
from autopar.trace.target import Target

aten = torch.ops.aten
EXPERTS, WIDTH = 4, 16


def back_added(rows: Tensor, order: Tensor, x: Tensor, k: int) -> Tensor:
    return torch.zeros_like(x).index_add(0, order // k, rows)


def back_put(rows: Tensor, order: Tensor, x: Tensor, k: int) -> Tensor:
    return torch.zeros_like(rows).index_put((order,), rows).view(len(x), k, -1).sum(1)


def back_fetched(rows: Tensor, order: Tensor, x: Tensor, k: int) -> Tensor:
    return rows[order.argsort()].view(len(x), k, -1).sum(1)


class Experts(nn.Module):
    """Each of `k` experts of a row takes its share of it."""

    def __init__(
        self, back: Callable[[Tensor, Tensor, Tensor, int], Tensor], k: int, *, sorts: int = 1
    ) -> None:
        super().__init__()
        self.sorts = sorts
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.first = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 4)
        self.second = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.back, self.k = back, k

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(self.k, -1)
        keys, order = chosen.reshape(-1).sort()
        if self.sorts != 1:
            order = chosen.reshape(-1).argsort()
        if self.sorts == 0:  # of keys
            keys = chosen
        ends = torch.histc(keys.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int32)
        rows = x[order // self.k]
        left, right = torch._grouped_mm(rows.bfloat16(), self.first.bfloat16(), ends).chunk(2, -1)
        rows = torch._grouped_mm(left.relu() * right, self.second.bfloat16(), ends).float()
        return self.back(rows * weights.reshape(-1)[order].unsqueeze(1), order, x, self.k)


@pytest.mark.slow
@pytest.mark.parametrize("sorts", [1, 2, 0])
@pytest.mark.parametrize(("back", "k"), [(back_added, 2), (back_put, 2), (back_fetched, 1)])
def test_no_row_is_moved_where_nobody_sees_the_order(
    back: Callable[[Tensor, Tensor, Tensor, int], Tensor], k: int, sorts: int
) -> None:
    model, x = Experts(back, k, sorts=sorts), torch.randn(6, WIDTH)
    targets = {item.target for item in trace(model, (x,), {}).graph.operators}
    assert ROUTED_EXPERTS in targets and ROUTED_MM not in targets
    assert not targets & {
        aten.sort.default,
        aten.argsort.default,
        aten.index.Tensor,
        aten._grouped_mm.default,
    }
    found = verify(
        Target(model, (x,), {}, lambda y: y.square().mean(), "model"),
        ClusterSpec.local(2),
        force="batch",
        steps=1,
        changes=0,
    )
    assert found.passed and not found.vacuous


def test_rows_that_somebody_sees_in_their_order_stay_in_it() -> None:
    class Seen(Experts):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            seen: list[Tensor] = []

            def back(rows: Tensor, order: Tensor, x: Tensor, k: int) -> Tensor:
                seen.append(rows.cumsum(0))
                return back_put(rows, order, x, k)

            self.back = back
            found = super().forward(x)
            return found, seen[0]

    graph = trace(Seen(back_put, 2), (torch.randn(6, WIDTH),), {}).graph
    targets = {item.target for item in graph.operators}
    assert not targets & {ROUTED_MM, ROUTED_EXPERTS} and aten._grouped_mm.default in targets


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_of_transformers_are_known_in_every_dtype(dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=16, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).to(dtype)
    tokens = torch.randint(0, 16, (4, 6))
    targets = [item.target for item in trace(model, (), {"input_ids": tokens}).graph.operators]
    assert targets.count(ROUTED_EXPERTS) == 1 and aten.sort.default not in targets
