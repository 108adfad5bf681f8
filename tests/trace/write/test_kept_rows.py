"""Sums, means and losses of what a boolean mask keeps are those of eager code, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.mesh import Mesh
from autopar.errors import ValuesAskedError
from autopar.proof.ranks import distribute, run, total_gradient
from autopar.rewrite.rank_program import rewrite
from autopar.sharding.strategies import dims_of
from autopar.trace.export import trace
from tests.forced_programs import force_kinds, traced


class Net(nn.Module):
    """A loss of hidden values `h` [8, 4], targets `y` alike, a mask `m` alike and classes `c` [8]."""

    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.Parameter(torch.rand(4))
        self.body, self.head, self.norm, self.loss = nn.Linear(6, 4), nn.Linear(4, 5), nn.LayerNorm(4), loss

    def forward(self, x: Tensor, y: Tensor, m: Tensor, c: Tensor) -> Any:
        h = self.body(x)
        return self.loss(self, h, y, m, c) + 0 * (self.head(self.norm(h)).sum() + self.gain.sum())


def _in_a_region(net: Any, h: Tensor, y: Tensor, m: Tensor, c: Tensor) -> Tensor:
    with torch.no_grad():
        goal = (y[m] * 2).sigmoid()
    return F.binary_cross_entropy_with_logits(h[m], goal)


def _detached(rows: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        made = make(rows).mean(-1)
    return made.mean() * rows.mean()


def _added(made: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    made[mask] += h[mask].tanh()
    return made


def _put(made: Tensor, mask: Tensor, h: Tensor) -> Tensor:
    made[mask] = h[mask].tanh()
    return made


def _by_class(h: Tensor, c: Tensor, *classes: int) -> Tensor:
    """Rows of some classes, the later one's where they are the same."""
    made = torch.zeros_like(h)
    for number, each in enumerate(classes):
        made[c == each] = h[c == each] * (number + 2)
    return made


STATIC: dict[str, Callable[..., Tensor]] = {
    "mean of differences": lambda net, h, y, m, c: (h - y)[m].square().mean(),
    "sum": lambda net, h, y, m, c: h[m].tanh().sum(),
    "mse": lambda net, h, y, m, c: F.mse_loss(h[m], y[m]),
    "huber, summed": lambda net, h, y, m, c: F.huber_loss(h[m], y[m], reduction="sum"),
    "a loss for each": lambda net, h, y, m, c: F.l1_loss(h[m], y[m], reduction="none").square().mean(),
    "binary, no gradient": _in_a_region,
    "classes of rows": lambda net, h, y, m, c: F.cross_entropy(net.head(h)[m[:, 0]], c[m[:, 0]]),
    "a head on rows": lambda net, h, y, m, c: F.cross_entropy(
        net.head(h[m[:, 0]]), c[m[:, 0]], torch.arange(1.0, 6.0).double(), ignore_index=2, label_smoothing=0.1
    ),
    "likelihoods": lambda net, h, y, m, c: (
        -net.head(h).log_softmax(1)[m[:, 0]].gather(1, c[m[:, 0]][:, None]).mean()
    ),
    "select": lambda net, h, y, m, c: torch.masked_select(h, m).mean() / y.masked_select(m).exp().mean(),
    "by a sum of the mask": lambda net, h, y, m, c: h[m].sum() / m.sum(),
    "by a size": lambda net, h, y, m, c: h[m].sum() / h[m].shape[0] + h[m[:, 0]].sum() / h[m[:, 0]].numel(),
    "by a size of at least 1": lambda net, h, y, m, c: h[m].sum() / max(h[m].numel(), 1),
    "by a number of places": lambda net, h, y, m, c: h.sum() / m.nonzero().shape[0],
    "places": lambda net, h, y, m, c: h[m.nonzero(as_tuple=True)].mean() + y[torch.where(m)].sum() * h.sum(),
    "places of rows": lambda net, h, y, m, c: h[m[:, 0].nonzero().squeeze(1)].mean(),
    "two masks": lambda net, h, y, m, c: h[m & (y > 0)].mean() - h[~m].mean(),
    "equal masks": lambda net, h, y, m, c: F.smooth_l1_loss(h[(y > 0) & m], y[(y > 0) & m]),
    "layers": lambda net, h, y, m, c: net.head(net.norm(F.gelu(h[m[:, 0]]))).sum(-1).square().mean(),
    "likeness": lambda net, h, y, m, c: F.cosine_similarity(h[m[:, 0]], y[m[:, 0]]).mean(),
    "a mean of rows": lambda net, h, y, m, c: h[m[:, 0]].mean(0).square().sum(),
    "a norm": lambda net, h, y, m, c: h[m].norm(),
    "divergence": lambda net, h, y, m, c: F.kl_div(
        h[m[:, 0]].log_softmax(1), y[m[:, 0]].softmax(1), reduction="batchmean"
    ),
    "what is no number": lambda net, h, y, m, c: (h - torch.where(m, y, torch.nan)).square()[m].sqrt().mean(),
    "written": lambda net, h, y, m, c: h[m].exp_().sum(),
    "written and read": lambda net, h, y, m, c: (rows := h[m]).exp_().sum() + rows.sum(),
    "numbers but 0": lambda net, h, y, m, c: (
        h[c.nonzero().squeeze(1)].mean() + y[torch.nonzero(y.round())[:, 0]].sum()
    ),
    "added to rows": lambda net, h, y, m, c: _added(y.clone(), m[:, 0], h).square().mean(),
    "added to rows of two dims": lambda net, h, y, m, c: (
        _added(y.view(4, 2, 4).clone(), m.view(4, 2, 4)[..., 0], h.view(4, 2, 4)).square().mean()
    ),
    "put in place of rows": lambda net, h, y, m, c: (
        _put(_put(y * h, m[:, 0], h), m[:, 1], h * net.gain).square().mean()
    ),
    "put in place of what is no number": lambda net, h, y, m, c: (
        _put((y - 9).sqrt() * net.gain, torch.ones_like(c, dtype=torch.bool), h).square().mean()
    ),
    "put in place of rows of two dims": lambda net, h, y, m, c: (
        _put(y.view(4, 2, 4) * net.gain, m.view(4, 2, 4)[..., 0], h.view(4, 2, 4)).square().mean()
    ),
    "put where one class is": lambda net, h, y, m, c: _by_class(h, c, 1, 2, 0).square().mean(),
    "put twice where one class is": lambda net, h, y, m, c: _by_class(h, c, 1, 2, 1).square().mean(),
    "put where numbers are one in 8 bits": lambda net, h, y, m, c: (
        _by_class(h, c.to(torch.uint8) + 254, 255, -1, 0).square().mean()
    ),
    "added where places repeat": lambda net, h, y, m, c: (
        y.index_put((torch.where(m)[0],), h[torch.where(m)[0]], accumulate=True)
        .index_put((m[:, 0],), h[m[:, 0]], accumulate=True)
        .square()
        .mean()
    ),
    "put by the largest": lambda net, h, y, m, c: (
        _put(y * net.gain, torch.where(h.topk(2, dim=1).indices == 1)[0], h).square().mean()
    ),
    "put into nothing": lambda net, h, y, m, c: (
        _put(_put(torch.empty_like(h), m[:, 0], h), ~m[:, 0], h * net.gain).square().mean()
    ),
    "put into a view": lambda net, h, y, m, c: (made := h * net.gain, _put(made[:, 1:], m[:, 0], y[:, 1:]))[
        0
    ].sum(),
    "a logarithm of 0": lambda net, h, y, m, c: ((1 - h.sigmoid()[m[:, 0]]).log() * net.gain).mean(),
    "infinite at 1": lambda net, h, y, m, c: (h.tanh()[m[:, 0]].atanh() * net.gain).mean(),
    "rows of one number": lambda net, h, y, m, c: (
        (((r := h[m[:, 0]]) - r.mean(-1, keepdim=True)) / r.std(-1, keepdim=True) * net.gain).tanh().mean()
    ),
    "a root of 0": lambda net, h, y, m, c: (
        (d := h[m[:, 0]] - 1) * d.square().sum(-1, keepdim=True).rsqrt() * net.gain
    ).mean(),
    "nothing but -inf": lambda net, h, y, m, c: (
        h[m[:, 0]].masked_fill(~(y > y.mean())[m[:, 0]] & (c != 9)[m[:, 0], None], -torch.inf).exp()
        * net.gain
    ).mean(),
    "classes from 1, each": lambda net, h, y, m, c: (
        F.cross_entropy(net.head(h)[c > 0], c[c > 0] - 1, reduction="none").square().mean()
    ),
    "classes from 1, picked": lambda net, h, y, m, c: (
        net.head(h)[c > 0].log_softmax(-1).gather(1, (c[c > 0] - 1)[:, None]).mean()
    ),
    "classes from 1, embedded": lambda net, h, y, m, c: (
        F.embedding(c[c > 0] - 1, net.head.weight) * h[c > 0]
    ).mean(),
    "classes from 1, one-hot": lambda net, h, y, m, c: (
        (F.one_hot(c[c > 0] - 1, 5) * net.head(h)[c > 0]).square().mean()
    ),
    "divided by classes": lambda net, h, y, m, c: (
        h[c > 0] * (c[c > 0].square() // c[c > 0] % c[c > 0])[:, None]
    ).mean(),
    "rows without gradients": lambda net, h, y, m, c: _detached(h[m[:, 0]], lambda rows: rows.exp()),
    "a bound": lambda net, h, y, m, c: h[torch.ones(8, 4, dtype=torch.bool)].mean(),
}
BY_VALUES: dict[str, Callable[..., Tensor]] = {
    "an output": lambda net, h, y, m, c: h[m],
    "a maximum": lambda net, h, y, m, c: h[m].max(),
    "an order": lambda net, h, y, m, c: h[m].sort().values.sum(),
    "rows of rows": lambda net, h, y, m, c: h[m[:, 0]][:2].sum(),
    "a product of rows": lambda net, h, y, m, c: (h[m[:, 0]] @ y[m[:, 0]].T).sum(),
    "columns": lambda net, h, y, m, c: h[:, m[0]].mean(),
    "joined": lambda net, h, y, m, c: torch.cat([h[m], y[m]]).sum(),
    "draws": lambda net, h, y, m, c: F.dropout(h[m], 0.5).sum(),
    "put back": lambda net, h, y, m, c: h.masked_scatter(m, y[m]).sum(),
    "rows put into more": lambda net, h, y, m, c: (
        y.new_zeros(9, 4).index_add(0, torch.where(m[:, 0])[0], h[m[:, 0]]).sum()
    ),
    "one row put into more": lambda net, h, y, m, c: (
        y.new_zeros(9, 4).index_add(0, torch.where(m[:1, 0])[0], h[:1][m[:1, 0]]).sum()
    ),
    "a running sum without gradients": lambda net, h, y, m, c: _detached(
        h[m[:, 0]], lambda rows: rows.cumsum(0)
    ),
    "a running sum": lambda net, h, y, m, c: h[m].cumsum(0).sum(),
}


def batch(keep: bool | None = None) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    m = torch.rand(8, 4) > 0.4 if keep is None else torch.full((8, 4), keep)
    return x, y, m, torch.randint(5, (8,))


def check(model: nn.Module, args: tuple[Tensor, ...], kinds: list[str]) -> None:
    """Compare two simulated ranks with the model, gradients too."""
    graph, values = traced(model, *args)
    dims = dims_of(graph, Mesh((2,)))
    program = force_kinds(graph, dims, kinds)
    for item in graph.inputs:
        values[item.name].requires_grad_(item.spec.requires_grad)
    ours = distribute(values, program.inputs, dims)
    outputs = [out[0] for out in run([rewrite(graph, program, dims, rank=rank) for rank in (0, 1)], ours)]
    model.zero_grad()
    loss = model(*args)
    loss.backward()
    torch.autograd.backward([output / 2 for output in outputs])
    parameters = dict(model.named_parameters())
    for output in outputs:
        torch.testing.assert_close(output, loss, equal_nan=True)
    for item in graph.inputs:
        if item.target in parameters:
            mine = [local[item.name] for local in ours]
            gradient = total_gradient(item.name, mine, program.inputs[item.name], dims)
            torch.testing.assert_close(gradient, parameters[item.target].grad, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", STATIC)
def test_sums_and_means_of_what_a_mask_keeps_are_exact(name: str) -> None:
    model = Net(STATIC[name]).double()
    for kinds in (["batch"], ["filter"]):
        check(model, batch(), kinds)


def test_of_nothing_a_mean_is_no_number_and_a_sum_is_zero() -> None:
    for name in ("mse", "sum", "classes of rows"):
        check(Net(STATIC[name]).double(), batch(keep=False), ["batch"])


@pytest.mark.slow
@pytest.mark.parametrize("name", BY_VALUES)
def test_what_depends_on_how_many_there_are_is_refused(name: str) -> None:
    with pytest.raises(ValuesAskedError, match=r"values.*torch\.where"):
        trace(Net(BY_VALUES[name]).double(), batch())


def test_under_autocast_rows_are_cast_as_in_eager_code() -> None:
    def loss(net: Any, h: Tensor, y: Tensor, m: Tensor, c: Tensor) -> Tensor:
        added = _added(y.clone(), m[:, 0], h).square().mean()  # single precision, and half to be added
        return F.cross_entropy(net.head(h[m[:, 0]]), c[m[:, 0]]) + F.mse_loss(h[m], y[m]) + added

    model, (x, y, m, c) = Net(loss), batch()
    args = (x.float(), y.float(), m, c)
    with torch.autocast("cpu", torch.bfloat16):
        graph, values = traced(model, *args)
        serial = model(*args)
    dims = dims_of(graph, Mesh((2,)))
    program = force_kinds(graph, dims, ["batch"])
    ours = distribute(values, program.inputs, dims)
    for (output,) in run([rewrite(graph, program, dims, rank=rank) for rank in (0, 1)], ours):
        torch.testing.assert_close(output, serial, rtol=1e-3, atol=1e-3)
