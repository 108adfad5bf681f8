"""Writes an exported graph down as single-assignment operators, in one walk."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind as ExportedKind

from autopar.core.graph import (
    Call,
    Graph,
    GraphInput,
    InputKind,
    Operator,
    ProcessNumber,
    Ref,
    map_refs,
    may_learn,
    memory_order,
    refs,
)
from autopar.core.operator_facts import facts_of
from autopar.errors import TraceError, ValuesAskedError
from autopar.torch_seams import pytree
from autopar.torch_seams.schemas import HigherOrderOperator, OpOverload, schema_of
from autopar.trace.backwards.custom_operator import CUSTOM, call_at
from autopar.trace.call.call_signature import Arguments
from autopar.trace.call.user_source import module_of, source_of
from autopar.trace.forms.call_forms import (
    arguments_of,
    device_by_name,
    functional,
    left_open,
    ours,
    without_example,
)
from autopar.trace.forms.simplify import without_dead_code, without_identities
from autopar.trace.forms.spread_out import CONTIGUOUS, spreads_out
from autopar.trace.forward.autocast import Autocast
from autopar.trace.forward.checkpoint_regions import region_of
from autopar.trace.state.shared_memory import ModelMemory, held_by_name
from autopar.trace.values.asked_inputs import inputs_behind
from autopar.trace.write.casts import Casts
from autopar.trace.write.in_place import InPlaceWrites
from autopar.trace.write.kept_rows import KeptRows
from autopar.trace.write.mask_rows import NumberKept, Places, SelectedRows
from autopar.trace.write.written_graph import WrittenGraph, input_name, refused, spec_of

aten = torch.ops.aten

_DROPPED = ("_assert_tensor_metadata", "_assert_async", "_assert_scalar", "sym_constrain_range")
_BEFORE = "compute it before the call and pass it"
_INSTEAD = "return its tensors, or leave it out (use_cache=False in transformers)"


class GraphBuilder:
    """Walks the exported graph once and writes down single-assignment operators."""

    def __init__(
        self,
        model: nn.Module,
        arguments: Arguments,
        exported: Any,
        *,
        known: ModelMemory,
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
        self.graph = WrittenGraph()
        self.casts = Casts(self.graph, autocast.device)
        self.in_place = InPlaceWrites(self.graph)
        self.kept = KeptRows(self.graph, self.casts.retyped)
        self.notes: list[str] = []
        self.inlining = 0  # regions around what is read
        self.tied = _tied_names(model)
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.held = {**exported.state_dict, **exported.constants}  # the latter what no state dict has, too

    def build(self, *, loss_index: int | None, dropped: tuple[str, ...]) -> Graph:
        gm = self.exported.graph_module
        self.read_inputs(gm)
        outputs = self.read_nodes(gm, grad=True)
        names = tuple(value.name for value in outputs if isinstance(value, Ref))
        lost = "holds no plain tensors and is not returned"
        self.notes += [f"output {name} {lost}; {_INSTEAD}" for name in dropped]
        graph = Graph(
            inputs=tuple(map(self.as_state, self.graph.inputs.values())),
            operators=tuple(self.graph.operators),
            outputs=names,
            specs=self.graph.specs,
            writes=tuple(self.graph.writes.items()),
            loss=None if loss_index is None else names[loss_index],
            notes=tuple(self.notes),
        )
        return without_dead_code(without_identities(graph))

    # -- inputs ---------------------------------------------------------------------------------

    def as_state(self, item: GraphInput) -> GraphInput:
        """The input; a parameter that forward writes is a buffer to the program."""
        return replace(item, kind=InputKind.BUFFER) if item.name in self.graph.writes else item

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
        """Add a loss's own tensor as a constant, unless it is the model's, too."""
        name = self.known.name_of(self.held[target])
        owner = next(
            (item.name for item in self.graph.inputs.values() if item.target in self.tied_to(name)), None
        )
        if owner is None:
            self.add_input(node, InputKind.CONSTANT, target)
        else:
            self.graph.env[node] = Ref(owner)

    def tied_to(self, target: str | None) -> tuple[str, ...]:
        """All names of a parameter or buffer."""
        return () if target is None else self.tied.get(target, (target,))

    def add_input(self, node: fx.Node, kind: InputKind, target: str) -> None:
        is_held = kind in (InputKind.PARAMETER, InputKind.BUFFER)
        first, *others = self.tied_to(target) if is_held else (target,)
        if first != target:
            owner = next((item.name for item in self.graph.inputs.values() if item.target == first), None)
            if owner is not None:
                self.graph.env[node] = Ref(owner)
                return
        name = input_name(kind, first, taken=self.graph.specs)
        frozen = kind is not InputKind.PARAMETER or not self.parameters[target].requires_grad
        value = node.meta["val"]
        user_grad = kind is InputKind.USER and bool(
            self.arguments.tensors[self.arguments.paths.index(target)].requires_grad
        )
        self.graph.specs[name] = spec_of(value, requires_grad=(not frozen) or user_grad)
        constant = self.held[target].detach() if kind is InputKind.CONSTANT else None
        self.graph.inputs[name] = GraphInput(
            name,
            kind,
            first,
            self.graph.specs[name],
            tuple(others),
            value=constant,
        )
        self.graph.root[name] = name
        self.graph.env[node] = Ref(name)

    # -- operators ------------------------------------------------------------------------------

    def read_nodes(self, gm: fx.GraphModule, *, grad: bool) -> list[Any]:
        for node in gm.graph.nodes:
            match node.op:
                case "placeholder":
                    pass
                case "get_attr":
                    self.graph.env[node] = self.constant(gm, node)
                case "call_function":
                    self.read_call(gm, node, grad=grad)
                case "output":
                    return self.results(node)
                case "call_module":
                    pass  # _guards_fn: the wrapper checks its inputs itself
        return []

    def results(self, node: fx.Node) -> list[Any]:
        """Outputs of the graph's last `node`; raises ValuesAskedError for sizes by values."""
        found = [self.graph.value(item) for item in node.args[0]]  # type: ignore[union-attr]
        for value, item in zip(found, node.args[0], strict=True):  # type: ignore[arg-type]
            if isinstance(value, (SelectedRows, Places, NumberKept)) and not self.inlining:
                raise self.kept.rows.refused(item, "an output")
        return found

    def constant(self, gm: fx.GraphModule, node: fx.Node) -> Any:
        value = gm
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if not isinstance(value, torch.Tensor):
            return value
        name = input_name(InputKind.CONSTANT, str(node.target), taken=self.graph.specs)
        self.graph.specs[name] = spec_of(value)
        self.graph.inputs[name] = GraphInput(
            name, InputKind.CONSTANT, str(node.target), self.graph.specs[name], value=value.detach()
        )
        self.graph.root[name] = name
        return Ref(name)

    def read_call(self, gm: fx.GraphModule, node: fx.Node, *, grad: bool) -> None:
        target = node.target
        if target is operator.getitem:
            self.graph.env[node] = self.graph.value(node.args[0])[node.args[1]]
        elif isinstance(target, HigherOrderOperator):
            self.inline(gm, node, grad=grad)
        elif self.kept.counts(node):
            pass
        elif not isinstance(target, OpOverload):
            raise refused(node, f"a call of {target}", "operators of torch on tensors", _BEFORE)
        elif schema_of(target).name.split("::")[1] in _DROPPED:
            self.graph.env[node] = None
        else:
            self.add_operator(node, ours(target), grad=grad)

    def inline(self, gm: fx.GraphModule, node: fx.Node, *, grad: bool) -> None:
        """Regions under set_grad_enabled and autocast are inlined; what comes into one without gradients is
        detached."""
        name, dtype = str(node.target), self.dtype
        cast: Any
        if name == "wrap_with_set_grad_enabled":
            mode, body, *operands = node.args
            if mode and not grad:
                raise refused(
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
            raise refused(
                node,
                f"a region of kind {name}",
                "a forward without control flow",
                "choose by torch.where(condition, a, b)",
            )
        inner = self.graph.env.get(body) if isinstance(body, fx.Node) else body
        assert isinstance(inner, fx.GraphModule)
        places = [item for item in inner.graph.nodes if item.op == "placeholder"]
        for place, operand in zip(places, operands, strict=True):
            value = self.graph.value(operand)
            self.graph.env[place] = value if grad else self.detached(node, value)
        around, self.dtype = self.dtype, dtype
        self.inlining += 1
        self.graph.env[node] = self.read_nodes(inner, grad=grad)
        self.inlining -= 1
        self.dtype = around

    def detached(self, node: fx.Node, value: Any) -> Any:
        """`value` without gradient, which a region runs on: its own operators are like any others."""
        if isinstance(value, SelectedRows):
            return replace(value, ref=self.detached(node, value.ref))
        if not isinstance(value, Ref) or not self.graph.specs[value.name].requires_grad:
            return value
        spec = replace(self.graph.specs[value.name], requires_grad=False)
        name = self.graph.add(node, aten.detach.default, (value,), spec)
        self.graph.root[name] = self.graph.root[value.name]
        return Ref(name)

    def spread_out(self, node: fx.Node, value: Ref) -> Ref:
        """The copy that `node` makes of an expanded tensor, as an operator of its own."""
        spec = self.graph.specs[value.name]
        return Ref(self.graph.add(node, aten.clone.default, (value,), spec, memory_format=CONTIGUOUS))

    def add_operator(self, node: fx.Node, target: Any, *, grad: bool) -> None:
        args, kwargs = self.graph.value(node.args), self.graph.value(node.kwargs)
        self.check_dense_gradient(node, Call(target, args, kwargs))
        _refuse_memory_order(node, target)
        call = Call(self.in_place.viewed(node, target, args), args, kwargs)
        if self.kept.concerns(call):
            self.graph.env[node] = self.of_kept_rows(node, call, grad=grad)
            return
        written = self.in_place.written(node, call, retyped=self.casts.retyped)
        if written is not None:
            call = self.functional(node, call, written)
        if call.target is CUSTOM:
            call = replace(call, args=(*call.args[:4], ProcessNumber(call.args[4])))
        if spreads_out(node, call.target):
            call = replace(call, args=(self.spread_out(node, call.args[0]), *call.args[1:]))
        value = self.write(node, call, node.meta.get("val"), grad=grad, written=written)
        self.graph.env[node] = value
        if _is_hook(operation := self.graph.operators[-1]):
            self.hook(node, operation)
        if written is not None:
            self.in_place.replace(node, written, value.name, grad=grad)

    def of_kept_rows(self, node: fx.Node, call: Call, *, grad: bool) -> Any:
        """What stands for the result of an operator on rows that a mask keeps."""
        written = None
        if self.kept.is_last_read(node, call):
            call = replace(call, target=_functional(node, call.target))
        elif isinstance(call.args[0], Ref):
            written = self.in_place.written(node, call, retyped=self.casts.retyped)
        if written is not None:
            call = self.functional(node, call, written)
        value = self.kept.read(node, call, partial(self.write, grad=grad))
        if written is not None:
            self.in_place.replace(node, written, value.name, grad=grad)
        return value

    def functional(self, node: fx.Node, call: Call, written: str) -> Call:
        """The call that returns what an in-place one writes to the tensor `written`."""
        target = _functional(node, call.target)
        kwargs = {key: value for key, value in call.kwargs.items() if key not in ("inplace", "out")}
        found = Call(target, call.args, kwargs)
        if target is aten.copy.default:
            return self.in_place.copied(node, call.args[1], self.graph.specs[written])
        return replace(found, kwargs=kwargs | left_open(call.target, target, found))

    def write(self, node: fx.Node, call: Call, values: Any, *, grad: bool, written: str | None = None) -> Any:
        """Write an operator down that gives tensors like `values`, and return what stands for these."""
        call = device_by_name(call)
        if call.target is not CUSTOM and _is_fixed(values):
            call, values = self.casts.under_autocast(node, call, values, dtype=self.dtype, written=written)
        call = without_example(call, values)
        target, args, kwargs = call.target, call.args, call.kwargs
        single = isinstance(values, torch.Tensor)
        if not _is_fixed(values):
            error = refused(
                node,
                f"what {target} gives depends on values",
                "sizes and numbers that don't",
                f"keep all rows and choose by torch.where(mask, a, b), or {_BEFORE}",
            )
            asked = ValuesAskedError(**error.as_words())
            operands = {ref.name for ref in refs((args, kwargs))}
            asked.inputs = inputs_behind(operands, self.graph.inputs, self.graph.operators)
            raise asked
        results = [values] if single else list(values if values is not None else ())
        differentiable = grad and facts_of(target).has_gradient
        differentiable &= any(self.graph.specs[ref.name].requires_grad for ref in refs((args, kwargs)))
        usable = results[: facts_of(target).usable_results]
        results, unusable = usable, [None] * (len(results) - len(usable))
        title, made = self.graph.names_for(node.name, None if single else len(results))
        names = tuple(None if each is None else name for name, each in zip(made, results, strict=True))
        exported = pytree.tree_leaves(node.meta.get("val"))
        for name, value, before in zip(names, results, exported, strict=False):
            if name is None:  # a gradient that nobody asks for
                continue
            assert isinstance(value, torch.Tensor)
            if value.dtype != before.dtype:
                self.casts.retyped.add(name)
            requires_grad = (
                differentiable and may_learn(value.dtype) and _may_learn_of(target, args, names.index(name))
            )
            self.graph.specs[name] = spec_of(value, requires_grad=requires_grad)
        operation = Operator(
            title,
            target,
            tuple(args),
            dict(kwargs),
            (*names, *unusable),
            module=module_of(node),
            source=source_of(node),
            order=memory_order(node.all_input_nodes[0].meta["val"]) if facts_of(target).order_matters else (),
            checkpoint=region_of(node),
        )
        self.graph.operators.append(operation)
        self.graph.note_aliases(node, operation, fresh=written is not None)
        if written is not None:
            assert names[0] is not None
            names = (cast := self.casts.cast(node, names[0], self.graph.specs[written].dtype),)
            self.casts.retyped |= {cast} if written in self.casts.retyped else set()
        found = [None if name is None else Ref(name) for name in names]
        return found[0] if single else [*found, *unusable]

    def hook(self, node: fx.Node, operation: Operator) -> None:
        """Let all that uses a tensor use what the hook's `operation` gives instead, also before it.

        x -> hook -> users, and a second one: x -> second -> hook -> users, as gradients meet the first first.
        """
        makers = {name: item for item in self.graph.operators[:-1] for name in item.results if name}
        (hooked,) = node.all_input_nodes
        given = old = self.graph.value(_itself(hooked)).name
        while old in makers and _is_hook(makers[old]):
            (old,) = makers[old].operands
        (new,) = operation.results
        assert new is not None
        if old not in makers:
            raise refused(
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

        rest = [after(item) for item in self.graph.operators[:-1]]
        place = next(index for index, item in enumerate(rest) if old in item.results) + 1
        region = makers[old].checkpoint
        hook = replace(operation, args=([Ref(old)], *operation.args[1:]), checkpoint=region)
        self.graph.operators = [*rest[:place], hook, *rest[place:]]
        self.graph.views = {name: after(view) for name, view in self.graph.views.items()}
        if old in self.graph.views:
            self.graph.views[new] = self.graph.views[old]
        self.graph.whole = {name: new if base == old else base for name, base in self.graph.whole.items()}
        if old in self.graph.whole:
            self.graph.whole[new] = self.graph.whole[old]
        self.graph.root[new] = self.graph.root[old]
        if old == given:
            self.graph.rename(old, new)

    def check_dense_gradient(self, node: fx.Node, call: Call) -> None:
        """Raise TraceError for an embedding that learns by sparse gradients, which buckets don't take."""
        if arguments_of(call).get("sparse") is not True:
            return
        if isinstance(call.args[0], Ref) and self.graph.specs[call.args[0].name].requires_grad:
            raise TraceError(
                where=source_of(node) or f"module {module_of(node)}",
                found="an embedding with sparse gradients",
                wanted="dense ones, which are summed over ranks",
                remedy="build it with sparse=False",
            )


def _itself(node: fx.Node) -> fx.Node:
    """The node whose very tensor eager code has here: some calls give their operand back."""
    while (facts := facts_of(node.target)).gives_itself:
        before = node.args[0]
        assert isinstance(before, fx.Node)
        ours, theirs = node.meta["val"], before.meta["val"]
        if ours.dtype != theirs.dtype or ours.stride() != theirs.stride():
            break
        if facts.changes and facts.changes(node.args):
            break
        node = before
    return node


def _is_hook(item: Operator) -> bool:
    return item.target is CUSTOM and call_at(item.args[4]).is_hook


def _may_learn_of(target: Any, args: Sequence[Any], result: int) -> bool:
    """Whether a result has a gradient, where operands do: a custom backward may have marked it as without."""
    learning = facts_of(target).learning_results
    if learning is not None and result >= learning:
        return False
    return target is not CUSTOM or call_at(args[4]).results[result].requires_grad


def _is_fixed(values: Any) -> bool:
    """Whether a call gives tensors whose shapes are the same for all values of its operands."""
    leaves = pytree.tree_leaves(values)
    sizes = [size for each in leaves if isinstance(each, torch.Tensor) for size in each.shape]
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return not any(isinstance(each, symbols) for each in (*leaves, *sizes))


def _tied_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For every name of a tied parameter or buffer all its names, the first one first."""
    names: dict[int, list[str]] = {}
    for name, tensor in held_by_name(model).items():
        names.setdefault(id(tensor), []).append(name)
    return {name: tuple(group) for group in names.values() for name in group}


def _refuse_memory_order(node: fx.Node, target: Any) -> None:
    if target is aten.as_strided.default:
        raise refused(
            node,
            "as_strided, which reads memory in whatever order its tensor lies there",
            "operators on elements: a rank's tensor may lie in another order",
            "take windows by x.unfold(dim, size, step), other views by reshape, transpose and slices",
        )


def _functional(node: fx.Node, target: Any) -> Any:
    """The overload that returns what `target` writes; raises TraceError where there is none."""
    if (found := functional(target)) is None:
        raise refused(
            node,
            f"the in-place operator {target}",
            "one with a functional form",
            "assign the result of operators that write to nothing: x = ...",
        )
    return found
