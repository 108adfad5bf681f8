"""Who mixes with whom, and by what weights: matrices whose rows and columns sum to 1, so that the mean stays.

ring of 4                       exponential, at steps 0, 1, 0, 1 ...
    1/3 1/3  0  1/3                 1/2  0   0  1/2       1/2  0  1/2  0
    1/3 1/3 1/3  0                  1/2 1/2  0   0         0  1/2  0  1/2
     0  1/3 1/3 1/3                  0  1/2 1/2  0        1/2  0  1/2  0
    1/3  0  1/3 1/3                  0   0  1/2 1/2        0  1/2  0  1/2
"""

from __future__ import annotations

from typing import Any

import networkx as nx

from autopar.errors import InputError, show_value

RING, EXPONENTIAL = "ring", "exponential"
Graph = tuple[tuple[int, int], ...]


def read_graph(pairs: Any, islands: int | None = None) -> Graph:
    """Pairs of islands, of which there are so many if that is known.

    Raises InputError for other values, an island by itself, or islands that no path joins: their means would
    part.
    """
    try:
        graph = tuple((int(a), int(b)) for a, b in pairs) if not isinstance(pairs, str) else ()
    except (TypeError, ValueError):
        graph = ()
    if not graph or any(a == b or min(a, b) < 0 for a, b in graph):
        raise InputError(
            where="updates, neighbours",
            found=show_value(pairs),
            wanted=f'"{RING}", "{EXPONENTIAL}", or pairs of different islands',
            remedy="write gossip([(0, 1), (1, 2)]) for a line of three",
        )
    known = nx.Graph(list(graph))
    if islands is not None:
        known.add_nodes_from(range(islands))
    beyond = [island for island in known if islands is not None and island >= islands]
    if beyond or (islands is not None and not nx.is_connected(known)):
        parts = sorted(sorted(part) for part in nx.connected_components(known))
        raise InputError(
            where="updates, neighbours",
            found=f"island {beyond[0]} of {islands}" if beyond else f"islands that no path joins: {parts}",
            wanted=f"pairs that join islands 0 to {islands - 1 if islands else 0}",
            remedy="add pairs, or leave out those that aren't there",
        )
    return graph


def weights(neighbours: str | Graph, islands: int, step: int) -> tuple[dict[int, float], ...]:
    """For each island the weights of those that it mixes at `step`, itself included; 0 is the first step.

    Pairs have Metropolis and Hastings' weights, 1 / (1 + the larger degree).
    """
    if neighbours == EXPONENTIAL:
        apart = 2 ** (step % max(1, (islands - 1).bit_length()))
        return tuple({me: 0.5, (me - apart) % islands: 0.5} for me in range(islands))
    pairs = [(me, (me + 1) % islands) for me in range(islands)] if neighbours == RING else neighbours
    graph = nx.Graph(list(pairs))
    mixed: list[dict[int, float]] = []
    for me in range(islands):
        degrees = {other: max(graph.degree(me), graph.degree(other)) for other in sorted(graph.neighbors(me))}
        others = {other: 1 / (1 + degree) for other, degree in degrees.items()}
        mixed.append({me: 1 - sum(others.values()), **others})
    return tuple(mixed)
