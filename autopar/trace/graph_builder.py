"""Writes an exported graph down as single-assignment operators, in one walk."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind as ExportedKind
from torch.utils import _pytree as pytree

from autopar.core.graph import (
    Graph,
    GraphInput,
    InputKind,
    Operator,
    Place,
    Ref,
    TensorSpec,
    map_refs,
    may_learn,
    memory_order,
    refs,
)
from autopar.errors import TraceError, ValuesAskedError, cut_text
from autopar.trace.autocast import Autocast, Casting, UncastError, casted
from autopar.trace.call_signature import Arguments
from autopar.trace.checkpoint_regions import region_of
from autopar.trace.custom_operator import CUSTOM, call_at
from autopar.trace.shared_memory import Known
from autopar.trace.simplify import without_dead_code, without_identities
from autopar.trace.user_source import module_of, source_of

aten = torch.ops.aten

_DROPPED = ("_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range")
# Operators that write to an argument without saying so in their schema.
_HIDDEN_WRITES = {aten.batch_norm.default: (3, 4), aten.instance_norm.default: (3, 4)}
# Operators of whose results only the first are for use: the others are notes for the kernel's backward pass,
# and their shapes differ between devices.
USABLE_RESULTS = {aten.embedding_bag.default: 1, aten.embedding_bag.padding_idx: 1}
# Views through which a write can be told: what puts a tensor where the view looks.
_SCATTERS = {aten.slice.Tensor: aten.slice_scatter.default, aten.select.int: aten.select_scatter.default}
# Calls that take a tensor for its shape, dtype or device alone, and what does the same without it, so that it
# need be neither whole nor there; and how many of their first arguments go on.
_ALIKE: dict[Any, tuple[Any, int]] = {
    aten.new_zeros.default: (aten.zeros.default, 0),
    aten.new_ones.default: (aten.ones.default, 0),
    aten.new_full.default: (aten.full.default, 0),
    aten.new_empty.default: (aten.empty.memory_format, 0),
    aten.rand_like.default: (aten.rand.default, 0),
    aten.randn_like.default: (aten.randn.default, 0),
    aten.view_as.default: (aten.view.default, 1),
    aten.reshape_as.default: (aten.reshape.default, 1),
    aten.expand_as.default: (aten.expand.default, 1),
}
_CAST_ALIKE = (aten.type_as.default, aten.to.other)
# Calls that give their operand itself back where they have nothing to do.
_GIVE_BACK = {
    *(aten.contiguous.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other),
    *(aten.type_as.default, aten.dropout.default, aten.feature_dropout.default, aten.resolve_conj.default),
    *(aten.resolve_neg.default, aten.conj.default, aten.real.default),
}
_NO_GRADIENT = {
    *("detach", "detach_", "argmax", "argmin", "sign"),
    *("zeros_like", "ones_like", "full_like", "empty_like"),
}


_SPARSE_GRADIENTS = {aten.embedding.default, aten.embedding_bag.default, aten.embedding_bag.padding_idx}
_BEFORE = "compute it before the call and pass it"


class GraphBuilder:
    """Walks the exported graph once and writes down single-assignment operators."""

    def __init__(
        self,
        model: nn.Module,
        arguments: Arguments,
        exported: Any,
        *,
        known: Known,
        autocast: Autocast,
        traced_on: str,
        structure: Collection[int] = (),
    ) -> None:
        self.exported = exported
        self.arguments = arguments
        self.traced = [path for place, path in enumerate(arguments.paths) if place not in structure]
        self.known = known
        self.dtype = autocast.dtype  # what is cast to here, None where nothing is
        self.devices = {autocast.device, traced_on}  # whose autocast this is
        self.casting = Casting(autocast.device)
        self.casts: dict[tuple[str, torch.dtype, int], str] = {}  # tensor, dtype, checkpoint -> its cast
        self.retyped: set[str] = set()  # tensors whose dtype is another than the exported one
        self.inputs: dict[str, GraphInput] = {}
        self.specs: dict[str, TensorSpec] = {}
        self.operators: list[Operator] = []
        self.titles: set[str] = set()  # names of operators
        self.env: dict[fx.Node, Any] = {}
        self.root: dict[str, str] = {}  # tensor -> the tensor whose memory it shares
        self.views: dict[str, Operator] = {}  # slice of a tensor -> the operator that made it
        self.writes: dict[str, str] = {}
        self.notes: list[str] = []
        self.tied = _tied_names(model)
        self.parameters = dict(model.named_parameters(remove_duplicate=False))

    def build(self, *, loss_index: int | None, dropped: tuple[str, ...]) -> Graph:
        gm = self.exported.graph_module
        self.read_inputs(gm)
        outputs = self.read_nodes(gm, grad=True)
        names = tuple(value.name for value in outputs if isinstance(value, Ref))
        self.notes += [f"output {name} holds no plain tensors and is not returned" for name in dropped]
        graph = Graph(
            inputs=tuple(self.inputs.values()),
            operators=tuple(self.operators),
            outputs=names,
            specs=self.specs,
            writes=tuple(self.writes.items()),
            loss=None if loss_index is None else names[loss_index],
            notes=tuple(self.notes),
        )
        return without_dead_code(without_identities(graph))

    # -- inputs ---------------------------------------------------------------------------------

    def read_inputs(self, gm: fx.GraphModule) -> None:
        nodes = [node for node in gm.graph.nodes if node.op == "placeholder"]
        users = iter(self.traced)
        for node, spec in zip(nodes, self.exported.graph_signature.input_specs, strict=True):
            match spec.kind:
                case ExportedKind.PARAMETER | ExportedKind.BUFFER if spec.target.startswith("loss_fn."):
                    self.add_losss_own(node, spec.target)
                case ExportedKind.USER_INPUT:
                    self.add_input(node, InputKind.USER, next(users))
                case ExportedKind.PARAMETER:
                    self.add_input(node, InputKind.PARAMETER, spec.target.removeprefix("model."))
                case ExportedKind.BUFFER:
                    self.add_input(node, InputKind.BUFFER, spec.target.removeprefix("model."))
                case _:
                    self.add_input(node, InputKind.CONSTANT, spec.target)

    def add_losss_own(self, node: fx.Node, target: str) -> None:
        """What a loss holds is a constant, unless it is the model's, too."""
        name = self.known.name_of(self.exported.state_dict[target])
        owner = next((item.name for item in self.inputs.values() if item.target in self.tied_to(name)), None)
        if owner is None:
            self.add_input(node, InputKind.CONSTANT, target)
        else:
            self.env[node] = Ref(owner)

    def tied_to(self, target: str | None) -> tuple[str, ...]:
        """All names of a parameter or buffer."""
        return () if target is None else self.tied.get(target, (target,))

    def add_input(self, node: fx.Node, kind: InputKind, target: str) -> None:
        first, *others = self.tied_to(target)
        if kind is InputKind.PARAMETER and first != target:
            owner = next((item.name for item in self.inputs.values() if item.target == first), None)
            if owner is not None:
                self.env[node] = Ref(owner)
                return
        name = _input_name(kind, first if kind is InputKind.PARAMETER else target, taken=self.specs)
        frozen = kind is not InputKind.PARAMETER or not self.parameters[target].requires_grad
        value = node.meta["val"]
        user_grad = kind is InputKind.USER and bool(
            self.arguments.tensors[self.arguments.paths.index(target)].requires_grad
        )
        self.specs[name] = _spec(value, requires_grad=(not frozen) or user_grad)
        held = {**self.exported.state_dict, **self.exported.constants}
        constant = held[target].detach() if kind is InputKind.CONSTANT else None
        self.inputs[name] = GraphInput(
            name,
            kind,
            first if kind is InputKind.PARAMETER else target,
            self.specs[name],
            tuple(others),
            value=constant,
        )
        self.root[name] = name
        self.env[node] = Ref(name)

    # -- operators ------------------------------------------------------------------------------

    def read_nodes(self, gm: fx.GraphModule, *, grad: bool) -> list[Any]:
        for node in gm.graph.nodes:
            match node.op:
                case "placeholder":
                    pass
                case "get_attr":
                    self.env[node] = self.constant(gm, node)
                case "call_function":
                    self.read_call(gm, node, grad=grad)
                case "output":
                    return [self.value(item) for item in node.args[0]]
                case "call_module":
                    pass  # _guards_fn: the wrapper checks its inputs itself
        return []

    def value(self, item: Any) -> Any:
        return fx.node.map_arg(item, lambda node: self.env[node])

    def constant(self, gm: fx.GraphModule, node: fx.Node) -> Any:
        value = gm
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            return value
        name = _input_name(InputKind.CONSTANT, str(node.target), taken=self.specs)
        self.specs[name] = _spec(value)
        self.inputs[name] = GraphInput(
            name, InputKind.CONSTANT, str(node.target), self.specs[name], value=value.detach()
        )
        self.root[name] = name
        return Ref(name)

    def read_call(self, gm: fx.GraphModule, node: fx.Node, *, grad: bool) -> None:
        target = node.target
        if target is operator.getitem:
            self.env[node] = self.value(node.args[0])[node.args[1]]
        elif isinstance(target, torch._ops.HigherOrderOperator):
            self.inline(gm, node, grad=grad)
        elif not isinstance(target, torch._ops.OpOverload):
            raise self.refuse(node, f"a call of {target}", "operators of torch on tensors", _BEFORE)
        elif target._schema.name.split("::")[1] in _DROPPED:
            self.env[node] = None
        else:
            self.add_operator(node, target, grad=grad)

    def inline(self, gm: fx.GraphModule, node: fx.Node, *, grad: bool) -> None:
        """Regions under set_grad_enabled and autocast are inlined; what comes into one without gradients is
        detached."""
        name, dtype = str(node.target), self.dtype
        cast: Any
        if name == "wrap_with_set_grad_enabled":
            mode, body, *operands = node.args
            if mode and not grad:
                raise self.refuse(
                    node,
                    "gradients inside a region without them",
                    "one mode inside the other",
                    "end torch.no_grad() before torch.enable_grad() begins",
                )
            grad = bool(mode)
        elif name == "wrap_with_autocast":
            device, cast, enabled, _, body, *operands = node.args
            if device in self.devices:
                dtype = cast if enabled else None
        else:
            raise self.refuse(
                node,
                f"a region of kind {name}",
                "a forward without control flow",
                "choose by torch.where(condition, a, b)",
            )
        inner = self.env.get(body) if isinstance(body, fx.Node) else body
        assert isinstance(inner, fx.GraphModule)
        places = [item for item in inner.graph.nodes if item.op == "placeholder"]
        for place, operand in zip(places, operands, strict=True):
            value = self.value(operand)
            self.env[place] = value if grad else self.detached(node, value)
        around, self.dtype = self.dtype, dtype
        self.env[node] = self.read_nodes(inner, grad=grad)
        self.dtype = around

    def detached(self, node: fx.Node, value: Any) -> Any:
        """`value` without gradient, which a region runs on: its own operators are like any others."""
        if not isinstance(value, Ref) or not self.specs[value.name].requires_grad:
            return value
        spec = replace(self.specs[value.name], requires_grad=False)
        name = self.add(node, aten.detach.default, (value,), spec)
        self.root[name] = self.root[value.name]
        return Ref(name)

    def add_operator(self, node: fx.Node, target: Any, *, grad: bool) -> None:
        args, kwargs = self.value(node.args), self.value(node.kwargs)
        self.check_dense_gradient(node, target, args, kwargs)
        written = self.written(node, target, args, kwargs)
        if written is not None:
            mutable, target = target, self.functional(node, target)
            kwargs = {key: value for key, value in kwargs.items() if key not in ("inplace", "out")}
            kwargs |= _left_open(mutable, target, args, kwargs)
            if target is aten.copy.default:
                target, args, kwargs = self.copied(node, args[1], self.specs[written])
        if target is CUSTOM:
            args = (*args[:4], Place(args[4]))
        args, kwargs = _device_by_name(target, args, kwargs)
        values = node.meta.get("val")
        if target is not CUSTOM and _is_fixed(values):
            args, kwargs, values = self.under_autocast(node, target, args, kwargs, values, written=written)
        target, args, kwargs = _without_example(target, args, kwargs, values)
        single = isinstance(values, torch.Tensor)
        if not _is_fixed(values):
            refused = self.refuse(
                node,
                f"what {target} gives depends on values",
                "sizes and numbers that don't",
                f"keep all rows and choose by torch.where(mask, a, b), or {_BEFORE}",
            )
            raise ValuesAskedError(**refused.as_words())
        results = [values] if single else list(values if values is not None else ())
        differentiable = grad and target._schema.name.split("::")[1] not in _NO_GRADIENT
        differentiable &= any(self.specs[ref.name].requires_grad for ref in refs((args, kwargs)))
        unusable = [None] * len(results[USABLE_RESULTS.get(target, len(results)) :])
        results = results[: len(results) - len(unusable)]
        title, names = self.names_for(node.name, None if single else len(results))
        exported = [
            item for item in pytree.tree_leaves(node.meta.get("val")) if isinstance(item, torch.Tensor)
        ]
        for name, value, before in zip(names, results, exported, strict=False):
            assert isinstance(value, torch.Tensor)
            if value.dtype != before.dtype:
                self.retyped.add(name)
            requires_grad = (
                differentiable and may_learn(value.dtype) and _may_learn_of(target, args, names.index(name))
            )
            self.specs[name] = _spec(value, requires_grad=requires_grad)
        operation = Operator(
            title,
            target,
            tuple(args),
            dict(kwargs),
            (*names, *unusable),
            module=module_of(node),
            source=source_of(node),
            order=memory_order(node.all_input_nodes[0].meta["val"]) if target is aten.dropout.default else (),
            checkpoint=region_of(node),
        )
        self.operators.append(operation)
        self.note_aliases(operation, fresh=written is not None)
        if written is not None:
            names = (self.cast(node, names[0], self.specs[written].dtype),)
            self.retyped |= {names[0]} if written in self.retyped else set()
        self.env[node] = Ref(names[0]) if single else [*map(Ref, names), *unusable]
        if _is_hook(operation):
            self.hook(node, operation)
        if written is not None:
            self.replace(node, written, names[0], grad=grad)

    # -- dtypes -----------------------------------------------------------------------------------

    def under_autocast(
        self,
        node: fx.Node,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        values: Any,
        *,
        written: str | None,
    ) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """The call as autocast makes it, its operands cast, and what it gives; operators that write are never
        cast, and give what a cast to the dtype of the written tensor follows."""
        names = [ref.name for ref in refs((args, kwargs))]
        floats = {self.specs[name].dtype for name in names if self.specs[name].dtype.is_floating_point}
        dtype = self.dtype if written is None else None
        again = dtype is not None or not self.retyped.isdisjoint(names) or (written and len(floats) > 1)
        if not floats or not again:
            return args, kwargs, values
        try:
            cast = self.casting.find(target, args, kwargs, self.specs, dtype)
        except UncastError as error:
            raise self.refuse(
                node,
                f"{target} on {', '.join(sorted(map(str, floats)))} under autocast, which casts inside of it",
                "operators whose operands are cast",
                "cast its operands in a region with torch.autocast(device_type, enabled=False)",
            ) from error
        except RuntimeError as error:
            raise self.refuse(
                node,
                f"{target} under autocast: {cut_text(str(error).splitlines()[0], 120)}",
                "operators that run under it",
                "cast its operands in a region with torch.autocast(device_type, enabled=False)",
            ) from error
        if cast.dtype is not None:
            to = cast.dtype
            args, kwargs = map_refs(
                (args, kwargs),
                lambda ref: Ref(self.cast(node, ref.name, casted(self.specs[ref.name], to).dtype)),
            )
        return args, {**kwargs, **cast.keywords}, _as_dtypes(values, cast.results)

    def cast(self, node: fx.Node, name: str, dtype: torch.dtype) -> str:
        """The tensor in this dtype; equal casts are one, but for regions that are computed again."""
        spec = self.specs[name]
        if spec.dtype == dtype:
            return name
        key = name, dtype, region_of(node)
        if key not in self.casts:
            requires_grad = spec.requires_grad and may_learn(dtype)
            self.casts[key] = self.add(
                node,
                aten.to.dtype,
                (Ref(name), dtype),
                replace(spec, dtype=dtype, requires_grad=requires_grad),
            )
        return self.casts[key]

    def hook(self, node: fx.Node, operation: Operator) -> None:
        """Let all that uses a tensor use what the hook's `operation` gives instead, also before it.

        x -> hook -> users, and a second one: x -> second -> hook -> users, as gradients meet the first first.
        """
        makers = {name: item for item in self.operators[:-1] for name in item.results if name}
        (hooked,) = node.all_input_nodes
        given = old = self.value(_itself(hooked)).name
        while old in makers and _is_hook(makers[old]):
            (old,) = makers[old].operands
        (new,) = operation.results
        assert new is not None
        if old not in makers:
            raise self.refuse(
                node,
                f"a hook on the input {old}",
                "hooks on results of operators",
                "hook a copy, as by x = x.clone() before",
            )

        def after(item: Operator) -> Operator:
            args, kwargs = map_refs(
                (item.args, item.kwargs), lambda ref: Ref(new) if ref.name == old else ref
            )
            return replace(item, args=args, kwargs=kwargs)

        rest = [after(item) for item in self.operators[:-1]]
        place = next(index for index, item in enumerate(rest) if old in item.results) + 1
        region = makers[old].checkpoint
        hook = replace(operation, args=([Ref(old)], *operation.args[1:]), checkpoint=region)
        self.operators = [*rest[:place], hook, *rest[place:]]
        self.views = {name: after(view) for name, view in self.views.items()}
        if old in self.views:
            self.views[new] = self.views[old]
        self.root[new] = self.root[old]
        if old == given:
            self.rename(old, new)

    def check_dense_gradient(
        self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Raise TraceError for an embedding that learns by sparse gradients, which buckets don't take."""
        names = [item.name for item in target._schema.arguments]
        if (
            target not in _SPARSE_GRADIENTS
            or "sparse" not in names
            or not isinstance(args[0], Ref)
            or not self.specs[args[0].name].requires_grad
        ):
            return
        if dict(zip(names, args, strict=False), **kwargs).get("sparse"):
            raise TraceError(
                where=source_of(node) or f"module {module_of(node)}",
                found="an embedding with sparse gradients",
                wanted="dense ones, which are summed over ranks",
                remedy="build it with sparse=False",
            )

    def names_for(self, title: str, count: int | None) -> tuple[str, tuple[str, ...]]:
        """An operator's name and those of its results, `count` of them or itself: the exported ones, unless
        an input or another operator has them, as a parameter may be called `t` or `add`."""
        while True:
            names = (title,) if count is None else tuple(f"{title}_{index}" for index in range(count))
            if title not in self.titles and self.specs.keys().isdisjoint(names):
                self.titles.add(title)
                return title, names
            title += "_"

    def note_aliases(self, operation: Operator, *, fresh: bool) -> None:
        schema = operation.target._schema
        aliased = not fresh and any(result.alias_info is not None for result in schema.returns)
        base = self.root[operation.operands[0]] if aliased and operation.operands else None
        for name in operation.results:
            if name is not None:
                self.root[name] = base or name
                if base and operation.target in _SCATTERS:
                    self.views[name] = operation
        for position in _HIDDEN_WRITES.get(operation.target, ()):
            argument = operation.args[position] if len(operation.args) > position else None
            if isinstance(argument, Ref) and argument.name in self.inputs and operation.args[5]:
                item = self.inputs[argument.name]
                self.inputs[argument.name] = replace(item, mutated=True)

    # -- in-place operators -----------------------------------------------------------------------

    def written(
        self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str | None:
        """The tensor that an in-place operator writes, or one with `out=`; else None."""
        writes = [
            item.name for item in target._schema.arguments if item.alias_info and item.alias_info.is_write
        ]
        if not writes:
            return None
        first = target._schema.arguments[0].name
        value = kwargs.get("out") if writes == ["out"] else args[0] if writes == [first] else None
        if not isinstance(value, Ref):
            raise self.refuse(
                node,
                f"{target} writes to several arguments",
                "functional operators",
                "take what the call without out= returns",
            )
        result = node.meta["val"]
        spec = self.specs[value.name]
        same = result.dtype == spec.dtype or value.name in self.retyped
        if tuple(result.shape) != spec.shape or not same:
            raise self.refuse(
                node,
                f"{target} into {spec.dtype}{list(spec.shape)}",
                f"one of {list(result.shape)}",
                "assign the result of the call that writes to nothing: x = ...",
            )
        return value.name

    def functional(self, node: fx.Node, target: Any) -> Any:
        """The overload that returns what `target` writes."""
        packet = getattr(aten, target._schema.name.split("::")[1].removesuffix("_"), None)
        same = target._schema.overload_name or "default"
        wanted = [str(item.type) for item in target._schema.arguments if item.name != "out"]
        for name in sorted(packet.overloads(), key=lambda name: name != same) if packet else ():
            found = getattr(packet, name)
            given = [str(item.type) for item in found._schema.arguments]
            if given == wanted and not found._schema.is_mutable:
                return found
        raise self.refuse(
            node,
            f"the in-place operator {target}",
            "one with a functional form",
            "assign the result of operators that write to nothing: x = ...",
        )

    def replace(self, node: fx.Node, written: str, name: str, *, grad: bool) -> None:
        """From here on `written` means `name`; what a view is of has `name` in the view's place."""
        chain = [written]  # [written, what it is a view of, ..., the tensor that owns the memory]
        while chain[-1] in self.views:
            chain.append(self.views[chain[-1]].operands[0])
        if not grad and any(self.specs[each].requires_grad for each in chain):
            raise self.refuse(
                node,
                f"an in-place write without gradient to {chain[-1]}, which has one",
                "a result of its own, or a write with gradient",
                "write to a .clone(), or leave out torch.no_grad() and .data",
            )
        root = self.root[written]
        stale = [key for key, value in self.env.items() if self._views(value, root, chain)]
        later = any(user is not node and user not in self.env for key in stale for user in key.users)
        kept = chain[-1] != root and (root in self.inputs or root in self.writes.values())
        if kept or later:
            raise self.refuse(
                node,
                f"an in-place write to {written} through a view",
                "writes to whole tensors or slices",
                "use x = torch.where(mask, value, x), torch.cat or torch.stack, or write to x[a:b] itself",
            )
        made = [name]
        for view, base in itertools.pairwise(chain):
            made.append(self.scatter(node, self.views[view], base, made[-1]))
        for old, new in zip(chain, made, strict=True):
            self.rename(old, new)
        for view, whole, new in zip(chain, made[1:], made[:-1], strict=False):
            self.views[new] = _of(self.views[view], whole)
            self.root[new] = made[-1]
        self.note_write(node, root, made[-1])

    def scatter(self, node: fx.Node, view: Operator, base: str, name: str) -> str:
        """`base` with the tensor `name` where `view` looks; of complex tensors both parts, as torch has
        derivatives of such writes for real ones alone."""
        requires_grad = self.specs[base].requires_grad or self.specs[name].requires_grad
        spec, rest = replace(self.specs[base], requires_grad=requires_grad), view.args[1:]
        if not spec.dtype.is_complex:
            return self.add(node, _SCATTERS[view.target], (Ref(base), Ref(name), *rest), spec)
        parts = [Ref(self.both_parts(node, each)) for each in (base, name)]
        rest = (*(dim % len(spec.shape) for dim in rest[:1]), *rest[1:])
        pairs = self.add(node, _SCATTERS[view.target], (*parts, *rest), _in_pairs(spec))
        return self.add(node, aten.view_as_complex.default, (Ref(pairs),), spec)

    def both_parts(self, node: fx.Node, name: str) -> str:
        """The real and imaginary parts of a complex tensor, as a last dim."""
        spec = self.specs[name]
        told = self.add(node, aten.resolve_conj.default, (Ref(name),), spec)  # else conjugates are only noted
        return self.add(node, aten.view_as_real.default, (Ref(told),), _in_pairs(spec))

    def copied(
        self, node: fx.Node, source: Ref, spec: TensorSpec
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The call that gives `source` as a tensor like `spec`; aten.copy has no derivative."""
        given = self.specs[source.name]
        if given.shape != spec.shape:
            source = Ref(
                self.add(node, aten.expand.default, (source, [*spec.shape]), replace(given, shape=spec.shape))
            )
        if given.dtype == spec.dtype:
            return aten.clone.default, (source,), {}
        return aten._to_copy.default, (source,), {"dtype": spec.dtype}

    def add(self, node: fx.Node, target: Any, args: tuple[Any, ...], spec: TensorSpec) -> str:
        """Write down an operator that `node` stands for beside its own; the name of its result."""
        title, results = self.names_for(f"{node.name}_{target._schema.name.split('::')[1]}", None)
        self.specs[title], self.root[title] = spec, title
        self.operators.append(
            Operator(
                title,
                target,
                args,
                {},
                results,
                module=module_of(node),
                source=source_of(node),
                checkpoint=region_of(node),
            )
        )
        return title

    def rename(self, old: str, new: str) -> None:
        for key, value in self.env.items():
            if isinstance(value, Ref) and value.name == old:
                self.env[key] = Ref(new)

    def note_write(self, node: fx.Node, written: str, name: str) -> None:
        """What a buffer holds after the step; raises TraceError for another input."""
        owner = next((buffer for buffer, value in self.writes.items() if value == written), written)
        if owner in self.inputs:
            if self.inputs[owner].kind is not InputKind.BUFFER:
                raise self.refuse(
                    node,
                    f"an in-place write to the input {owner}",
                    "writes to what forward makes",
                    "write to a copy, as by x = x.clone() before",
                )
            self.writes[owner] = name

    def _views(self, value: Any, root: str, written: Sequence[str]) -> bool:
        return isinstance(value, Ref) and value.name not in written and self.root.get(value.name) == root

    def refuse(self, node: fx.Node, found: str, wanted: str, remedy: str) -> TraceError:
        where = source_of(node) or f"module {module_of(node) or 'of the whole model'}"
        return TraceError(where=where, found=found, wanted=wanted, remedy=remedy)


def _spec(value: torch.Tensor, *, requires_grad: bool = False) -> TensorSpec:
    """What a tensor is; a sparse one, of which a program takes no part, without a shape."""
    shape = tuple(value.shape) if value.layout is torch.strided else ()
    return TensorSpec(shape, value.dtype, requires_grad, value.layout)


def _itself(node: fx.Node) -> fx.Node:
    """The node whose very tensor eager code has here: some calls give their operand back."""
    while node.target in _GIVE_BACK:
        before = node.args[0]
        assert isinstance(before, fx.Node)
        ours, theirs = node.meta["val"], before.meta["val"]
        if ours.dtype != theirs.dtype or ours.stride() != theirs.stride():
            break
        if node.target is aten.dropout.default and node.args[1] and node.args[2]:
            break
        node = before
    return node


def _as_dtypes(values: Any, dtypes: Sequence[torch.dtype]) -> Any:
    """The exported values in the dtypes that they have here."""
    found = iter(dtypes)
    return pytree.tree_map_only(torch.Tensor, lambda value: value.to(next(found)), values)


def _is_hook(item: Operator) -> bool:
    return item.target is CUSTOM and call_at(item.args[4]).is_hook


def _may_learn_of(target: Any, args: Sequence[Any], result: int) -> bool:
    """Whether a result has a gradient, where operands do: a custom backward may have marked it as without."""
    return target is not CUSTOM or call_at(args[4]).results[result].requires_grad


def _is_fixed(values: Any) -> bool:
    """Whether a call gives tensors whose shapes are the same for all values of its operands."""
    leaves = pytree.tree_leaves(values)
    sizes = [size for each in leaves if isinstance(each, torch.Tensor) for size in each.shape]
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return not any(isinstance(each, symbols) for each in (*leaves, *sizes))


def _device_by_name(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A call whose device, and what follows it, are keyword arguments: programs put in their own."""
    names = [item.name for item in target._schema.arguments][: len(args)]
    if "device" not in names:
        return args, kwargs
    place = names.index("device")
    return args[:place], {**dict(zip(names[place:], args[place:], strict=True)), **kwargs}


def _without_example(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The call that gives `value` without the tensor that it only takes as an example (`_ALIKE`)."""
    if target in _CAST_ALIKE:
        return aten.to.dtype, (args[0], value.dtype), {}
    if target not in _ALIKE:
        return target, args, kwargs
    plain, kept = _ALIKE[target]
    if kept:
        return plain, (*args[:kept], list(value.shape)), {}
    filled = (*args[2:], *(kwargs[name] for name in kwargs if name == "fill_value"))
    return plain, (list(value.shape), *filled), {"dtype": value.dtype, "device": value.device}


def _left_open(
    mutable: Any, functional: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Defaults that only the in-place overload of an operator has, for a call that leaves them open."""
    wanted = [item.name for item in functional._schema.arguments if not item.has_default_value()]
    defaults = {
        item.name: item.default_value for item in mutable._schema.arguments if item.has_default_value()
    }
    given = {*kwargs, *(item.name for item in mutable._schema.arguments[: len(args)])}
    return {name: defaults[name] for name in wanted if name in defaults and name not in given}


def _in_pairs(spec: TensorSpec) -> TensorSpec:
    """Of a complex tensor's real and imaginary parts."""
    return replace(spec, shape=(*spec.shape, 2), dtype=spec.dtype.to_real())


def _of(view: Operator, base: str) -> Operator:
    """The same view of another tensor."""
    return replace(view, args=(Ref(base), *view.args[1:]))


def _tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For every name of a tied parameter all its names, the first one first."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: tuple(group) for group in names.values() for name in group}


def _input_name(kind: InputKind, target: str, *, taken: dict[str, TensorSpec]) -> str:
    name = re.sub(r"\W", "_", target)
    if kind is InputKind.CONSTANT or not name.isidentifier():
        name = ("constant_" if kind is InputKind.CONSTANT else "layer_") + name
    while name in taken:
        name += "_"
    return name
