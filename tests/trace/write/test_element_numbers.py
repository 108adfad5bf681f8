"""`y[places] += rows` is the eager sum where no place can repeat, and refused elsewhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import ValuesAskedError
from autopar.trace.export import trace
from tests.trace.write.test_kept_rows import check

ROWS, KEYS = 8, 4


class Adding(nn.Module):
    """Adds rows to those that the mask `of(keys)` [8, any] names, where `keys` are scores [8, 4]."""

    def __init__(self, of: Callable[[Tensor], Tensor], *, by_index_add: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.of, self.by_index_add = nn.Linear(6, 4), of, by_index_add

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        places, _ = torch.where(self.of(scores))
        made, rows = torch.ones(ROWS, 4, dtype=x.dtype), self.body(x[places])
        if self.by_index_add:
            made.index_add_(0, places, rows)
        else:
            made[places] += rows
        return made.square().sum()


DISTINCT: dict[str, Callable[[Tensor], Tensor]] = {
    "topk": lambda scores: scores.topk(2).indices == 1,
    "of the other dim, turned": lambda scores: scores.t().topk(2, 0).indices.permute(1, 0) == 1,
    "sorted, sliced": lambda scores: scores.sort(-1, descending=True).indices[:, 1:3] == 1,
    "in another shape": lambda scores: scores.view(2, 4, KEYS).topk(3).indices.view(ROWS, 3) == 1,
    "one of three": lambda scores: torch.stack([scores, -scores]).topk(2).indices[1] == 1,
    "with a dim more": lambda scores: scores.argsort(-1).unsqueeze(0).permute(1, 2, 0)[..., 0] == 1,
    "one": lambda scores: scores.argmax(-1, keepdim=True) == 1,
    "few of them": lambda scores: (scores.topk(2).indices == 1) & (scores[:, 1:2] > 0),
    "any mask of one column": lambda scores: scores[:, :1] > 0,
}
REPEATED: dict[str, Callable[[Tensor], Tensor]] = {
    "any mask": lambda scores: scores > 0,
    "the same twice": lambda scores: torch.stack([scores.argmax(-1), scores.argmax(-1)], -1) == 1,
    "of each column": lambda scores: scores.topk(ROWS // 2, 0).indices.t().reshape(ROWS, 2) == 1,
    "of the other dim": lambda scores: scores.sort(0).indices == 1,
    "of rows cut up": lambda scores: scores.topk(2).indices.repeat(1, 2).view(ROWS, 4) == 1,
    "of a dim that is gone": lambda scores: torch.stack([scores, scores], 1).argmax(-1) == 1,
    "all but one": lambda scores: scores.topk(3).indices != 1,
    "values": lambda scores: scores.round().topk(2).values == 0,
    "either": lambda scores: (scores.topk(3).indices == 1) | (scores.topk(3).indices == 2),
}


def given() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(ROWS, 6, dtype=torch.float64), torch.randn(ROWS, KEYS, dtype=torch.float64)


@pytest.mark.parametrize("name", DISTINCT)
def test_rows_are_added_where_no_place_can_repeat(name: str) -> None:
    x, scores = given()
    mask = DISTINCT[name](scores)
    assert mask.any() and mask.sum(1).max() == 1
    check(Adding(DISTINCT[name]).double(), (x, scores), ["batch"])


@pytest.mark.parametrize("name", REPEATED)
def test_where_places_may_repeat_index_add_alone_has_a_sum(name: str) -> None:
    with pytest.raises(ValuesAskedError, match=r"places that may repeat.*add by y\.index_add_\(0"):
        trace(Adding(REPEATED[name]).double(), given())
    check(Adding(REPEATED[name], by_index_add=True).double(), given(), ["batch"])
