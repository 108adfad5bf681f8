"""A rank's program calls torch's bindings where they reach the operator that the graph has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.rewrite.torch_bindings import _binding, call_bindings
from autopar.runtime.collectives import placement_moves  # noqa: F401  (registers the moves)
from autopar.torch_seams.modes import TorchDispatchMode

ATEN = torch.ops.aten
FUNCTIONS = "torch._C._VariableFunctions"


def x(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


COMPOSED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "adaptive_avg_pool1d": (ATEN.adaptive_avg_pool1d.default, (x(2, 3, 8), [2])),
    "adaptive_avg_pool2d": (ATEN.adaptive_avg_pool2d.default, (x(2, 3, 8, 8), [2, 2])),
    "batch_norm": (
        ATEN.batch_norm.default,
        (x(4, 3), x(3), x(3), x(3), x(3).abs(), False, 0.1, 1e-5, False),
    ),
    "bilinear": (ATEN.bilinear.default, (x(2, 3), x(2, 4), x(5, 3, 4), x(5))),
    "chunk": (ATEN.chunk.default, (x(4, 6), 3, 1)),
    "conv1d": (ATEN.conv1d.default, (x(2, 4, 8), x(6, 2, 3), x(6), [1], [1], [1], 2)),
    "conv2d": (ATEN.conv2d.default, (x(2, 4, 8, 8), x(6, 2, 3, 3), x(6), [2, 1], [1, 0], [1, 2], 2)),
    "conv3d": (ATEN.conv3d.default, (x(1, 2, 4, 4, 4), x(3, 2, 2, 2, 2), None, [1, 1, 1], [1, 0, 1])),
    "cross_entropy_loss": (ATEN.cross_entropy_loss.default, (x(4, 3), torch.tensor([0, 1, 2, 0]))),
    "dropout": (ATEN.dropout.default, (x(3, 4), 0.4, False)),
    "einsum": (ATEN.einsum.default, ("ij,jk->ik", [x(2, 3), x(3, 4)])),
    "flatten": (ATEN.flatten.using_ints, (x(2, 3, 4), 1)),
    "group_norm": (ATEN.group_norm.default, (x(2, 4, 5), 2, x(4), x(4), 1e-3)),
    "huber_loss": (ATEN.huber_loss.default, (x(3, 4), x(3, 4))),
    "instance_norm": (
        ATEN.instance_norm.default,
        (x(2, 3, 5), None, None, None, None, True, 0.1, 1e-3, False),
    ),
    "kl_div": (ATEN.kl_div.default, (x(3, 4), x(3, 4).abs())),
    "layer_norm": (ATEN.layer_norm.default, (x(3, 4), [4], x(4), x(4), 1e-3)),
    "linear": (ATEN.linear.default, (x(3, 4), x(5, 4), x(5))),
    "log_softmax": (ATEN.log_softmax.int, (x(3, 4), 1)),
    "matmul": (ATEN.matmul.default, (x(3, 4), x(4, 2))),
    "max_pool1d": (ATEN.max_pool1d.default, (x(2, 3, 8), [2], [2])),
    "max_pool2d": (ATEN.max_pool2d.default, (x(2, 3, 8, 8), [3, 3], [2, 2], [1, 1])),
    "mse_loss": (ATEN.mse_loss.default, (x(3, 4), x(3, 4))),
    "nll_loss": (ATEN.nll_loss.default, (x(4, 3), torch.tensor([0, 1, 2, 0]))),
    "nll_loss_nd": (ATEN.nll_loss_nd.default, (x(4, 3), torch.tensor([0, 1, 2, 0]))),
    "pad": (ATEN.pad.default, (x(3, 4), [1, 2])),
    "pixel_shuffle": (ATEN.pixel_shuffle.default, (x(2, 4, 3, 3), 2)),
    "reshape": (ATEN.reshape.default, (x(3, 4), [2, 6])),
    "rms_norm": (ATEN.rms_norm.default, (x(3, 4), [4], x(4))),
    "sdpa": (ATEN.scaled_dot_product_attention.default, (x(1, 2, 5, 4), x(1, 2, 5, 4), x(1, 2, 5, 4))),
    "sdpa, causal": (
        ATEN.scaled_dot_product_attention.default,
        (x(1, 2, 5, 4), x(1, 2, 5, 4), x(1, 2, 5, 4), None, 0.0, True),
    ),
    "selu": (ATEN.selu.default, (x(3, 4),)),
    "softmax": (ATEN.softmax.int, (x(3, 4), 1)),
    "softmax in float32": (ATEN.softmax.int, (x(3, 4), 1, torch.float32)),
    "stft": (ATEN.stft.default, (x(3, 16), 8, None, None, x(8), False, True, True)),
    "stft of complex numbers": (ATEN.stft.default, (x(3, 16) * 1j, 8)),
    "stft of complex numbers, normalized": (ATEN.stft.default, (x(3, 16) * 1j, 8, 4, 8, None, True)),
    "tensordot": (ATEN.tensordot.default, (x(3, 4), x(4, 2), [1], [0])),
    "triplet_margin_loss": (ATEN.triplet_margin_loss.default, (x(3, 4), x(3, 4), x(3, 4))),
    "where": (ATEN.where.self, (x(3, 4) > 0, x(3, 4), x(3, 4))),
}


def module(operator: Any, args: tuple[Any, ...]) -> tuple[fx.GraphModule, list[Tensor]]:
    """A graph of one call, whose tensors are placeholders, and these tensors."""
    graph, tensors = fx.Graph(), []

    def put(value: Any) -> Any:
        if isinstance(value, list):
            return [put(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        tensors.append(value)
        return graph.placeholder(f"x{len(tensors)}")

    graph.output(graph.call_function(operator, tuple(put(value) for value in args)))
    return fx.GraphModule(nn.Module(), graph), tensors


@pytest.mark.parametrize("name", COMPOSED)
def test_the_program_gives_what_the_operator_gives(name: str) -> None:
    operator, args = COMPOSED[name]
    program, tensors = module(operator, args)
    call_bindings(program.graph)
    program.recompile()
    torch.testing.assert_close(program(*tensors), operator(*args), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("target", "form", "binding"),
    [
        ("add.Tensor", "_, _", f"{FUNCTIONS}.add"),
        ("add.Tensor", "_, 2", f"{FUNCTIONS}.add"),
        ("add.Scalar", "_, 2", None),  # the binding makes a tensor of the number
        ("sub.Tensor", "_, _, alpha=2", f"{FUNCTIONS}.sub"),
        ("linear.default", "_, _, _", "torch._C._nn.linear"),
        ("view.default", "_, [2, 3]", "torch._C.TensorBase.view"),
        ("mean.dim", "_, [1], True", f"{FUNCTIONS}.mean"),
        ("cross_entropy_loss.default", "_, _", None),  # the binding's default is another reduction
        ("cross_entropy_loss.default", "_, _, None, 1, -100", "torch._C._nn.cross_entropy_loss"),
        ("conv2d.default", "_, _, None, [1, 1], [0, 0], [1, 1], 1", f"{FUNCTIONS}.conv2d"),
        ("stft.default", "_, 8", None),  # the binding's first choice is the overload that centers
        ("softmax.int", "_, 1", f"{FUNCTIONS}.softmax"),
        ("slice.Tensor", "_, 1, 0, 4", None),  # has no binding
        ("full.default", "[2], 1", None),  # a mode may change it
        ("full.default", "[2], 1, pin_memory=False", None),
        ("index.Tensor", "_, [None, _]", None),
    ],
)
def test_a_binding_is_taken_if_it_reaches_the_same_overload(
    target: str, form: str, binding: str | None
) -> None:
    assert _binding(f"torch.ops.aten.{target}", form) == binding


def test_numbers_that_a_module_holds_are_left_to_the_operator() -> None:
    graph = fx.Graph()
    root = nn.Module()
    root.rate = 2.0  # type: ignore[assignment]
    given, rate = graph.placeholder("x"), graph.get_attr("rate")
    graph.output(graph.call_function(ATEN.mul.Tensor, (given, rate)))
    call_bindings(graph)
    program = fx.GraphModule(root, graph)
    assert "torch.ops.aten.mul.Tensor(x, rate)" in program.code


def test_the_graph_keeps_its_operators_and_its_lines() -> None:
    program, tensors = module(ATEN.add.Tensor, (x(2), x(2)))
    lines = program.code.count("\n")
    call_bindings(program.graph)
    program.recompile()
    assert f"{FUNCTIONS}.add(x1, x2)" in program.code and program.code.count("\n") == lines
    assert [node.target for node in program.graph.nodes if node.op == "call_function"] == [ATEN.add.Tensor]
    assert torch.equal(program(*tensors), sum(tensors))  # type: ignore[arg-type]


class _Seen(TorchDispatchMode):
    """Notes every operator below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators.append(func)
        return func(*args, **(kwargs or {}))


def test_own_operators_are_called_past_the_dispatcher_but_modes_and_profilers_see_them() -> None:
    graph = fx.Graph()
    operator = torch.ops.autopar.s_to_p.default
    graph.output(graph.call_function(operator, (graph.placeholder("x"), "a@2", 0, 1, [2, 1])))
    call_bindings(graph)
    program = fx.GraphModule(nn.Module(), graph)
    assert "torch.ops.autopar.s_to_p.default.eager(x, 'a@2'" in program.code
    given = torch.ones(2, requires_grad=True)
    (gradient,) = torch.autograd.grad(program(given), given, torch.tensor([1.0, 2.0, 3.0]))
    assert gradient.tolist() == [1.0, 2.0]
    with _Seen() as seen:
        program(given)
    assert operator in seen.operators
    with torch.profiler.profile() as profile:
        program(given)
    assert "autopar::s_to_p" in {event.name for event in profile.events()}
