"""A call in torch.inference_mode, whose tensors count no writes, is traced as one outside of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.trace.export import trace
from autopar.trace.forward.inference_mode import counting_writes
from autopar.trace.reads.attribute_reads import recording


class Net(nn.Module):
    """Asks for values of its inputs before and after it writes into one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h: Tensor = self.norm(self.layer(x))
        mask = mask.clone()
        if mask.any():
            mask[0] = False
        return h.masked_fill(mask[:, None], 0.0)


def inputs() -> tuple[Tensor, Tensor]:
    return torch.ones(3, 6), torch.tensor([True, False, True])


@pytest.mark.parametrize("training", [False, True])
def test_a_call_in_inference_mode_is_traced_as_one_outside(training: bool) -> None:
    model = Net().train(training)
    with torch.no_grad(), recording() as wanted:
        outside = trace(model, inputs())
    with torch.inference_mode(), recording() as found:
        inside = trace(model, inputs())
        assert torch.is_inference_mode_enabled()
    assert [str(item) for item in inside.graph.operators] == [str(item) for item in outside.graph.operators]
    assert [item.answer for item in found.decisions] == [item.answer for item in wanted.decisions] == [True]


def test_a_tensor_that_comes_twice_is_one_copy() -> None:
    other = torch.ones(2)
    with torch.inference_mode():
        x = torch.ones(3)
    one, two, same = counting_writes((x, x, other))
    assert one is two and one is not x and same is other


class Asking(nn.Module):
    """Evaluates otherwise in torch.inference_mode than in torch.no_grad."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 7 if torch.is_inference_mode_enabled() else x * 5


def test_code_that_asks_for_the_mode_hears_of_it() -> None:
    for mode, factor in ((torch.no_grad, 5), (torch.inference_mode, 7)):
        with mode():
            (product,) = trace(Asking(), (torch.ones(3),)).graph.operators
        assert product.args[1] == factor
    assert not torch.is_inference_mode_enabled()
