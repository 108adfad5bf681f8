"""In-place writes told as single assignments: from the write on, the tensor means what was written.

    x.add_(y); use(x)          -->  x_1 = add(x, y); use(x_1)
    x.unsqueeze_(0); use(x)    -->  x_1 = unsqueeze(x, 0); use(x_1)
    x[a:b].mul_(2); use(x)     -->  v = slice(x, a, b); v_1 = mul(v, 2)
                                    x_1 = slice_scatter(x, v_1, a, b); use(x_1)
    x.view(-1).mul_(2); use(x) -->  v = view(x, -1); v_1 = mul(v, 2)
                                    x_1 = reshape(v_1, x's shape); use(x_1)

Writes through other views, and those that a view made before would show, are refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.core.graph import Call, InputKind, Operator, Ref, TensorSpec
from autopar.core.operator_facts import facts_of
from autopar.torch_seams.schemas import schema_of
from autopar.trace.forms.call_forms import functional
from autopar.trace.write.written_graph import WrittenGraph, refused

aten = torch.ops.aten


class InPlaceWrites:
    """Tells in-place writes to tensors of `graph`, into which it writes what they become."""

    def __init__(self, graph: WrittenGraph) -> None:
        self._graph = graph

    def viewed(self, node: fx.Node, target: Any, args: tuple[Any, ...]) -> Any:
        """The view that stands for an operator which changes how a tensor looks, in place, not what it holds.

        Raises TraceError for an input, which a program leaves as it is.
        """
        if torch.Tag.inplace_view not in getattr(target, "tags", ()) or (view := functional(target)) is None:
            return target
        if args[0].name in self._graph.inputs:
            raise refused(
                node,
                f"{target}, which changes the input {args[0].name} itself",
                "a view of it",
                "leave out the underscore: x = x.unsqueeze(0), x = x.detach()",
            )
        return view

    def written(self, node: fx.Node, call: Call, *, retyped: Collection[str]) -> str | None:
        """The tensor that an in-place operator writes, or one with `out=`; else None.

        Tensors that are `retyped` have another dtype here than in the exported graph.
        """
        arguments = schema_of(call.target).arguments
        writes = [item.name for item in arguments if item.alias_info and item.alias_info.is_write]
        if not writes:
            return None
        first = [arguments[0].name]
        value = call.kwargs.get("out") if writes == ["out"] else call.args[0] if writes == first else None
        if not isinstance(value, Ref):
            raise refused(
                node,
                f"{call.target} writes to several arguments",
                "functional operators",
                "take what the call without out= returns",
            )
        result = node.meta["val"]
        spec = self._graph.specs[value.name]
        same = result.dtype == spec.dtype or value.name in retyped
        if tuple(result.shape) != spec.shape or not same:
            raise refused(
                node,
                f"{call.target} into {spec.dtype}{list(spec.shape)}",
                f"one of {list(result.shape)}",
                "assign the result of the call that writes to nothing: x = ...",
            )
        return value.name

    def replace(self, node: fx.Node, written: str, name: str, *, grad: bool) -> None:
        """Let `written` mean `name` from here on; tensors that it is a view of get `name` in the view's
        place."""
        chain = [written]  # [written, what it is a view of, ..., the tensor that owns the memory]
        while (base := self._graph.viewed(chain[-1])) is not None:
            chain.append(base)
        if not grad and any(self._graph.specs[each].requires_grad for each in chain):
            raise refused(
                node,
                f"an in-place write without gradient to {chain[-1]}, which has one",
                "a result of its own, or a write with gradient",
                "write to a .clone(), or leave out torch.no_grad() and .data",
            )
        root = self._graph.root[written]
        stale = [key for key, value in self._graph.env.items() if self._views(value, root, chain)]
        later = any(user is not node and user not in self._graph.env for key in stale for user in key.users)
        kept = chain[-1] != root and (root in self._graph.inputs or root in self._graph.writes.values())
        if kept or later:
            self._refuse_parameter(node, root, learns=False)
            raise refused(
                node,
                f"an in-place write to {written} through a view",
                "writes to whole tensors or slices",
                "use x = torch.where(mask, value, x), torch.cat or torch.stack, or write to x[a:b] itself",
            )
        made = [name]
        for view, base in itertools.pairwise(chain):
            whole = view in self._graph.whole
            made.append(made[-1] if whole else self._scatter(node, self._graph.views[view], base, made[-1]))
        for old, new in zip(chain, made, strict=True):
            self._graph.rename(old, new)
        for view, base, new in zip(chain, made[1:], made[:-1], strict=False):
            if view not in self._graph.whole:
                self._graph.views[new] = _of(self._graph.views[view], base)
            self._graph.root[new] = made[-1]
        self._note_write(node, root, made[-1])

    def _scatter(self, node: fx.Node, view: Operator, base: str, name: str) -> str:
        """`base` with the tensor `name` where `view` looks; of complex tensors both parts, as torch has
        derivatives of such writes for real ones alone."""
        if (undo := facts_of(view.target).undo) is not None:
            target, after = undo(view.args[1:], self._graph.specs[base].shape)
            spec = replace(self._graph.specs[name], shape=self._graph.specs[base].shape)
            return self._graph.add(node, target, (Ref(name), *after), spec)
        requires_grad = self._graph.specs[base].requires_grad or self._graph.specs[name].requires_grad
        spec, rest = replace(self._graph.specs[base], requires_grad=requires_grad), view.args[1:]
        if not spec.dtype.is_complex:
            return self._graph.add(node, facts_of(view.target).put_back, (Ref(base), Ref(name), *rest), spec)
        parts = [Ref(self._both_parts(node, each)) for each in (base, name)]
        rest = (*(dim % len(spec.shape) for dim in rest[:1]), *rest[1:])
        pairs = self._graph.add(node, facts_of(view.target).put_back, (*parts, *rest), _in_pairs(spec))
        return self._graph.add(node, aten.view_as_complex.default, (Ref(pairs),), spec)

    def _both_parts(self, node: fx.Node, name: str) -> str:
        """The real and imaginary parts of a complex tensor, as a last dim."""
        spec = self._graph.specs[name]
        told = self._graph.add(
            node, aten.resolve_conj.default, (Ref(name),), spec
        )  # else conjugates are only noted
        return self._graph.add(node, aten.view_as_real.default, (Ref(told),), _in_pairs(spec))

    def copied(self, node: fx.Node, source: Ref, spec: TensorSpec) -> Call:
        """The call that gives `source` as a tensor like `spec`; aten.copy has no derivative."""
        given = self._graph.specs[source.name]
        if given.shape != spec.shape:
            source = Ref(
                self._graph.add(
                    node, aten.expand.default, (source, [*spec.shape]), replace(given, shape=spec.shape)
                )
            )
        if given.dtype == spec.dtype:
            return Call(aten.clone.default, (source,), {})
        return Call(aten._to_copy.default, (source,), {"dtype": spec.dtype})

    def _note_write(self, node: fx.Node, written: str, name: str) -> None:
        """Note the value of a buffer after the step, or of a frozen parameter; raises TraceError for another
        input."""
        owner = next((buffer for buffer, value in self._graph.writes.items() if value == written), written)
        if owner in self._graph.inputs:
            self._refuse_parameter(node, owner, learns=self._graph.specs[name].requires_grad)
            if self._graph.inputs[owner].kind not in (InputKind.BUFFER, InputKind.PARAMETER):
                raise refused(
                    node,
                    f"an in-place write to the input {owner}",
                    "writes to what forward makes",
                    "write to a copy, as by x = x.clone() before",
                )
            self._graph.writes[owner] = name

    def _refuse_parameter(self, node: fx.Node, owner: str, *, learns: bool) -> None:
        """Raise TraceError for a write to a parameter if that, or what is written, `learns`.

        In whatever way forward came to its memory.
        """
        given = self._graph.inputs.get(owner)
        if given is None or given.kind is not InputKind.PARAMETER:
            return
        if learns or given.spec.requires_grad:
            raise refused(
                node,
                f"an in-place write to parameter {given.target}",
                "parameters that forward only reads, or writes without gradients to frozen ones",
                "compute with new values (F.linear(x, weight * mask)), update it outside of forward under "
                "torch.no_grad(), freeze it by requires_grad_(False), or keep it by register_buffer",
            )

    def _views(self, value: Any, root: str, written: Sequence[str]) -> bool:
        return (
            isinstance(value, Ref) and value.name not in written and self._graph.root.get(value.name) == root
        )


def _in_pairs(spec: TensorSpec) -> TensorSpec:
    """A complex tensor's real and imaginary parts, as pairs in a last dim."""
    return replace(spec, shape=(*spec.shape, 2), dtype=spec.dtype.to_real())


def _of(view: Operator, base: str) -> Operator:
    """A view like `view`, of another tensor."""
    return replace(view, args=(Ref(base), *view.args[1:]))
