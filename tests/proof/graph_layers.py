"""Layers of PyTorch Geometric, each on a small graph of vertices with features, positions and edge features.

What is split: every operator of a layer that has vertices or edges runs on a rank's own, if one of its
options does that. Then the program is proved against the serial graph, and the graph against the layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.graph import Operator
from autopar.core.mesh import Mesh
from autopar.core.placement import Placement, Shard
from autopar.core.strategy import GATHERED, Option, Strategy
from autopar.errors import AutoparError
from autopar.sharding.atoms import Dims
from autopar.sharding.needed_rows import NEEDED
from autopar.sharding.strategies import is_legal, options_of
from autopar.trace.export import Traced, trace
from tests.forced_programs import force_each
from tests.proof.models import Model, serial
from tests.proof.plans import TOLERANCE, dims_of, prove
from tests.trace.graph_nets import VERTICES, edges

FEATURES, WIDTH, EDGE_FEATURES, KINDS = 6, 8, 5, 3
LONG = VERTICES - 1  # dims of at least this length are of vertices or edges
Layer = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Case:
    """How a layer is made, called, and with which inputs beside vertices and edges; the `static` of these."""

    make: Callable[[], nn.Module]
    call: Layer = lambda net, x, edge_index: net(x, edge_index)
    extra: tuple[str, ...] = ()
    static: tuple[int, ...] = ()


def inputs() -> dict[str, Tensor]:
    """What layers take beside vertices and edges."""
    generator = torch.Generator().manual_seed(0)
    count = edges().shape[1]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return {
        "x": normal(VERTICES, FEATURES),
        "weight": normal(count).abs() + 0.5,
        "features": normal(count, EDGE_FEATURES),
        "kind": torch.randint(0, KINDS, (count,), generator=generator),
        "position": normal(VERTICES, 3),
        "vertex_kind": torch.randint(0, 2, (VERTICES,), generator=generator),
        "graph": torch.arange(VERTICES) // 8,
    }


def perceptron(features: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Linear(features, WIDTH), nn.ReLU(), nn.Linear(WIDTH, out))


def _with(*names: str, static: tuple[int, ...] = ()) -> Callable[[Callable[[], nn.Module]], Case]:
    """A case whose layer takes more inputs after the edges."""
    return lambda make: Case(make, lambda net, *inputs: net(*inputs), names, static)


def convolutions() -> dict[str, Case]:
    """All convolutions of torch_geometric.nn that need no other package than it, by what they are called."""
    import torch_geometric.nn as g

    f, w = FEATURES, WIDTH
    featured, weighted = _with("features"), _with("weight")
    related = _with("kind", static=(2,))
    degrees = torch.bincount(torch.bincount(edges()[1], minlength=VERTICES))
    scalers = ["identity", "amplification", "attenuation"]
    one = (["v"], [("v", "to", "v")])

    def located(net: nn.Module, x: Tensor, edge_index: Tensor, position: Tensor) -> Tensor:
        out: Tensor = net(x, position, edge_index)
        return out

    def oriented(net: nn.Module, x: Tensor, edge_index: Tensor, position: Tensor) -> Tensor:
        out: Tensor = net(x, position, F.normalize(position), edge_index)
        return out

    def of_kinds(net: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = net({"v": x}, {("v", "to", "v"): edge_index})["v"]
        return out

    def both(net: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
        found = net({"v": x}, {("v", "to", "v"): edge_index, ("v", "of", "v"): edge_index.flip(0)})
        out: Tensor = found["v"]
        return out

    def beside(net: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = net(x, x * 2, edge_index)
        return out

    def padded(net: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = net(F.pad(x, (0, 2)), edge_index)
        return out

    def layered(net: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = net(torch.stack((F.pad(x, (0, 2)), F.pad(x, (2, 0))), 1), edge_index)
        return out

    def hetero() -> nn.Module:
        made: nn.Module = g.HeteroConv(
            {("v", "to", "v"): g.SAGEConv(f, w), ("v", "of", "v"): g.GCNConv(f, w)}
        )
        return made

    return {
        "AGNNConv": Case(lambda: g.AGNNConv()),
        "APPNP": Case(lambda: g.APPNP(3, 0.1, dropout=0.2)),
        "ARMAConv": Case(lambda: g.ARMAConv(f, w, num_stacks=2, num_layers=2)),
        "AntiSymmetricConv": Case(lambda: g.AntiSymmetricConv(f)),
        "CGConv": featured(lambda: g.CGConv(f, EDGE_FEATURES, batch_norm=True)),
        "ChebConv": Case(lambda: g.ChebConv(f, w, 3)),
        "ClusterGCNConv": Case(lambda: g.ClusterGCNConv(f, w)),
        "DNAConv": Case(lambda: g.DNAConv(8, 2, 2), layered),
        "DirGNNConv": Case(lambda: g.DirGNNConv(g.SAGEConv(f, w))),
        "EGConv": Case(lambda: g.EGConv(f, w, ["symnorm", "std", "max"], num_heads=2, num_bases=2)),
        "EdgeConv": Case(lambda: g.EdgeConv(perceptron(2 * f, w))),
        "FAConv": Case(lambda: g.FAConv(f), beside),
        "FastRGCNConv": related(lambda: g.FastRGCNConv(f, w, KINDS)),
        "FeaStConv": Case(lambda: g.FeaStConv(f, w, heads=2)),
        "FiLMConv": Case(lambda: g.FiLMConv(f, w)),
        "FiLMConv, 3 kinds": related(lambda: g.FiLMConv(f, w, KINDS)),
        "GATConv": Case(lambda: g.GATConv(f, w, heads=2)),
        "GATConv, edge features": featured(lambda: g.GATConv(f, w, heads=2, edge_dim=EDGE_FEATURES)),
        "GATv2Conv": Case(lambda: g.GATv2Conv(f, w, heads=2)),
        "GATv2Conv, edge features": featured(lambda: g.GATv2Conv(f, w, heads=2, edge_dim=EDGE_FEATURES)),
        "GCN2Conv": Case(lambda: g.GCN2Conv(f, 0.1, 0.5, 1), beside),
        "GCNConv": Case(lambda: g.GCNConv(f, w)),
        "GCNConv, weights": weighted(lambda: g.GCNConv(f, w)),
        "GENConv": Case(lambda: g.GENConv(f, w)),
        "GENConv, power mean": featured(
            lambda: g.GENConv(f, w, aggr="powermean", learn_p=True, edge_dim=EDGE_FEATURES)
        ),
        "GINConv": Case(lambda: g.GINConv(perceptron(f, w), train_eps=True)),
        "GINEConv": featured(lambda: g.GINEConv(perceptron(f, w), edge_dim=EDGE_FEATURES)),
        "GMMConv": featured(lambda: g.GMMConv(f, w, dim=EDGE_FEATURES, kernel_size=3)),
        "GPSConv": Case(lambda: g.GPSConv(8, g.GINConv(perceptron(8, 8)), heads=2), padded),
        "GatedGraphConv": Case(lambda: g.GatedGraphConv(w, 2)),
        "GeneralConv": featured(
            lambda: g.GeneralConv(f, w, in_edge_channels=EDGE_FEATURES, attention=True, heads=2)
        ),
        "GraphConv": weighted(lambda: g.GraphConv(f, w)),
        "HANConv": Case(lambda: g.HANConv(f, w, one, 2), of_kinds),
        "HEATConv": _with("vertex_kind", "kind", "features", static=(2, 3))(
            lambda: g.HEATConv(f, w, 2, KINDS, 3, EDGE_FEATURES, 4, heads=2)
        ),
        "HGTConv": Case(lambda: g.HGTConv(f, w, one, 2), of_kinds),
        "HeteroConv": Case(hetero, both),
        "HypergraphConv": Case(lambda: g.HypergraphConv(f, w)),
        "LEConv": Case(lambda: g.LEConv(f, w)),
        "LGConv": Case(lambda: g.LGConv()),
        "MFConv": Case(lambda: g.MFConv(f, w)),
        "MixHopConv": Case(lambda: g.MixHopConv(f, w)),
        "NNConv": featured(lambda: g.NNConv(f, w, nn.Linear(EDGE_FEATURES, f * w))),
        "PDNConv": featured(lambda: g.PDNConv(f, w, EDGE_FEATURES, 4)),
        "PNAConv": Case(lambda: g.PNAConv(f, w, ["mean", "min", "max", "std"], scalers, degrees)),
        "PPFConv": Case(lambda: g.PPFConv(perceptron(f + 4, w)), oriented, ("position",)),
        "PointGNNConv": Case(
            lambda: g.PointGNNConv(perceptron(f, 3), perceptron(3 + f, w), perceptron(w, f)),
            located,
            ("position",),
        ),
        "PointNetConv": Case(lambda: g.PointNetConv(perceptron(f + 3, w)), located, ("position",)),
        "PointTransformerConv": Case(lambda: g.PointTransformerConv(f, w), located, ("position",)),
        "RGATConv": related(lambda: g.RGATConv(f, w, KINDS, heads=2)),
        "RGCNConv": related(lambda: g.RGCNConv(f, w, KINDS)),
        "RGCNConv, bases": related(lambda: g.RGCNConv(f, w, KINDS, num_bases=2)),
        "RGCNConv, blocks": related(lambda: g.RGCNConv(f, w, KINDS, num_blocks=2)),
        "ResGatedGraphConv": featured(lambda: g.ResGatedGraphConv(f, w, edge_dim=EDGE_FEATURES)),
        "SAGEConv": Case(lambda: g.SAGEConv(f, w)),
        **{
            f"SAGEConv, {how}": Case(lambda how=how: g.SAGEConv(f, w, aggr=how))  # type: ignore[misc]
            for how in ("max", "min", "mul", "std", "softmax", "powermean", "median")
        },
        "SGConv": Case(lambda: g.SGConv(f, w, K=2)),
        "SSGConv": Case(lambda: g.SSGConv(f, w, alpha=0.1, K=2)),
        "SignedConv": Case(
            lambda: g.SignedConv(f, w, first_aggr=True), lambda net, x, e: net(x, e, e.flip(0))
        ),
        "SimpleConv": Case(lambda: g.SimpleConv()),
        "SuperGATConv": Case(lambda: g.SuperGATConv(f, w, heads=2, is_undirected=True)),
        "SuperGATConv, eval": Case(lambda: g.SuperGATConv(f, w, heads=2).eval()),
        "TAGConv": Case(lambda: g.TAGConv(f, w)),
        "TransformerConv": featured(lambda: g.TransformerConv(f, w, heads=2, edge_dim=EDGE_FEATURES)),
        "WLConvContinuous": Case(lambda: g.WLConvContinuous()),
    }


def poolings() -> dict[str, Case]:
    """Layers after a convolution that take a vector of which graph each vertex is of."""
    import torch_geometric.nn as g

    def after(make: Callable[[], nn.Module], *, pick: Callable[[Any], Tensor] = lambda out: out) -> Case:
        def call(net: nn.ModuleDict, x: Tensor, edge_index: Tensor, graph: Tensor) -> Tensor:
            return pick(net["last"](net["first"](x, edge_index), graph))

        def both() -> nn.Module:
            return nn.ModuleDict({"first": g.GCNConv(FEATURES, WIDTH), "last": make()})

        return Case(both, call, ("graph",), (2,))

    def pooled(function: Layer) -> Case:
        def call(net: nn.Module, x: Tensor, edge_index: Tensor, graph: Tensor) -> Tensor:
            out: Tensor = function(net(x, edge_index), graph)
            return out

        return Case(lambda: g.GCNConv(FEATURES, WIDTH), call, ("graph",), (2,))

    def chosen(net: nn.ModuleDict, x: Tensor, edge_index: Tensor, graph: Tensor) -> Tensor:
        out: Tensor = net["last"](net["first"](x, edge_index), edge_index, None, graph)[0]
        return out

    def top() -> nn.Module:
        return nn.ModuleDict({"first": g.GCNConv(FEATURES, WIDTH), "last": g.TopKPooling(WIDTH)})

    return {
        "global_mean_pool": pooled(g.global_mean_pool),
        "global_max_pool": pooled(g.global_max_pool),
        "global_add_pool": pooled(g.global_add_pool),
        "AttentionalAggregation": after(lambda: g.AttentionalAggregation(nn.Linear(WIDTH, 1))),
        "Set2Set": after(lambda: g.Set2Set(WIDTH, 2)),
        "GraphNorm": after(lambda: g.GraphNorm(WIDTH)),
        "InstanceNorm": after(lambda: g.InstanceNorm(WIDTH)),
        "LayerNorm": after(lambda: g.LayerNorm(WIDTH)),
        "PairNorm": after(lambda: g.PairNorm()),
        "SortAggregation": after(lambda: g.SortAggregation(4)),
        "TopKPooling": Case(top, chosen, ("graph",), (2,)),
    }


# -- what becomes of one ----------------------------------------------------------------------------------


class Net(nn.Module):
    """A layer and how it is called."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layer, self.call = case.make(), case.call

    def forward(self, *inputs: Tensor) -> Tensor:
        out: Tensor = self.call(self.layer, *inputs)
        return out


@dataclass(frozen=True, slots=True)
class Judgement:
    """How a layer runs on two ranks: what was gathered although it has vertices or edges, and the largest
    error; or the message by which it was refused."""

    gathered: Mapping[str, int]
    error: float = 0.0
    refused: str = ""

    @property
    def word(self) -> str:
        if self.refused:
            return "refused"
        return "split" if not self.gathered else "gathered: " + ", ".join(sorted(self.gathered))


def judge(case: Case, *, ranks: int = 2) -> Judgement:
    """Run a layer on simulated ranks, split wherever it can be, and compare it with itself alone."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return _judge(case, ranks)
    finally:
        torch.set_default_dtype(before)


def _judge(case: Case, ranks: int) -> Judgement:
    torch.manual_seed(0)
    net, known = Net(case), inputs()
    tensors = [known["x"], edges(), *(known[name] for name in case.extra)]
    tensors = [each.requires_grad_(each.is_floating_point()) for each in tensors]
    net.train(net.layer.training)
    net(*tensors)  # of which lazy layers learn their sizes
    try:
        traced = trace(net, tuple(tensors), static=[f"input_{place}" for place in case.static])
    except AutoparError as error:
        return Judgement({}, refused=str(error))
    model = _model(traced, net, tensors)
    _check_alone(model, net, tensors)
    dims = dims_of(model, Mesh((ranks,)))
    gathered: Counter[str] = Counter()

    def choose(item: Operator) -> Strategy:
        chosen = _split(item, dims)
        if chosen is None and _is_long(item, dims):
            gathered[str(item.target._schema.name).partition("::")[2]] += 1
        return (chosen or _option(item, dims, GATHERED),)

    return Judgement(gathered, prove(model, force_each(model.graph, dims, choose), dims)[0])


def _model(traced: Traced, net: nn.Module, tensors: list[Tensor]) -> Model:
    given = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    given |= {f"input_{place}": tensor for place, tensor in enumerate(tensors)}
    values = {
        item.name: (given[item.target] if item.value is None else item.value).detach().clone()
        for item in traced.graph.inputs
    }
    return Model(traced.graph, values, seed=3)


def _check_alone(model: Model, net: nn.Module, tensors: list[Tensor]) -> None:
    """Outputs and gradients of the graph are those of the layer."""
    found = serial(model)
    torch.manual_seed(model.seed)
    wanted, output = net(*tensors), model.graph.outputs[0]
    torch.testing.assert_close(found[output], wanted)
    cotangent = wanted.detach().cos()
    leaves = {f"input_{place}": each for place, each in enumerate(tensors) if each.requires_grad}
    leaves |= dict(net.named_parameters())
    named = [item for item in model.graph.inputs if item.target in leaves and item.spec.requires_grad]
    ours = torch.autograd.grad(
        found[output], [found[item.name] for item in named], cotangent, allow_unused=True
    )
    theirs = torch.autograd.grad(
        wanted, [leaves[item.target] for item in named], cotangent, allow_unused=True
    )
    for mine, yours in zip(ours, theirs, strict=True):
        if mine is not None or yours is not None:
            whole = torch.zeros_like(mine if yours is None else yours)
            torch.testing.assert_close(whole if mine is None else mine, whole if yours is None else yours)


def _split(item: Operator, dims: Dims) -> Option | None:
    """An option by which vertices or edges are split, of which those with needed rows come first."""

    def is_long(name: str | None, placement: Placement) -> bool:
        if name is None or not isinstance(placement, Shard):
            return False
        return _is_of_graph(name, placement, dims)

    legal = [each for each in options_of(item, dims) if each.shards and is_legal(item, (each,), dims)]
    made = [each for each in legal if is_long(item.results[0], each.results[0])]
    taken = [each for each in legal if any(map(is_long, item.operands, each.operands))]
    needed = [each for each in made if each.factor == NEEDED]
    return next(iter((*needed, *made, *taken)), None)


def _option(item: Operator, dims: Dims, factor: str) -> Option:
    return next(each for each in options_of(item, dims) if each.factor == factor)


def _is_long(item: Operator, dims: Dims) -> bool:
    """Whether an operator takes or makes numbers that learn, for all vertices or edges."""
    return any(
        _is_of_graph(name, Shard(dim, atom), dims)
        for name in (*item.operands, *item.results)
        if name and dims.graph.specs[name].requires_grad
        for dim, atoms in enumerate(dims.atoms.of[name])
        for atom in range(len(atoms))
    )


def _is_of_graph(name: str, shard: Shard, dims: Dims) -> bool:
    """Whether what would be split are vertices or edges, not features."""
    long = dims.atoms.of[name][shard.dim][shard.atom] >= LONG
    return long and not dims.is_weight(dims.component(name, shard))


def is_right(judgement: Judgement) -> bool:
    return judgement.error < TOLERANCE
