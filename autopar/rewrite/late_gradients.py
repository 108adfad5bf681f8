"""Makes gradients of weights beside the exchange of their input's gradient.

    before    r_to_b x, linear                                  backward    gradients of x and w, sum
    after     start x, late_gradient w, wait x, late_linear     backward    of x, start, of w, wait

An activation that all ranks of an axis hold is converted before products whose weights they share out. Each
rank has then a part of its gradient, which is summed (`r_to_b`) or summed and scattered (`s_to_b`) over the
axis. Gradients of the weights don't depend on that sum. All products that read the converted activation wait
with theirs, as far as weights are at hand where the first one stands; until then what they make them of stays
in memory, for which there must be room.

The order of collectives is the order of before: a start stands where the exchange stood, and in backward a
sum starts as soon as it can. What decides is alike on all ranks: operators, and bytes of the fullest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from autopar.core.recompute import Segment
from autopar.rewrite.overlap import converts_activation, operators_of
from autopar.runtime import registry
from autopar.runtime.collectives.late_gradients import CONVOLUTION, LATE, LINEAR, PRODUCTS
from autopar.runtime.collectives.started_moves import START, WAIT

_MOVES = {registry.operator(name): name for name in ("r_to_b", "s_to_b")}


def make_late(
    graph: fx.Graph,
    nbytes: Callable[[int], int],
    *,
    room: float,
    steps: Mapping[str, int],
    segments: Sequence[Segment],
) -> fx.Graph:
    """A copy of `graph` whose products make gradients of weights late, where these take at most `room` bytes.

    `nbytes` are those of what an operator makes, by its number, on the rank that has most; `steps` says for
    which operator each node was written, `segments` which operators are recomputed.
    """
    recomputed = operators_of(segments)
    found = {
        node: products
        for node in graph.nodes
        if converts_activation(node, _MOVES) and steps.get(node.name, -1) not in recomputed
        if (products := _products(node, nbytes, room=room, steps=steps))
    }
    late = {product for products in found.values() for product in products}
    place = {node: number for number, node in enumerate(graph.nodes)}
    first: dict[fx.Node, list[fx.Node]] = {}
    for node in found:
        first.setdefault(min(node.users, key=place.__getitem__), []).append(node)
    copy, made, handles, weights = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node](), {}

    def copied(args: Any) -> Any:
        return fx.node.map_arg(args, lambda old: made[old])

    def wait(node: fx.Node) -> None:
        for product in found[node]:
            if not all(each in made for each in _weights(product)):
                late.discard(product)
                continue
            for each in _weights(product):
                weights[product, each] = copy.call_function(registry.operator(LATE), (made[each],))
        args = (handles[node], *copied(node.args))
        target: Any = registry.operator(WAIT + _MOVES[node.target])
        made[node] = copy.create_node("call_function", target, args, name=node.name)

    for node in graph.nodes:
        for exchange in first.get(node, ()):
            wait(exchange)
        if node in found:
            target: Any = registry.operator(START + _MOVES[node.target])
            handles[node] = copy.call_function(target, copied(node.args))
        elif node in late:
            name, args = _late(node)
            own = {old: weights.get((node, old), made[old]) for old in node.all_input_nodes}
            taken = fx.node.map_arg(args, own.__getitem__)
            target = registry.operator(name)
            made[node] = copy.create_node("call_function", target, taken, name=node.name)
        else:
            made[node] = copy.node_copy(node, lambda old: made[old])
    copy.lint()
    return copy


def _products(
    node: fx.Node, nbytes: Callable[[int], int], *, room: float, steps: Mapping[str, int]
) -> list[fx.Node]:
    """The products of the node and of weights, as many as there is room for the gradients of."""
    found: list[fx.Node] = []
    left = room
    for user in node.users:
        if user.name in steps and _is_product(user, node) and (taken := nbytes(steps[user.name])) <= left:
            found.append(user)
            left -= taken
    return found


def _is_product(user: fx.Node, node: fx.Node) -> bool:
    if user.target not in PRODUCTS or user.kwargs:
        return False
    return user.args[0] is node and node not in user.args[1:]


def _weights(product: fx.Node) -> list[fx.Node]:
    """Its weight and its bias, if it has one."""
    return [each for each in product.args[1:3] if isinstance(each, fx.Node)]


def _late(product: fx.Node) -> tuple[str, tuple[Any, ...]]:
    """The operator in the place of a product, and its arguments."""
    target: Any = product.target
    given = product.args
    x, weight, bias, *how = [*given, None][: max(3, len(given))]
    space = PRODUCTS[target]
    if space is None:
        return LINEAR, (x, weight, bias)
    all_said: list[Any] = [*how, *(1, 0, 1, 1)[len(how) :]]
    *each, groups = all_said  # stride, padding and dilation
    return CONVOLUTION, (
        x,
        weight,
        bias,
        *(_by_dim(item, space) for item in each),
        False,
        [0] * space,
        groups,
    )


def _by_dim(sizes: Any, space: int) -> list[Any]:
    """A size for each dim, where one may be said for all."""
    listed = [sizes] if isinstance(sizes, int) else list(sizes)
    return listed * space if len(listed) == 1 else listed
