"""A trace is on the model's device, wherever the example lies."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.trace.export import trace


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(8, 4), nn.Linear(4, 4)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        result: Tensor = self.linear(self.table(ids) + x) * places[:, None]
        return result


def targets(model_on: str, inputs_on: str) -> list[str]:
    with torch.device(model_on):
        model = Net()
    ids = torch.zeros(2, 3, dtype=torch.long, device=inputs_on)
    x = torch.zeros(2, 3, 4, device=inputs_on, requires_grad=True)
    graph = trace(model, (ids, x)).graph
    assert graph.specs["input_1"].requires_grad
    return [str(each.target) for each in graph.operators]


def test_the_program_is_the_same_wherever_an_example_lies() -> None:
    wanted = targets("cpu", "cpu")
    assert targets("meta", "cpu") == targets("cpu", "meta") == targets("meta", "meta") == wanted


def test_a_model_that_lies_on_two_devices_takes_what_lies_on_either() -> None:
    with torch.device("meta"):
        model = Net()
    model.unused = nn.Parameter(torch.zeros(3))  # type: ignore[assignment]
    model._parameters = {"unused": model._parameters.pop("unused"), **model._parameters}  # the first one
    ids, x = (torch.zeros(2, 3, dtype=torch.long, device="meta"), torch.zeros(2, 3, 4, device="meta"))
    assert len(trace(model, (ids, x)).graph.operators) == len(targets("cpu", "cpu"))


class OnCPUs(nn.Module):
    """Names no device for a tensor that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x + torch.linspace(0.0, 1.0, 4)) * torch.ones(3, 1)
        return result


def test_a_model_without_memory_is_traced_as_on_a_cpu_where_forward_makes_tensors_there() -> None:
    with torch.device("meta"):
        model, x = OnCPUs(), torch.zeros(3, 4)
    found, wanted = trace(model, (x,)).graph, trace(OnCPUs(), (torch.zeros(3, 4),)).graph
    assert [item.target for item in found.operators] == [item.target for item in wanted.operators]
    assert all(item.value is None or item.value.is_meta for item in found.inputs)
