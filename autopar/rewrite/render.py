"""A rank's program as Python that a person would sign.

def forward(
    x,                    # float32[4,16]  S(0)
    layers_0_weight,      # float32[32,16]  R
):
    # layers.0
    linear = aten.linear(x, layers_0_weight, layers_0_bias)
    p_to_r = autopar.p_to_r(linear, "a@2")
    return (p_to_r,)
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from autopar.core.placement import show
from autopar.runtime.executable import Executable, InputPart, StagedExecutable
from autopar.runtime.saved.recompute import Recomputed
from autopar.torch_seams.schemas import OpOverload, schema_of

LINE_WIDTH = 100  # columns, after which a call's arguments are wrapped
_INDENT = "    "


def render(
    graph: fx.Graph, *, layers: Mapping[str, str] | None = None, notes: Mapping[str, str] | None = None
) -> str:
    """The program as text, one call per line.

    `layers` says which module each call (by node name) belongs to, written above each group of calls;
    `notes` are comments on the placeholders (by name).
    """
    writer = _CallWriter(graph)
    lines = ["def forward(", *writer.signature(notes or {}), "):"]
    layer = None
    for node in graph.nodes:
        here = (layers or {}).get(node.name, layer)
        statement = writer.statement(node)
        if statement and node.op != "output" and here != layer:
            layer = here
            lines.append(f"{_INDENT}# {layer or 'the model itself'}")
        lines += [_INDENT + line for line in statement]
    return "\n".join(lines) + "\n"


def describe(made: Executable | StagedExecutable) -> str:
    """Describe the plan and the rank's program, or its stages' programs.

    Each input is told with its local part, its layout and its sum.
    """
    if isinstance(made, Executable):
        return f"{made.plan}\n\n{_program(made)}"
    stages = (f"# stage {each.stage}\n{_program(each)}" for each in made.stages)
    return "\n\n".join([str(made.plan), *stages])


def _program(made: Executable) -> str:
    """The program, before it the parts of it that are recomputed in backward."""
    notes = {item.name: _note(item) for item in made.inputs}
    whole = render(made.module.graph, layers=made.layers, notes=notes)
    parts = [
        render(module.body.graph, layers=made.layers).replace("def forward(", f"def {name}(  # recomputed", 1)
        for name, module in made.module.named_children()
        if isinstance(module, Recomputed) and isinstance(module.body, fx.GraphModule)
    ]
    return "\n".join([*parts, whole])


def _note(item: InputPart) -> str:
    dtype = str(item.spec.dtype).removeprefix("torch.")
    note = f"{dtype}[{','.join(map(str, item.part.shape))}]  {show(item.layout)}"
    over = ", ".join(str(gather.arguments[0]) for gather in item.gathers)
    note += f"  gathered once a step over {over}" if over else ""
    low = f" in {str(item.reduce).removeprefix('torch.')}" if item.reduce is not None else ""
    return note + (f"  gradient summed over {item.sync}{low}" if item.sync else "")


class _CallWriter:
    """Short names for all values, and every call as a statement."""

    def __init__(self, graph: fx.Graph) -> None:
        self.places = [node for node in graph.nodes if node.op == "placeholder"]
        self.names: dict[fx.Node, str] = {node: node.name for node in self.places}
        taken, counts = set(self.names.values()), Counter[str]()
        for node in graph.nodes:
            if node.op in ("call_function", "call_module") and not _users(node):
                name = base = _base(node)
                while name in taken:
                    counts[base] += 1
                    name = f"{base}_{counts[base]}"
                taken.add(name)
                self.names[node] = name

    def signature(self, notes: Mapping[str, str]) -> Iterator[str]:
        width = max((len(node.name) for node in self.places), default=0) + 1
        for node in self.places:
            note = notes.get(node.name)
            yield _INDENT + (f"{node.name + ',':<{width}}  # {note}" if note else f"{node.name},")

    def statement(self, node: fx.Node) -> list[str]:
        """The lines of a node; none if another line says it already."""
        if node.op == "placeholder" or (node.target is operator.getitem and _users(node.all_input_nodes[0])):
            return []
        if node.op == "output":
            return ["return " + self.show(node.args[0])]
        if node.target is operator.getitem:
            return [f"{self.names[node]} = {self.show(node.args[0])}[{self.show(node.args[1])}]"]
        arguments = [self.show(item) for item in node.args]
        arguments += [f"{key}={self.show(item)}" for key, item in node.kwargs.items()]
        target = node.target if node.op == "call_module" else _target(node.target)
        call = f"{self.left(node)} = {target}("
        line = f"{call}{', '.join(arguments)})"
        return (
            [line] if len(line) <= LINE_WIDTH else [call, *(f"{_INDENT}{item}," for item in arguments), ")"]
        )

    def left(self, node: fx.Node) -> str:
        """The name of a call's result, or of its several results, `_` where nobody uses one."""
        users = _users(node)
        if not users:
            return self.names[node]
        returns = schema_of(node.target).returns if isinstance(node.target, OpOverload) else ()
        count = max(len(returns), *(i + 1 for i in users))
        return ", ".join(self.names[users[i]] if i in users else "_" for i in range(count))

    def show(self, item: Any) -> str:
        match item:
            case fx.Node():
                return self.names[item]
            case str():
                return f'"{item}"'
            case tuple():
                inside = ", ".join(map(self.show, item))
                return f"({inside},)" if len(item) == 1 else f"({inside})"
            case list():
                return f"[{', '.join(map(self.show, item))}]"
            case torch.dtype():
                return str(item).removeprefix("torch.")
            case _:
                return str(item)


def _users(node: fx.Node) -> dict[int, fx.Node]:
    """The nodes that take one result of a call each; empty if the call has a single result."""
    if any(user.target is not operator.getitem for user in node.users):
        return {}
    return {int(str(user.args[1])): user for user in node.users}


def _base(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return _base(node.all_input_nodes[0])
    return _target(node.target).rpartition(".")[2]


def _target(target: Any) -> str:
    """Name the target without its overload, which the arguments tell: `aten.add`."""
    if isinstance(target, OpOverload):
        return f"{target.namespace}.{schema_of(target).name.split('::')[1]}"
    return str(getattr(target, "__name__", target))
