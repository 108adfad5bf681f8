"""The graphs of a batch's micro-batches, made so that together they compute what the batch does.

    whole batch ── trace ── graph ── how its samples flow ── where to cut, what parts count
                                                                  │
    first micro-batch ── trace ── graph ── numbers of the batch, sums without their counts ── the program's

A trace writes down as numbers what Python knows of the batch: `loss.sum() / len(x)` divides by 3 in a part
of 12 samples. Where parts add up to the batch such numbers are the whole batch's in every part. And a mean
over what the inputs count to (labels that are kept, weights of classes, a mask) becomes a sum, which the
batch's count divides, known before the first part: so a part in which nothing counts adds 0, not 0/0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from autopar.core.cutting import Count, Cutting, Rows
from autopar.core.graph import Graph, InputKind, Operator, Ref, TensorSpec, refs
from autopar.core.mesh import Mesh
from autopar.core.operator_facts import facts_of
from autopar.errors import AutoparError, InputError, TraceError
from autopar.sharding.made_constants import made_constants
from autopar.sharding.sample_dims import find_batch, said_batch
from autopar.sharding.sample_independence import SUM_REDUCTION, SampleFlow, ancestors
from autopar.sharding.sample_values import Role, Scale
from autopar.sharding.strategies import dims_of
from autopar.torch_seams.schemas import schema_of
from autopar.trace.call.call_signature import Arguments, flatten_arguments
from autopar.trace.export import Traced
from autopar.trace.forms.call_forms import arguments_of
from autopar.trace.forms.simplify import is_identity, only_loss, without_dead_code
from autopar.trace.micro_batches import split_batch

aten = torch.ops.aten

Said = Mapping[str | int, int | None]  # dims that hold the samples, by path or number of a tensor
_NUMBERS = ("Tensor", "number", "Optional[number]", "float", "Optional[float]")  # that are no sizes
MOST_GUESSES = 4  # of dims that may hold samples, before a refusal leaves out that they can be said
WEIGHED = (
    "each micro-batch counts in the loss by its share of what the whole batch's inputs count to (labels that "
    "are kept, class weights, masks)"
)


@dataclass(frozen=True, slots=True)
class CallTraces:
    """Traces of a call and of its parts, each made once by `trace`, whatever form of losses is looked at."""

    trace: Callable[[tuple[Any, ...], dict[str, Any]], Traced]
    known: dict[object, Traced] = field(default_factory=dict)  # by the way the batch is cut, and the part
    in_pieces: bool = False

    def form(self, *, in_pieces: bool) -> CallTraces:
        """Copy these traces, with losses in pieces or without; what is known is shared."""
        return replace(self, in_pieces=in_pieces)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], part: object = None) -> Traced:
        """The trace of a call, which is kept if it is of a `part`."""
        traced = self.known.get(part) or self.trace(args, kwargs)
        if part is not None:
            self.known[part] = traced
        return traced.with_pieces() if self.in_pieces else traced


@dataclass(frozen=True, slots=True)
class Parts:
    """The micro-batches of one call, by the graph of the whole batch; `traces` make the graph of a call."""

    traces: CallTraces
    call: Arguments
    whole: Graph
    flow: SampleFlow | None
    obstacle: str | None
    rows: tuple[Rows | None, ...] = ()
    size: int = 1

    @property
    def is_exact(self) -> bool:
        """Whether cutting the batch changes no number, as far as the graph of the whole batch tells."""
        return self.flow is not None and self.obstacle is None and self.whole.decided_by is None

    def cutting(self) -> Cutting:
        """The way to cut the call; raises InputError where the dims of its samples aren't known."""
        if self.whole.decided_by is not None:
            raise InputError(
                where=self.whole.decided_by,
                found="values of the batch that decide what is computed, and micro-batches of it",
                wanted="one decision for the batch",
                remedy="choose 1 micro-batch, or decide before the call and pass a flag",
            )
        if self.flow is None:
            raise untold(self.obstacle, self.call, told=self.can_be_said())
        loss, depth = self.flow.loss, self.flow.depth
        count = count_of(self.whole, self.call, loss.scale) if depth < 2 and loss.scale else None
        return Cutting(
            self.rows,
            self.size,
            by_share=depth >= 2 or loss.role is Role.MEAN,
            count=count,
            change=self.obstacle,
            by_statistics=depth == 1,
        )

    @property
    def seems_one_sample(self) -> bool:
        """Whether the first dim of every tensor of the call has one element."""
        shapes = [tuple(tensor.shape) for tensor in self.call.tensors if tensor.dim()]
        return bool(shapes) and all(shape[0] == 1 for shape in shapes)

    def can_be_said(self) -> bool:
        """Whether some choice of the samples' dims gives parts that compute what the batch does. Parts of one
        graph of vertices don't."""
        args, kwargs = self.call.rebuild(self.call.tensors)
        for said in islice(guesses(self.call), MOST_GUESSES):
            try:
                parts_of(self.traces, args, kwargs, said, whole=self.whole).traced(2)
            except AutoparError:
                continue
            return True
        return False

    def as_one(self) -> Graph:
        """The graph of the whole batch as its only part."""
        cutting = self.cutting()
        assert self.flow is not None
        scale = self.flow.loss.scale if cutting.count is not None else None
        return without_count(self.whole, scale) if scale is not None else self.whole

    def traced(self, count: int, place: int = 0) -> Traced:
        """The graph of the first of `count` micro-batches, or of that at another `place`."""
        cutting = self.cutting()
        micro = split_batch(cutting, self.call.tensors, count, weigh=False)[place]
        try:
            args, kwargs = self.call.rebuild(micro.tensors)
            traced = self.traces(args, kwargs, (self.rows, self.size, count, place)).loss_alone()
        except TraceError as error:
            error.add_remedy(f"choose fewer than {count} micro-batches, if the whole batch can be traced")
            raise
        plain = traced.graph
        assert self.flow is not None
        graph, difference = alike(plain, self.whole, self.flow)
        own, scale = None, self.flow.loss.scale if cutting.count is not None else None
        if difference is not None:
            cutting = replace(cutting, change=difference, by_statistics=False)
            scale = _matched(scale, plain, self.whole) if scale is not None else None
            if scale is None and not (cutting.by_share and cutting.count is None):
                raise _unlike(difference, count)
        if scale is not None:
            own = count_of(plain, traced.arguments, scale)
            graph = without_count(graph, scale)
        by_numbers = graph.operators != plain.operators and own is None
        graph = replace(graph, notes=(*graph.notes, *_notes(cutting)))
        return replace(traced, graph=graph, cutting=cutting, own=own, by_numbers=by_numbers)


def _matched(scale: Scale, part: Graph, whole: Graph) -> Scale | None:
    """The scale of a part whose operators have other names than the whole batch's."""
    (target,) = (item.target for item in whole.operators if item.name == scale.operator)
    theirs = [item.name for item in whole.operators if item.target == target]
    ours = [item for item in part.operators if item.target == target]
    if len(ours) != len(theirs):
        return None
    mine = ours[theirs.index(scale.operator)]
    return replace(scale, operator=mine.name, count=mine.operands[1] if scale.count else None)


def _unlike(difference: str, count: int) -> InputError:
    return InputError(
        where="micro-batches",
        found=f"{count}, of which one is computed otherwise than the batch: {difference}",
        wanted="parts of the batch that are computed as it is",
        remedy="choose fewer micro-batches, or let the model not depend on the size of the batch",
    )


def _notes(cutting: Cutting) -> tuple[str, ...]:
    """Notes on the loss in a plan with micro-batches."""
    weighed = (WEIGHED,) if cutting.count is not None else ()
    match cutting.change, cutting.by_statistics:
        case None, _:
            return weighed
        case change, True:
            return (f"{change}, of every micro-batch by itself", *weighed)
        case change, _:
            how = "by their samples" if cutting.by_share else "as parts of a sum"
            return (f"{change}: micro-batches, which count in the loss {how}, may change it", *weighed)


def parts_of(
    traces: CallTraces,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    said: Said | None = None,
    *,
    whole: Graph | None = None,
) -> Parts:
    """The micro-batches of a call; `said` are the dims of its samples where the user tells them, and `whole`
    is the graph of the batch if it is known.

    Raises InputError for dims that the call doesn't have, and for a model without a loss.
    """
    call = flatten_arguments(args, kwargs)
    graph = traces(args, kwargs).loss_alone().graph if whole is None else only_loss(whole)
    dims = dims_of(graph, Mesh((1,)))
    if said is None:
        flow, obstacle = find_batch(graph, dims)
        rows = _rows(flow, call) if flow else ()
    else:
        named = _named(said, call)
        flow = said_batch(graph, dims, named)
        obstacle = flow.obstacle
        rows = _said_rows(flow, call, named)
    return Parts(traces, call, graph, flow, obstacle, rows, _size(call, rows))


def _rows(flow: SampleFlow, call: Arguments) -> tuple[Rows | None, ...]:
    """Where each tensor of the call has its samples, as they flow."""
    names = {item.target: item.name for item in flow.graph.inputs if item.kind is InputKind.USER}
    return tuple(_rows_of(flow, names[path]) if path in names else None for path in call.paths)


def _rows_of(flow: SampleFlow, name: str) -> Rows | None:
    if flow.values[name].role is not Role.ROWS:
        return None
    (place,) = flow.places(name)
    atoms = flow.dims.atoms.of[name][place.dim]
    return Rows(place.dim, math.prod(atoms[: place.atom]), math.prod(atoms[place.atom + 1 :]))


def _said_rows(flow: SampleFlow, call: Arguments, said: Mapping[str, int | None]) -> tuple[Rows | None, ...]:
    """The rows of every input where the user says some; the others' are as they flow. All must be equally
    many."""
    size = _length(call, said)
    found = []
    for path, tensor, rows in zip(call.paths, call.tensors, _rows(flow, call), strict=True):
        dim = said.get(path)
        if path in said:
            rows = None if dim is None else Rows(dim % tensor.dim())
        elif rows is not None and tensor.shape[rows.dim] != size * rows.outer * rows.inner:
            rows = None
        found.append(rows)
    return tuple(found)


def _length(call: Arguments, said: Mapping[str, int | None]) -> int:
    lengths = {
        path: call.tensors[call.paths.index(path)].shape[dim] for path, dim in said.items() if dim is not None
    }
    if len(set(lengths.values())) != 1:
        raise InputError(
            where="batch_dims",
            found=", ".join(f"{path} with {size}" for path, size in lengths.items()) or "no dim of any input",
            wanted="dims with the batch's samples, equally many in all of them",
            remedy="name for each input the dim of its samples, or None if it has none",
        )
    return next(iter(lengths.values()))


def _named(said: Said, call: Arguments) -> dict[str, int | None]:
    """`said` by paths; raises InputError for what the call doesn't have."""
    numbered = dict(enumerate(call.paths))
    found: dict[str, int | None] = {}
    for key, dim in said.items():
        path = numbered.get(key, str(key)) if isinstance(key, int) else key
        known = path in call.paths
        rank = call.tensors[call.paths.index(path)].dim() if known else 0
        if not known or (dim is not None and not -rank <= dim < rank):
            raise InputError(
                where="batch_dims",
                found=f"dim {dim} of input {key}" + (f", which has {rank}" if known else ""),
                wanted=f"dims of {_shapes(call)}",
                remedy='write batch_dims={"' + call.paths[0] + '": 0}' if call.paths else "leave it out",
            )
        found[path] = None if dim is None else dim % rank
    return found


def _size(call: Arguments, rows: tuple[Rows | None, ...]) -> int:
    for tensor, each in zip(call.tensors, rows, strict=False):
        if each is not None:
            return tensor.shape[each.dim] // (each.outer * each.inner)
    return 1


def _shapes(call: Arguments) -> str:
    pairs = zip(call.paths, call.tensors, strict=True)
    return ", ".join(f"{path} {list(tensor.shape)}" for path, tensor in pairs)


def guesses(call: Arguments) -> Iterator[Said]:
    """Guesses of the dims that hold samples. The first tensor's dims whose length other tensors have as well
    are tried, with the first dim of that length in the others; a single tensor's first dim."""
    shapes = {path: tuple(tensor.shape) for path, tensor in zip(call.paths, call.tensors, strict=True)}
    first, *others = [shape for shape in shapes.values() if shape] or [()]
    shared = [size for size in first if any(size in shape for shape in others)]
    for size in dict.fromkeys(shared or first[:1]):
        yield {path: shape.index(size) if size in shape else None for path, shape in shapes.items()}


def untold(obstacle: str | None, call: Arguments, *, told: bool) -> InputError:
    """The error that a batch can't be cut; the user may be `told` to name the samples' dims."""
    pairs = zip(call.paths, call.tensors, strict=True)
    example = next((path for path, item in pairs if item.dim()), "x")
    say = f'say it by batch_dims={{"{example}": 0, ...}}, None for an input without, or ' if told else ""
    return InputError(
        where="micro-batches",
        found=f"no dim along which samples go apart to the loss: {obstacle}",
        wanted=f"one in {_shapes(call)}",
        remedy=f"{say}leave out --micro-batches",
    )


# -- a part's graph and the whole batch's ---------------------------------------------------------------


def alike(part: Graph, whole: Graph, flow: SampleFlow) -> tuple[Graph, str | None]:
    """The part's graph with the numbers of the whole batch's, and in what they differ beside the samples.

    A part of a loss that is no sum or mean counts by its share of the samples, with its own numbers.
    """
    theirs = {item.name: item for item in whole.operators}
    ours = {item.name for item in part.operators}
    for item in part.operators:
        if item.name not in theirs or theirs[item.name].target != item.target:
            return part, _differs(item, "is not computed for the whole batch")
    for item in whole.operators:
        if item.name not in ours and not is_identity(item):
            return part, _differs(item, "is computed for the whole batch alone")
    made = made_constants(part)
    for name, spec in part.specs.items():
        compared = name in whole.specs and not (name in made and name in flow.made)
        if compared and name not in flow.unfilled and not _fits(name, spec, flow):
            return part, f"{name} of shape {list(spec.shape)} is no part of {list(whole.specs[name].shape)}"
    other = next(_other_constants(part, made, flow), None)
    if other is not None:
        return part, f"{other} is another number for fewer samples"
    if flow.depth >= 2:
        return part, None
    operators = tuple(_with_numbers(item, theirs[item.name]) for item in part.operators)
    values = {item.name: item.value for item in whole.inputs if item.value is not None}
    inputs = tuple(
        replace(item, value=values[item.name])
        if item.value is not None and item.name in values and values[item.name].shape == item.value.shape
        else item
        for item in part.inputs
    )
    return replace(part, operators=operators, inputs=inputs), None


def _other_constants(part: Graph, made: Mapping[str, Tensor], flow: SampleFlow) -> Iterator[str]:
    """Tensors made of numbers that are no rows of those of the whole batch, where the loss needs them."""
    needed = ancestors(part, part.loss)
    for item in part.operators:
        for name in item.operands if item.name in needed and item.results[0] not in made else ():
            if name in made and name in flow.made:
                mine, theirs = made[name], flow.made[name]
                if not _is_part(mine, theirs):
                    yield name


def _is_part(mine: Tensor, theirs: Tensor) -> bool:
    """Whether a tensor is the first rows of another."""
    if mine.dim() != theirs.dim() or any(a > b for a, b in zip(mine.shape, theirs.shape, strict=True)):
        return False
    for dim, size in enumerate(mine.shape):
        theirs = theirs.narrow(dim, 0, size)
    return torch.equal(mine, theirs)


def _differs(item: Operator, how: str) -> str:
    return f"{item.module or item.name} ({item.target}) {how}"


def _fits(name: str, spec: TensorSpec, flow: SampleFlow) -> bool:
    """Whether a part's tensor is the whole one's but for the length of the samples' dims."""
    whole = flow.graph.specs[name].shape
    sampled = {place.dim for place in flow.places(name)}
    if name in flow.values and flow.values[name].role is Role.SORTED:
        sampled.add(0)
    if len(whole) != len(spec.shape):
        return False
    return all(
        mine == theirs or dim in sampled
        for dim, (mine, theirs) in enumerate(zip(spec.shape, whole, strict=True))
    )


def _with_numbers(part: Operator, whole: Operator) -> Operator:
    """The part's operator with the numbers that are no shapes as the whole batch has them."""
    if facts_of(part.target).by_sizes:
        return part
    types = {argument.name: str(argument.type) for argument in schema_of(part.target).arguments}
    args = tuple(
        theirs if _is_number(mine) and kind in _NUMBERS else mine
        for mine, theirs, kind in zip(part.args, whole.args, types.values(), strict=False)
    )
    kwargs = {
        name: whole.kwargs.get(name, mine) if _is_number(mine) and types[name] in _NUMBERS else mine
        for name, mine in part.kwargs.items()
    }
    return replace(part, args=args + part.args[len(args) :], kwargs=kwargs)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# -- counts ---------------------------------------------------------------------------------------------


def without_count(graph: Graph, scale: Scale) -> Graph:
    """The graph with a sum in the place of what the operator of `scale` divides or multiplies."""
    operators = tuple(
        _uncounted(item, graph, scale) if item.name == scale.operator else item for item in graph.operators
    )
    return without_dead_code(replace(graph, operators=operators))


def _uncounted(item: Operator, graph: Graph, scale: Scale) -> Operator:
    if scale.count is not None:
        (kept,) = (ref for ref in refs(item.args) if ref.name != scale.count)
        return replace(item, target=aten.div.Scalar, args=(kept, 1), kwargs={})
    names = [argument.name for argument in schema_of(item.target).arguments]
    place = names.index("reduction")
    if "reduction" in item.kwargs or place >= len(item.args):
        return replace(item, kwargs={**item.kwargs, "reduction": SUM_REDUCTION})
    return replace(item, args=(*item.args[:place], SUM_REDUCTION, *item.args[place + 1 :]))


def count_of(graph: Graph, call: Arguments, scale: Scale) -> Count:
    """The operators that count the inputs of `call` for `scale`, such as labels that a loss keeps."""
    operators = {item.name: item for item in graph.operators}
    added, result = ((), scale.count) if scale.count else _kept_labels(operators[scale.operator], graph)
    assert result is not None
    wanted = {result, *(name for item in added for name in item.operands)}
    needed = ancestors(graph, *wanted)
    own = tuple(item for item in graph.operators if item.name in needed)
    taken = wanted.union(*(item.operands for item in own))
    inputs = [item for item in graph.inputs if item.name in taken]
    return Count(
        operators=(*own, *added),
        inputs=tuple((i.name, call.paths.index(i.target)) for i in inputs if i.kind is InputKind.USER),
        buffers=tuple((i.name, i.target) for i in inputs if i.kind is InputKind.BUFFER),
        constants={i.name: i.value for i in inputs if i.value is not None},
        result=result,
        multiplies=scale.multiplies,
    )


def _kept_labels(item: Operator, graph: Graph) -> tuple[tuple[Operator, ...], str]:
    """Operators whose result a mean over labels divides by: weights of labels' classes, or 1 each, without
    ignored labels."""
    given = {argument.name: argument.default_value for argument in schema_of(item.target).arguments}
    given |= arguments_of(item)
    labels, weight = Ref(item.operands[1]), given.get("weight")
    made = [_call("kept", aten.ne.Scalar, labels, int(given["ignore_index"]))]
    if isinstance(weight, Ref):
        made.append(_call("classes", aten.mul.Tensor, labels, Ref("kept of labels")))
        made.append(_call("weights", aten.index.Tensor, weight, [Ref("classes of labels")]))
        made.append(_call("weighed", aten.mul.Tensor, Ref("weights of labels"), Ref("kept of labels")))
    made.append(_call("count", aten.sum.default, Ref(str(made[-1].results[0]))))
    return tuple(made), "count of labels"


def _call(name: str, target: Any, *args: Any) -> Operator:
    title = f"{name} of labels"
    return Operator(title, target, args, {}, (title,))
