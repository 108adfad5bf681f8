"""What a traced graph says about a model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.core.graph import InputKind
from autopar.errors import InputError, TraceError
from autopar.trace.export import trace


class Difference(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x - 2 * y


def test_a_tensor_that_is_passed_twice_stays_two_inputs() -> None:
    x = torch.randn(3)
    graph = trace(Difference(), (x, x)).graph
    users = [item.name for item in graph.inputs if item.kind is InputKind.USER]
    used = {name for item in graph.operators for name in item.operands}
    assert len(users) == 2 and used.issuperset(users)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, *, scale: float = 1.0, extra: Tensor | None = None) -> dict[str, Tensor]:
        self.count += 1
        x = self.second(torch.relu(self.first(x))) * scale
        return {"sum": x if extra is None else x + extra}


def test_tied_frozen_and_written_tensors_are_told() -> None:
    graph = trace(Tied(), (torch.randn(2, 4),), {"scale": 0.5}).graph
    parameters = {item.target: item for item in graph.inputs if item.kind is InputKind.PARAMETER}
    assert parameters["first.weight"].aliases == ("second.weight",)
    assert not parameters["first.bias"].spec.requires_grad
    assert [buffer for buffer, _ in graph.writes] == ["count"]


def test_none_and_numbers_are_part_of_the_call_and_tensors_are_inputs() -> None:
    x = torch.randn(2, 4)
    without = trace(Tied(), (x,), {"extra": None})
    within = trace(Tied(), (x,), {"extra": x + 1})
    assert without.arguments.key != within.arguments.key
    assert within.arguments.paths == ("input_0", "extra")
    assert set(without.results.rebuild((x,))) == {"sum"}


class Adjacent(nn.Module):
    """A matrix that is held in one of three ways."""

    def __init__(self, kind: str, matrix: Tensor) -> None:
        super().__init__()
        self.inner = nn.Module()
        if kind == "buffer":
            self.inner.register_buffer("matrix", matrix)
        else:
            self.inner.matrix = nn.Parameter(matrix) if kind == "parameter" else matrix

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.matrix @ x


NESTED = torch.nested.nested_tensor([torch.ones(1, 3), torch.ones(2, 3)])
ODD = [
    ("parameter", "sparse_coo that learns", torch.eye(3).to_sparse()),
    ("parameter", "sparse_csr that learns", torch.eye(3).to_sparse_csr()),
    ("buffer", "hybrid sparse_coo", torch.eye(3).to_sparse(1)),
    *((kind, "nested", NESTED) for kind in ("parameter", "buffer", "attribute")),
]


@pytest.mark.parametrize(("kind", "layout", "matrix"), ODD, ids=[f"{kind} {name}" for kind, name, _ in ODD])
def test_sparse_and_nested_tensors_that_a_model_holds_are_refused_by_name(
    kind: str, layout: str, matrix: Tensor
) -> None:
    with pytest.raises(
        InputError, match=rf"{kind} inner\.matrix: found a {layout}.* tensor, .*to_padded_tensor"
    ):
        trace(Adjacent(kind, matrix), (torch.randn(3, 2),))


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if y.sum() > 0 else -y


def test_a_branch_on_values_is_refused_at_the_users_line() -> None:
    with pytest.raises(TraceError, match=r"test_export\.py.*return y if y\.sum\(\) > 0|test_export\.py:\d+"):
        trace(Branching(3, 3), (torch.randn(3),))


@pytest.mark.parametrize("function", [lambda x: x[x > 0].max(), lambda x: x * x.max().item()])
def test_sizes_and_numbers_that_depend_on_values_are_refused_at_their_line(
    function: Callable[[Tensor], Tensor],
) -> None:
    with pytest.raises(TraceError, match=r"test_export\.py:\d+: .*depends on values"):
        trace(Function(function), (torch.randn(4, 3),))


class Named(nn.Module):
    """Parameters that are called as the exporter calls operators."""

    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Parameter(torch.tensor(0.5))
        self.mul = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.t.exp() * x.t() + self.mul.t()).t() * self.mul


def test_a_parameter_that_is_called_as_an_operator_keeps_its_name_and_shape() -> None:
    graph = trace(Named(), (torch.randn(3, 4),)).graph
    shapes = {item.name: item.spec.shape for item in graph.inputs}
    assert shapes == {"t": (), "mul": (3, 4), "input_0": (3, 4)}
    results = [name for item in graph.operators for name in item.results]
    assert len(set(results)) == len(results)
    assert {"t", "mul"}.isdisjoint(results)


class Moved(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask.to(device=x.device, dtype=torch.float64)


def test_a_device_is_an_argument_by_name_so_that_programs_can_put_in_their_own() -> None:
    graph = trace(Moved(), (torch.randn(3), torch.ones(3, dtype=torch.bool))).graph
    cast = next(item for item in graph.operators if item.target is torch.ops.aten.to.device)
    assert cast.args == cast.args[:1]
    assert cast.kwargs["device"] == torch.device("cpu") and cast.kwargs["dtype"] is torch.float64


class Examples(nn.Module):
    """Takes `other` for shapes and dtypes only."""

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        y = x.view_as(other) + x.reshape_as(other) + x[0].expand_as(other).type_as(other) + x[0].to(other)
        y = y + other.new_zeros(4) + other.new_ones(3, 4) + other.new_full((4,), fill_value=2.0)
        return y + torch.randn_like(other) + torch.rand_like(other) + 0 * other.new_empty(4)


def test_a_tensor_that_only_shows_a_shape_is_not_waited_for() -> None:
    x, other = torch.randn(3, 4), torch.randn(3, 4, dtype=torch.float64)
    traced = trace(Examples(), (x, other))
    used = {name for item in traced.graph.operators for name in item.operands}
    assert "input_1" not in used
    assert traced.graph.specs[traced.graph.outputs[0]].dtype is torch.float64
    names = [item.target._schema.name.removeprefix("aten::") for item in traced.graph.operators]
    assert {"zeros", "ones", "full", "empty", "randn", "rand"} <= set(names)


class Balanced(nn.Module):
    """A loss that weighs itself."""

    def __init__(self, *, requires_grad: bool) -> None:
        super().__init__()
        self.log_variance = nn.Parameter(torch.tensor(0.3), requires_grad=requires_grad)
        self.register_buffer("goal", torch.ones(3))
        self.register_buffer("unit", torch.tensor(2.0), persistent=False)

    def forward(self, output: Tensor) -> Tensor:
        return (output / self.unit - self.goal).square().mean() / self.log_variance.exp() + self.log_variance


def test_tensors_of_a_loss_are_constants() -> None:
    graph = trace(nn.Linear(2, 3), (torch.randn(4, 2),), loss_fn=Balanced(requires_grad=False)).graph
    found = {item.target: item.value for item in graph.inputs if item.kind is InputKind.CONSTANT}
    assert found == {
        "loss_fn.log_variance": torch.tensor(0.3),
        "loss_fn.goal": pytest.approx(torch.ones(3)),
        "loss_fn.unit": torch.tensor(2.0),
    }
    assert all(not item.spec.requires_grad for item in graph.inputs if item.target in found)


def test_a_loss_that_learns_is_refused_by_the_names_of_its_parameters() -> None:
    with pytest.raises(InputError, match=r"loss_fn Balanced: .*log_variance.*requires_grad_"):
        trace(nn.Linear(2, 3), (torch.randn(4, 2),), loss_fn=Balanced(requires_grad=True))


def write_after_view(x: Tensor) -> Tensor:
    y = x.clone()
    row = y[0]
    y.mul_(2)
    return y + row


def write_to_one_view_of_two(x: Tensor) -> Tensor:
    y = x.clone()
    row, rows = y[0], y[:2]
    row.mul_(2)
    return rows.sum() + y


def write_without_gradient(x: Tensor) -> Tensor:
    y = x * 2
    with torch.no_grad():
        y[0] = 1
    return y


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(3, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


WRITES = [write_after_view, write_to_one_view_of_two, write_without_gradient]


@pytest.mark.parametrize("write", WRITES)
def test_a_write_that_others_would_see_is_refused_at_its_line(write: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(TraceError, match=r"test_export\.py:\d+: .*in-place write") as refusal:
        trace(Function(write), (torch.randn(4, 3),))
    first = write.__code__.co_firstlineno
    assert int(refusal.value.where.split(":")[1]) in range(first, first + 5), "the line itself, not forward's"


def write_through_data(x: Tensor) -> Tensor:
    y = x.clone()
    y.data.mul_(2)
    return y


def set_data(x: Tensor) -> Tensor:
    y = x.clone()
    y.data = x * 2
    return y


@pytest.mark.parametrize(
    ("write", "found"), [(write_through_data, "in-place write"), (set_data, r"tensor\.data = .*copy_")]
)
def test_data_cannot_be_written_nor_set(write: Callable[[Tensor], Tensor], found: str) -> None:
    with pytest.raises(TraceError, match=rf"test_export\.py:\d+: .*{found}"):
        trace(Function(write), (torch.randn(4, 3),))


def test_data_is_read_without_gradient() -> None:
    graph = trace(Function(lambda x: x * x.data), (torch.randn(4, 3),)).graph
    assert [item.target._schema.name for item in graph.operators] == [
        *("aten::linear", "aten::detach", "aten::mul")
    ]


class Averaged(nn.Module):
    """Keeps an average as the message about `tensor.data = ...` says."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.average.copy_(self.average * 0.9 + x.mean(0) * 0.1)
        return x - self.average


def test_what_takes_the_place_of_a_set_data_can_be_traced() -> None:
    graph = trace(Averaged(), (torch.randn(4, 3),)).graph
    assert [buffer for buffer, _ in graph.writes] == ["average"]


def test_a_write_that_nothing_else_would_see_may_go_through_any_view() -> None:
    def doubled(x: Tensor) -> Tensor:
        y = x.clone().view(2, 2, 3).transpose(0, 1)
        y[0].mul_(2)
        return y

    graph = trace(Function(doubled), (torch.randn(4, 3),)).graph
    last = [item.target._schema.name for item in graph.operators][-3:]
    assert last == ["aten::select", "aten::mul", "aten::select_scatter"]


class Reshaped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.count.view(2, 2).add_(1)
        return x + 1


class MovingTeacher(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.student, self.teacher, self.way = nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False), way

    def forward(self, x: Tensor) -> Tensor:
        mine, theirs = self.student.weight, self.teacher.weight
        with torch.no_grad():
            if self.way == "in place":
                theirs.mul_(0.9).add_(mine, alpha=0.1)
            else:
                theirs.data.lerp_(mine.data, 0.1)
        out: Tensor = (self.student(x) - self.teacher(x)).square().mean()
        return out


@pytest.mark.parametrize("way", ["in place", "data"])
def test_a_write_to_a_parameter_that_learns_is_refused_by_its_name(way: str) -> None:
    model = MovingTeacher(way)
    model.teacher.requires_grad_(True)
    with pytest.raises(TraceError, match=r"parameter teacher\.weight.* outside of forward"):
        trace(model, (torch.randn(4, 3),))


def test_a_buffer_is_written_through_a_reshaped_view() -> None:
    graph = trace(Reshaped(), (torch.randn(4, 3),)).graph
    (written,) = [after for before, after in graph.writes]
    assert graph.specs[written].shape == (4,)
