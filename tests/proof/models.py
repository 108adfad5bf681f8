"""Random small models, drawn straight as graphs: tracing would cost more than everything else.

A model is a chain with branches of operators of every family, on awkward sizes, with tensors that
one operator takes twice, tensors with several consumers, tied and frozen weights, and a loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from torch import Tensor

from autopar.core.graph import (
    Graph,
    GraphInput,
    InputKind,
    Operator,
    Ref,
    TensorSpec,
    eager_target,
    map_refs,
    memory_order,
)
from autopar.core.operator_facts import facts_of
from autopar.trace.forms.simplify import only_loss

aten = torch.ops.aten
LARGEST = 600  # elements of a tensor
ROUNDING = 1e-15  # relative: some roundings of float64
IGNORED = -100  # cross-entropy's default label that counts for nothing


@dataclass(frozen=True)
class Model:
    """A graph and a full float64 (or integer) tensor for each of its inputs."""

    graph: Graph
    tensors: dict[str, Tensor]
    seed: int

    def __str__(self) -> str:
        lines = [f"{item.name}: {item.kind.value} {item.spec}" for item in self.graph.inputs]
        lines += [
            f"{', '.join(map(str, item.results))} = {item.target}{item.args}" for item in self.graph.operators
        ]
        return "\n".join([*lines, f"outputs {self.graph.outputs}", f"writes {self.graph.writes}"])


def serial(model: Model, *, noise: float = 0.0) -> dict[str, Tensor]:
    """Every tensor of the graph, computed by eager torch; the inputs are fresh leaves."""
    torch.manual_seed(model.seed)
    return evaluate(model.graph.operators, leaves(model), noise=noise)


def leaves(model: Model) -> dict[str, Tensor]:
    """The graph's inputs, fresh."""
    requires_grad = {item.name: item.spec.requires_grad for item in model.graph.inputs}
    return {
        name: item.detach().clone().requires_grad_(requires_grad[name])
        for name, item in model.tensors.items()
    }


def evaluate(
    operators: Sequence[Operator], inputs: Mapping[str, Tensor], *, noise: float = 0.0
) -> dict[str, Tensor]:
    """`inputs` and every tensor that eager torch makes of them; each differs relatively by about `noise`, as
    if by rounding."""
    values, generator = dict(inputs), torch.Generator().manual_seed(len(operators))
    for item in operators:
        args, kwargs = map_refs((item.args, item.kwargs), lambda ref: values[ref.name])
        results = eager_target(item)(*args, **kwargs)
        results = [results] if isinstance(results, Tensor) else results
        for name, value in zip(item.results, results, strict=True):
            if name and noise and value.is_floating_point():
                draws = torch.randn(value.shape, dtype=torch.float64, generator=generator)
                values[name] = value * (1 + noise * draws)
            elif name:
                values[name] = value
    return values


def draw_model(random: Random) -> Model:
    """A model of up to seven layers."""
    return _draw(random, LAYERS, random.randint(1, 6)).finish()


def draw_trained(random: Random) -> Model:
    """A model with the loss as its only output, with what is hard on pipeline stages: tied layers, masks
    and positions that are computed from the user's tensors, early results that the loss takes late."""
    model = _draw(random, STAGED, random.randint(3, 7)).finish(join=0.7)
    graph = only_loss(model.graph)
    inputs = tuple(
        replace(item, value=model.tensors[item.name]) if item.kind is InputKind.CONSTANT else item
        for item in graph.inputs
    )
    used = {item.name for item in inputs}
    tensors = {name: value for name, value in model.tensors.items() if name in used}
    return Model(replace(graph, inputs=inputs), tensors, model.seed)


def _draw(random: Random, choice: Sequence[tuple[Layer, tuple[int, ...]]], count: int) -> Draft:
    draft = Draft(random)
    start = random.choice((_image, _image, _sequence, _vector, _tokens))
    draft.live = [start(draft)]
    for _ in range(count):
        x = draft.live[-1] if random.random() < 0.75 else random.choice(draft.live)
        layers = [layer for layer, ranks in choice if len(draft.shape(x)) in ranks]
        made = random.choice(layers)(draft, x)
        if made is not None:
            draft.live.append(made)
    return draft


class Draft:
    """A graph being written: operators are run on meta tensors for the shapes that they give."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.inputs: list[GraphInput] = []
        self.operators: list[Operator] = []
        self.specs: dict[str, TensorSpec] = {}
        self.tensors: dict[str, Tensor] = {}
        self.meta: dict[str, Tensor] = {}
        self.writes: list[tuple[str, str]] = []
        self.live: list[str] = []
        self.seed = random.randint(0, 1 << 16)
        self.generator = torch.Generator().manual_seed(self.seed)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.specs[name].shape

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    # -- inputs -------------------------------------------------------------------------------------

    def input(self, kind: InputKind, value: Tensor, *, grad: bool = False, mutated: bool = False) -> str:
        name = f"{kind.value}_{len(self.inputs)}"
        spec = TensorSpec(tuple(value.shape), value.dtype, grad)
        self.inputs.append(GraphInput(name, kind, name, spec, mutated=mutated))
        self.specs[name], self.tensors[name] = spec, value
        self.meta[name] = torch.empty_like(value, device="meta", requires_grad=grad)
        return name

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=self.generator)

    def parameter(self, *shape: int) -> str:
        """A weight: now and then one that exists already (tied), or one that does not learn (frozen)."""
        known = [
            item.name
            for item in self.inputs
            if item.kind is InputKind.PARAMETER and item.spec.shape == shape and len(shape) > 1
        ]
        if known and self.chance(0.5):
            return self.random.choice(known)
        scale = max(1, torch.Size(shape[1:]).numel()) ** -0.5
        return self.input(InputKind.PARAMETER, self.normal(*shape) * scale, grad=not self.chance(0.1))

    def buffer(self, value: Tensor, *, mutated: bool = True) -> str:
        return self.input(InputKind.BUFFER, value, mutated=mutated)

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    # -- operators ----------------------------------------------------------------------------------

    def call(self, target: Any, *args: Any) -> str:
        (name,) = self.calls(target, *args)
        return name

    def calls(self, target: Any, *args: Any) -> tuple[str, ...]:
        """Append a call, tensors as `Ref`; names of its results."""

        results = target(*map_refs(args, lambda ref: self.meta[ref.name]))
        results = [results] if isinstance(results, Tensor) else list(results)
        number = len(self.operators)
        base = target._schema.name.split("::")[1]
        names = tuple(f"{base}_{number}" + (f"_{i}" if len(results) > 1 else "") for i in range(len(results)))
        for name, value in zip(names, results, strict=True):
            self.specs[name] = TensorSpec(tuple(value.shape), value.dtype, value.requires_grad)
            self.meta[name] = value
        order = self.order(args[0].name) if facts_of(target).order_matters else ()
        self.operators.append(Operator(f"call_{number}", target, args, {}, names, order=order))
        return names

    def order(self, name: str) -> tuple[int, ...]:
        """The memory order that eager torch gives the tensor; batch norm's differs on meta tensors."""
        inputs = {name: value.clone() for name, value in self.tensors.items()}
        return memory_order(evaluate(self.operators, inputs)[name])

    def finish(self, *, join: float = 0.0) -> Model:
        """Add a loss; what nobody uses joins it with probability `join`, or leaves the graph beside it."""
        loss = self.random.choice((_cross_entropy, _cross_entropy, _squares, _mean, _sum))(
            self, self.live[-1]
        )
        for name in self.unused(loss):
            if join and self.specs[name].requires_grad and self.chance(join):
                square = self.call(aten.mul.Tensor, Ref(name), Ref(name))
                loss = self.call(aten.add.Tensor, Ref(loss), Ref(self.call(aten.mean.default, Ref(square))))
        others = self.unused(loss)
        graph = Graph(
            tuple(self.inputs),
            tuple(self.operators),
            (loss, *others),
            self.specs,
            tuple(self.writes),
            loss=loss,
        )
        return Model(graph, self.tensors, self.seed)

    def unused(self, loss: str) -> tuple[str, ...]:
        """Results beside the loss that no operator and no buffer takes."""
        used = {name for item in self.operators for name in item.operands} | {loss}
        used |= {value for _, value in self.writes}
        results = (name for item in self.operators for name in item.results if name)
        return tuple(name for name in results if name not in used)


class Script(Draft):
    """Writes a graph call by call, nothing at random but the numbers."""

    def __init__(self) -> None:
        super().__init__(Random(0))

    def user(self, *shape: int, grad: bool = False) -> str:
        return self.input(InputKind.USER, self.normal(*shape), grad=grad)

    def weight(self, *shape: int) -> str:
        return self.input(InputKind.PARAMETER, self.normal(*shape), grad=True)

    def linear(self, x: str, out: int) -> str:
        return self.call(aten.linear.default, Ref(x), Ref(self.weight(out, self.shape(x)[-1])))

    def graph(self, loss: str, *others: str) -> Graph:
        return Graph(tuple(self.inputs), tuple(self.operators), (loss, *others), self.specs, loss=loss)

    def model(self, x: str) -> Model:
        """With the weighted sum of x as the loss."""
        loss = self.call(
            aten.sum.default, Ref(self.call(aten.mul.Tensor, Ref(x), Ref(self.weight(*self.shape(x)))))
        )
        return Model(self.graph(loss), self.tensors, self.seed)


# -- where models start -----------------------------------------------------------------------------------


def _image(draft: Draft) -> str:
    size = draft.random.randint
    return _user(draft, size(1, 5), size(1, 6), size(3, 9), size(3, 9))


def _sequence(draft: Draft) -> str:
    size = draft.random.randint
    return _user(draft, size(1, 4), size(2, 8), size(2, 9))


def _vector(draft: Draft) -> str:
    size = draft.random.randint
    return _user(draft, size(1, 9), size(2, 12))


def _tokens(draft: Draft) -> str:
    size = draft.random.randint
    words, width = size(2, 11), size(2, 8)
    indices = draft.input(InputKind.USER, draft.integers(words, size(1, 4), size(2, 7)))
    return draft.call(aten.embedding.default, Ref(draft.parameter(words, width)), Ref(indices))


def _user(draft: Draft, *shape: int) -> str:
    return draft.input(InputKind.USER, draft.normal(*shape), grad=draft.chance(0.5))


# -- layers: each takes a live tensor and gives a new one, or None if it doesn't fit ----------------------


def _linear(draft: Draft, x: str) -> str:
    width, out = draft.shape(x)[-1], draft.random.randint(1, 9)
    operands = [x, draft.parameter(out, width)]
    if draft.chance(0.7):
        operands.append(draft.parameter(out))
    return draft.call(aten.linear.default, *map(Ref, operands))


def _addmm(draft: Draft, x: str) -> str:
    out = draft.random.randint(1, 9)
    bias = draft.parameter(*draft.random.choice(((out,), (1, out), (draft.shape(x)[0], 1))))
    weight = draft.parameter(draft.shape(x)[1], out)
    return draft.call(aten.addmm.default, Ref(bias), Ref(x), Ref(weight))


def _divisor(draft: Draft, number: int) -> int:
    return draft.random.choice([item for item in range(1, number + 1) if number % item == 0])


def _pair(draft: Draft, low: int, high: int) -> list[int]:
    return [draft.random.randint(low, high), draft.random.randint(low, high)]


def _fits(draft: Draft, sizes: Sequence[int]) -> bool:
    return min(sizes) >= 1 and torch.Size(sizes).numel() <= LARGEST


def _convolution(draft: Draft, x: str) -> str | None:
    batch, channels, *space = draft.shape(x)
    groups = _divisor(draft, channels) if draft.chance(0.4) else 1
    kernel, stride = _pair(draft, 1, 4), _pair(draft, 1, 3)
    padding, dilation = _pair(draft, 0, 2), _pair(draft, 1, 2)
    if draft.chance(0.5):  # as in most models: as many rows out as in
        kernel, stride, padding = [3, 3], [1, 1], list(dilation)
    out = groups * draft.random.randint(1, 4)
    reach = [s + 2 * p - d * (k - 1) for s, p, d, k in zip(space, padding, dilation, kernel, strict=True)]
    if min(reach) < 1 or not _fits(draft, (batch, out, *reach)):
        return None
    weight = draft.parameter(out, channels // groups, *kernel)
    bias = Ref(draft.parameter(out)) if draft.chance(0.5) else None
    return draft.call(aten.conv2d.default, Ref(x), Ref(weight), bias, stride, padding, dilation, groups)


def _transposed(draft: Draft, x: str) -> str | None:
    batch, channels, *space = draft.shape(x)
    groups = _divisor(draft, channels) if draft.chance(0.3) else 1
    kernel, stride, padding = _pair(draft, 1, 4), _pair(draft, 1, 3), _pair(draft, 0, 1)
    extra = [draft.random.randint(0, s - 1) for s in stride]
    out = groups * draft.random.randint(1, 3)
    sizes = [
        (n - 1) * s - 2 * p + k + e
        for n, s, p, k, e in zip(space, stride, padding, kernel, extra, strict=True)
    ]
    if not _fits(draft, (batch, out, *sizes)):
        return None
    weight = draft.parameter(channels, out // groups, *kernel)
    bias = Ref(draft.parameter(out)) if draft.chance(0.5) else None
    target = aten.conv_transpose2d.input
    return draft.call(target, Ref(x), Ref(weight), bias, stride, padding, extra, groups, [1, 1])


def _pooling(draft: Draft, x: str) -> str | None:
    kernel, stride = _pair(draft, 1, 3), _pair(draft, 1, 3)
    padding = [draft.random.randint(0, k // 2) for k in kernel]
    if any(size + 2 * p < k for size, p, k in zip(draft.shape(x)[2:], padding, kernel, strict=True)):
        return None
    ceil = draft.chance(0.3)
    if draft.chance(0.5):
        return draft.call(
            aten.max_pool2d.default, Ref(_nudged(draft, x)), kernel, stride, padding, [1, 1], ceil
        )
    include, divisor = draft.chance(0.5), 5 if draft.chance(0.2) else None
    return draft.call(aten.avg_pool2d.default, Ref(x), kernel, stride, padding, ceil, include, divisor)


def _adaptive(draft: Draft, x: str) -> str:
    size = [1, 1] if draft.chance(0.5) else [draft.random.randint(1, n) for n in draft.shape(x)[2:]]
    return draft.call(aten.adaptive_avg_pool2d.default, Ref(x), size)


def _upsample(draft: Draft, x: str) -> str | None:
    if not _fits(draft, [size * 2 for size in draft.shape(x)[1:]]):
        return None
    return draft.call(aten.upsample_nearest2d.vec, Ref(x), None, [2.0, float(draft.random.randint(1, 3))])


def _batch_norm(draft: Draft, x: str) -> str | None:
    batch, channels, *space = draft.shape(x)
    if batch < 2 or 1 in space:  # torch's own gradient is wrong where such an image comes permuted
        return None
    training = draft.chance(0.8)
    affine = [Ref(draft.parameter(channels)) for _ in "wb"] if draft.chance(0.7) else [None, None]
    moments = [draft.normal(channels) * 0.1, draft.normal(channels).abs() + 0.5]
    running = [Ref(draft.buffer(item, mutated=training)) for item in moments]
    if training and draft.chance(0.5):
        count = draft.buffer(torch.tensor(draft.random.randint(0, 9)), mutated=False)
        draft.writes.append((count, draft.call(aten.add.Tensor, Ref(count), 1)))
    return draft.call(aten.batch_norm.default, Ref(x), *affine, *running, training, 0.1, 1e-5, False)


def _group_norm(draft: Draft, x: str) -> str | None:
    _, channels, *rest = draft.shape(x)
    groups = _divisor(draft, channels)
    if channels // groups * math.prod(rest) == 1:  # nothing is left, and gradients are rounding alone
        return None
    affine = [Ref(draft.parameter(channels)) for _ in "wb"] if draft.chance(0.7) else [None, None]
    return draft.call(aten.group_norm.default, Ref(x), groups, *affine)


def _layer_norm(draft: Draft, x: str) -> str | None:
    shape = draft.shape(x)
    normal = shape[-draft.random.randint(1, len(shape) - 1) :]
    if math.prod(normal) == 1:
        return None
    affine = [Ref(draft.parameter(*normal)) for _ in "wb"] if draft.chance(0.7) else [None, None]
    return draft.call(aten.layer_norm.default, Ref(x), list(normal), *affine)


def _softmax(draft: Draft, x: str) -> str:
    target = draft.random.choice((aten.softmax.int, aten.log_softmax.int))
    return draft.call(target, Ref(x), draft.random.randrange(len(draft.shape(x))))


def _smooth(draft: Draft, x: str) -> str:
    names = ("gelu", "tanh", "silu", "sigmoid", "neg")
    return draft.call(getattr(aten, draft.random.choice(names)).default, Ref(x))


def _nudged(draft: Draft, x: str) -> str:
    """x plus noise that learns: no two elements tie, none is at a kink, whatever made x."""
    return draft.call(aten.add.Tensor, Ref(x), Ref(draft.parameter(*draft.shape(x))))


def _relu(draft: Draft, x: str) -> str:
    return draft.call(aten.relu.default, Ref(_nudged(draft, x)))


def _dropout(draft: Draft, x: str) -> str:
    return draft.call(aten.dropout.default, Ref(x), 0.4, draft.chance(0.9))


def _scale(draft: Draft, x: str) -> str:
    return draft.call(aten.mul.Tensor, Ref(x), 0.7)


def _arithmetic(draft: Draft) -> Any:
    return draft.random.choice((aten.add.Tensor, aten.mul.Tensor))


def _twice(draft: Draft, x: str) -> str:
    return draft.call(_arithmetic(draft), Ref(x), Ref(x))


def _residual(draft: Draft, x: str) -> str | None:
    same = [name for name in draft.live if draft.shape(name) == draft.shape(x) and name != x]
    if not same:
        return None
    return draft.call(_arithmetic(draft), Ref(x), Ref(draft.random.choice(same)))


def _broadcast(draft: Draft, x: str) -> str:
    """With a weight that lacks some dims of x, or has 1 there."""
    shape = [size if draft.chance(0.6) else 1 for size in draft.shape(x)]
    drop = draft.random.randrange(len(shape))
    return draft.call(_arithmetic(draft), Ref(x), Ref(draft.parameter(*shape[drop:])))


def _masked(draft: Draft, x: str) -> str:
    mask = draft.input(InputKind.CONSTANT, draft.normal(draft.shape(x)[-1]) > 0)
    return draft.call(aten.masked_fill.Scalar, Ref(x), Ref(mask), draft.random.choice((0, 2.0)))


def _cat(draft: Draft, x: str) -> str | None:
    dim, shape = draft.random.randrange(len(draft.shape(x))), draft.shape(x)
    others = [
        name
        for name in draft.live
        if len(draft.shape(name)) == len(shape)
        and all(a == b for at, (a, b) in enumerate(zip(draft.shape(name), shape, strict=True)) if at != dim)
    ]
    operands = [x, draft.random.choice(others)]
    if sum(torch.Size(draft.shape(name)).numel() for name in operands) > LARGEST:
        return None
    return draft.call(aten.cat.default, [Ref(name) for name in operands], dim)


def _stack(draft: Draft, x: str) -> str | None:
    shape = draft.shape(x)
    if len(shape) > 3 or 2 * torch.Size(shape).numel() > LARGEST:
        return None
    same = [name for name in draft.live if draft.shape(name) == shape]
    dim = draft.random.randint(0, len(shape))
    return draft.call(aten.stack.default, [Ref(x), Ref(draft.random.choice(same))], dim)


def _split(draft: Draft, x: str) -> str | None:
    dim = draft.random.randrange(len(draft.shape(x)))
    size = draft.shape(x)[dim]
    if size < 2:
        return None
    if draft.chance(0.5):
        parts = draft.calls(aten.chunk.default, Ref(x), draft.random.choice((2, 3)), dim)
    else:
        parts = draft.calls(aten.split.Tensor, Ref(x), _divisor(draft, size), dim)
    if len(parts) > 4:
        return parts[0]
    draft.live += parts[:-1]
    return parts[-1]


def _slice(draft: Draft, x: str) -> str | None:
    dim = draft.random.randrange(len(draft.shape(x)))
    size = draft.shape(x)[dim]
    if size < 3:
        return None
    start = draft.random.randint(0, size - 2)
    stop = draft.random.randint(start + 1, size)
    return draft.call(aten.slice.Tensor, Ref(x), dim, start, stop, draft.random.choice((1, 1, 2)))


def _select(draft: Draft, x: str) -> str:
    dim = draft.random.randrange(len(draft.shape(x)))
    return draft.call(aten.select.int, Ref(x), dim, draft.random.randrange(draft.shape(x)[dim]))


def _pad(draft: Draft, x: str) -> str | None:
    dims = draft.random.randint(1, 2)
    if not _fits(draft, [size + 2 for size in draft.shape(x)]):
        return None
    amounts = [draft.random.randint(0, 2) for _ in range(2 * dims)]
    return draft.call(aten.constant_pad_nd.default, Ref(x), amounts, draft.random.choice((0.0, 1.5)))


def _merge(draft: Draft, x: str) -> str:
    shape = draft.shape(x)
    at = draft.random.randrange(len(shape) - 1)
    merged = [*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]]
    return draft.call(aten.reshape.default, Ref(x), merged)


def _open(draft: Draft, x: str) -> str:
    shape = draft.shape(x)
    at = draft.random.randrange(len(shape))
    first = _divisor(draft, shape[at])
    return draft.call(
        aten.reshape.default, Ref(x), [*shape[:at], first, shape[at] // first, *shape[at + 1 :]]
    )


def _transpose(draft: Draft, x: str) -> str:
    order = list(range(len(draft.shape(x))))
    draft.random.shuffle(order)
    return draft.call(aten.permute.default, Ref(x), order)


def _reduce(draft: Draft, x: str) -> str:
    target = draft.random.choice((aten.mean.dim, aten.sum.dim_IntList))
    return draft.call(target, Ref(x), [draft.random.randrange(len(draft.shape(x)))], draft.chance(0.5))


def _scores(draft: Draft, x: str) -> str:
    """x xᵀ over the last dim: one tensor on both sides of a product."""
    other = draft.call(aten.transpose.int, Ref(x), -2, -1)
    return draft.call(aten.matmul.default, Ref(x), Ref(other))


def _product(draft: Draft, x: str) -> str | None:
    fitting = [
        name
        for name in draft.live
        if len(draft.shape(name)) == 2 and draft.shape(name)[0] == draft.shape(x)[-1]
    ]
    if not fitting:
        return None
    return draft.call(aten.matmul.default, Ref(x), Ref(draft.random.choice(fitting)))


def _attention(draft: Draft, x: str) -> str:
    """Self-attention with a fused projection."""
    batch, length, width = draft.shape(x)
    heads, size = draft.random.randint(1, 4), draft.random.randint(1, 3)
    fused = draft.call(aten.linear.default, Ref(x), Ref(draft.parameter(3 * heads * size, width)))
    parts = draft.calls(aten.split.Tensor, Ref(fused), heads * size, 2)
    q, k, v = (
        Ref(draft.call(aten.transpose.int, Ref(draft.call(aten.view.default, Ref(part), shape)), 1, 2))
        for part, shape in ((part, [batch, length, heads, size]) for part in parts)
    )
    dropout = 0.3 if draft.chance(0.3) else 0.0
    target = aten.scaled_dot_product_attention.default
    mixed = draft.call(target, q, k, v, None, dropout, draft.chance(0.5))
    back = draft.call(aten.transpose.int, Ref(mixed), 1, 2)
    joined = draft.call(aten.reshape.default, Ref(back), [batch, length, heads * size])
    return draft.call(aten.linear.default, Ref(joined), Ref(draft.parameter(width, heads * size)))


def _tied(draft: Draft, x: str) -> str:
    """Two layers with one matrix, which a cut between them leaves on two stages."""
    width = draft.shape(x)[-1]
    weight = Ref(draft.parameter(width, width))
    draft.live.append(_smooth(draft, draft.call(aten.linear.default, Ref(x), weight)))
    return draft.call(aten.linear.default, Ref(draft.live[-1]), weight)


def _user_mask(draft: Draft, x: str) -> str:
    """x masked by a user's tensor of its shape, else scaled by the share of what is positive there."""
    user = draft.random.choice([item.name for item in draft.inputs if item.kind is InputKind.USER])
    positive = draft.call(aten.gt.Scalar, Ref(user), 0)
    if draft.shape(user) == draft.shape(x):
        return draft.call(aten.masked_fill.Scalar, Ref(x), Ref(positive), 0.5)
    share = draft.call(aten.mean.default, Ref(draft.call(aten.to.dtype, Ref(positive), torch.float64)))
    return draft.call(aten.mul.Tensor, Ref(x), Ref(draft.call(aten.add.Tensor, Ref(share), 1.0)))


def _positions(draft: Draft, x: str) -> str | None:
    """x plus embedded positions, counted along the user's tokens."""
    tokens = [
        item.name
        for item in draft.inputs
        if item.kind is InputKind.USER
        and item.spec.shape == draft.shape(x)[:2]
        and not item.spec.dtype.is_floating_point
    ]
    if not tokens:
        return None
    counted = draft.call(aten.ne.Scalar, Ref(tokens[0]), 0)
    place = draft.call(aten.cumsum.default, Ref(counted), 1)
    table = draft.parameter(draft.shape(x)[1] + 1, draft.shape(x)[2])
    embedded = draft.call(aten.embedding.default, Ref(table), Ref(place))
    return draft.call(aten.add.Tensor, Ref(x), Ref(embedded))


_ANY, _SPACE, _MATRIX = (1, 2, 3, 4), (4,), (2, 3, 4)
Layer = Callable[[Draft, str], str | None]
LAYERS: tuple[tuple[Layer, tuple[int, ...]], ...] = (
    *((_convolution, _SPACE),) * 4,
    *((_transposed, _SPACE),) * 2,
    *((_pooling, _SPACE),) * 3,
    *((_batch_norm, (2, 4)),) * 2,
    *((_linear, _MATRIX),) * 3,
    *((_attention, (3,)),) * 4,
    *((_residual, _ANY),) * 2,
    (_adaptive, _SPACE),
    (_upsample, _SPACE),
    (_group_norm, (3, 4)),
    (_layer_norm, _MATRIX),
    (_addmm, (2,)),
    (_softmax, _MATRIX),
    (_smooth, _ANY),
    (_relu, _ANY),
    (_dropout, _ANY),
    (_scale, _ANY),
    (_twice, _ANY),
    (_broadcast, _ANY),
    (_masked, _ANY),
    (_cat, _ANY),
    (_stack, _ANY),
    (_split, _MATRIX),
    (_slice, _MATRIX),
    (_select, (3, 4)),
    (_pad, _MATRIX),
    (_merge, _MATRIX),
    (_open, (1, 2, 3)),
    (_transpose, _MATRIX),
    (_reduce, _MATRIX),
    (_scores, (2, 3)),
    (_product, (2, 3)),
)
STAGED = (
    *LAYERS,
    *((_tied, _MATRIX),) * 6,
    *((_user_mask, _ANY),) * 6,
    *((_positions, (3,)),) * 6,
    *((_dropout, _ANY),) * 4,
    *((_batch_norm, (2, 4)),) * 4,
)


# -- losses -----------------------------------------------------------------------------------------------


def _cross_entropy(draft: Draft, x: str) -> str:
    shape = draft.shape(x)
    if len(shape) < 2 or shape[1] < 2:
        return _squares(draft, x)
    labels = draft.integers(shape[1], shape[0], *shape[2:])
    if draft.chance(0.6):  # uneven numbers of labels that count, but never none
        ignored = draft.integers(2, *labels.shape).bool()
        ignored.view(-1)[0] = False
        labels = labels.masked_fill(ignored, IGNORED)
    target = draft.input(InputKind.USER, labels)
    reduction = draft.random.choice((1, 1, 2))  # at::Reduction: mean, sum
    return draft.call(aten.cross_entropy_loss.default, Ref(x), Ref(target), None, reduction, IGNORED)


def _squares(draft: Draft, x: str) -> str:
    target = draft.input(InputKind.USER, draft.normal(*draft.shape(x)))
    return draft.call(aten.mse_loss.default, Ref(x), Ref(target), draft.random.choice((1, 2)))


def _weighted(draft: Draft, x: str) -> Ref:
    """x times a weight for each element: the plain mean of what is normalised is always 0."""
    return Ref(draft.call(aten.mul.Tensor, Ref(x), Ref(draft.parameter(*draft.shape(x)))))


def _mean(draft: Draft, x: str) -> str:
    return draft.call(aten.mean.default, _weighted(draft, x))


def _sum(draft: Draft, x: str) -> str:
    return draft.call(aten.sum.default, _weighted(draft, x))
