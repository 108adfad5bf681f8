"""Losses: scalars that are global although the samples are sharded.

A sum over a sharded factor leaves as a partial sum. A mean divides by the *global* count, and a
cross-entropy with `ignore_index` or class weights by the global weight of the kept labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from autopar.core.operator_facts import declare
from autopar.ops.indexing import local_index
from autopar.ops.softmax import shifted, sum_of_exponentials
from autopar.sharding.atoms import Atoms
from autopar.sharding.equation import Equation, Kind, Labels
from autopar.sharding.rule import Handle, Instance, Rule, Sample, Site, register
from autopar.sharding.statistics import narrowed, widened
from autopar.torch_seams.schemas import schema_of

aten = torch.ops.aten
_NONE, _MEAN, _SUM = 0, 1, 2  # at::Reduction


@register
class ElementwiseLoss(Rule):
    """Losses of prediction and target of one shape, weighted, then a mean or a sum. Weights are broadcast to
    it."""

    targets = (
        aten.mse_loss.default,
        aten.l1_loss.default,
        aten.smooth_l1_loss.default,
        aten.huber_loss.default,
        aten.binary_cross_entropy_with_logits.default,
        aten.binary_cross_entropy.default,
        aten.kl_div.default,
        aten.poisson_nll_loss.default,
        aten.soft_margin_loss.default,
        aten.hinge_embedding_loss.default,
        aten.margin_ranking_loss.default,
    )

    def equation(self, op: Instance) -> Equation:
        shapes = [op.shape(index) for index in range(len(op.operands))]
        full = torch.broadcast_shapes(*shapes)
        same = shapes[0] == shapes[1] == full

        def labels(shape: tuple[int, ...]) -> Labels:
            return tuple(
                f"d{dim}" if same and size == full[dim] else None
                for dim, size in enumerate(shape, start=len(full) - len(shape))
            )

        operands, everywhere = tuple(map(labels, shapes)), labels(full)
        if op["reduction"] == _NONE:
            return Equation(operands, (everywhere,))
        return Equation(operands, ((),), {label: Kind.CONTRACTED for label in everywhere if label})

    def lower(self, site: Site) -> Sequence[Any]:
        if site["reduction"] != _MEAN or not any(option.shards for option in site.strategy):
            return (site.local_call(),)
        total = site.local_call(reduction=_SUM)
        return (site.call(aten.div.Scalar, total, site.spec().numel),)

    def samples(self) -> Iterable[Sample]:
        x, y = torch.randn(3, 5, 7), torch.randn(3, 5, 7)
        yield Sample(aten.mse_loss.default, (x, y))
        yield Sample(aten.mse_loss.default, (x, y, _SUM))
        yield Sample(aten.mse_loss.default, (x, y, _NONE))
        yield Sample(aten.smooth_l1_loss.default, (x, y))
        yield Sample(aten.huber_loss.default, (x, y, _MEAN, 0.5))
        yield Sample(aten.binary_cross_entropy_with_logits.default, (x, torch.rand(3, 5, 7)))
        weights = (torch.rand(5, 1) + 0.5, torch.rand(7) + 0.5)
        yield Sample(
            aten.binary_cross_entropy_with_logits.default,
            (x, torch.rand(3, 5, 7), *weights),
            constant=("operand_2", "operand_3"),
        )
        yield Sample(aten.kl_div.default, (x.log_softmax(-1), y.softmax(-1)))
        yield Sample(aten.kl_div.default, (x.log_softmax(-1), y.softmax(-1), _SUM))
        yield Sample(aten.poisson_nll_loss.default, (x, y.exp(), True, True, 1e-8, _MEAN))
        yield Sample(aten.soft_margin_loss.default, (x, y.sign()), constant=("operand_1",))
        yield Sample(aten.hinge_embedding_loss.default, (x, y.sign()), constant=("operand_1",))
        yield Sample(aten.margin_ranking_loss.default, (x, y, y.sign(), 0.3), constant=("operand_2",))


@register
class VectorLoss(Rule):
    """Losses of pairs or triples of vectors, one for each sample, then a mean or a sum."""

    targets = (aten.triplet_margin_loss.default, aten.cosine_embedding_loss.default)

    def equation(self, op: Instance) -> Equation:
        shapes = [op.shape(index) for index in range(len(op.operands))]
        plain = len(shapes[0]) == 2 and all(shape[0] == shapes[0][0] for shape in shapes if shape)
        rows: Labels = ("n" if plain else None,)
        operands = tuple((*rows, *(None,) * (len(shape) - 1)) if shape else () for shape in shapes)
        kept = len(op.result_shape()) > 0
        return Equation(operands, (rows if kept else (),), {} if kept else {"n": Kind.CONTRACTED})

    def lower(self, site: Site) -> Sequence[Any]:
        if site["reduction"] != _MEAN or not any(option.shards for option in site.strategy):
            return (site.local_call(),)
        total = site.local_call(reduction=_SUM)
        return (site.call(aten.div.Scalar, total, site.shape()[0]),)

    def samples(self) -> Iterable[Sample]:
        x, y, z = torch.randn(5, 3), torch.randn(5, 3), torch.randn(5, 3)
        for reduction in (_MEAN, _SUM, _NONE):
            yield Sample(aten.triplet_margin_loss.default, (x, y, z, 1.0, 2.0, 1e-6, False, reduction))
        signs = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
        yield Sample(aten.cosine_embedding_loss.default, (x, y, signs, 0.2), constant=("operand_2",))


@register
class CrossEntropy(Rule):
    """Softmax and negative log-likelihood over dim 1 (or 0 without a batch).

        "n c% h w, n h w, c -> n h w"      and the mean or sum of that

    With a_c the weight of a class in a sample's loss (1 of its label; of all classes if labels are smoothed
    or probabilities; times class weights),

        loss = sum_c a_c (log sum exp x - x_c)  =  log sum exp x  sum_c a_c  -  sum_c a_c x_c

    With the classes sharded (vocabulary-parallel), every rank brings its share of these three sums, x less
    the maximum. One all-reduce P -> R adds them, and the rest is the same everywhere.
    """

    targets = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default)

    def dim(self, op: Instance) -> int:
        return 1 if len(op.shape()) > 1 else 0

    def probabilities(self, op: Instance) -> bool:
        return op.spec(1).dtype.is_floating_point

    def equation(self, op: Instance) -> Equation:
        labels = tuple("c" if here == self.dim(op) else f"d{here}" for here in range(len(op.shape())))
        rest = tuple(label for label in labels if label != "c")
        operands: tuple[Labels, ...] = (labels, labels if self.probabilities(op) else rest)
        if op.has("weight"):
            operands = (*operands, ("c",))
        kinds = {"c": Kind.STATISTIC}
        if op["reduction"] == _NONE:
            return Equation(operands, (rest,), kinds)
        return Equation(operands, ((),), kinds | dict.fromkeys(rest, Kind.CONTRACTED))

    def depth_of(self, op: Instance, equation: Equation, factor: str, atoms: Atoms) -> int:
        depth = super().depth_of(op, equation, factor, atoms)
        return min(depth, 1) if factor == "c" else depth  # a rank's classes are one range

    def lower(self, site: Site) -> Sequence[Any]:
        if not any(option.shards for option in site.strategy):
            return (site.local_call(),)
        if site.axes("c"):
            losses, weights = self.by_class(site)
            if site["reduction"] == _NONE:
                return (losses,)
            total = site.call(aten.sum.default, losses)
        elif site["reduction"] != _MEAN:
            return (site.local_call(),)
        else:
            total = site.local_call(reduction=_SUM)
            weights = None if self.probabilities(site) else self.weights(site)
        if site["reduction"] == _SUM:
            return (total,)
        if weights is None:
            return (site.call(aten.div.Scalar, total, site.spec().numel // site.shape()[self.dim(site)]),)
        # The divisor: how many labels are kept, or their class weights, on all ranks together.
        axes = [axis for axis, option in enumerate(site.strategy) if option.shards and option.factor != "c"]
        count = site.reduce(
            site.call(aten.sum.default, weights), axes, target=torch.ops.autopar.p_to_r.default
        )
        return (site.call(aten.div.Tensor, total, count),)

    def weights(self, site: Site) -> Handle:
        """The class weight of every label, 0 where it is ignored."""
        target = site.values[1]
        kept = site.call(aten.ne.Scalar, target, int(site["ignore_index"]))
        if site.has("weight"):
            safe = site.call(aten.mul.Tensor, target, kept)
            weight = site.call(aten.index.Tensor, site.call(aten.detach.default, site.values[2]), [safe])
            return site.call(aten.mul.Tensor, weight, kept)
        return site.call(aten.to.dtype, kept, site.spec().dtype)

    def by_class(self, site: Site) -> tuple[Handle, Handle | None]:
        """Every sample's loss, and its label's weight if it has one; the same on all ranks that share the
        classes."""
        dim, axes, target = self.dim(site), site.axes("c"), site.values[1]
        value, normal = widened(site, site.values[0]), "cross_entropy" in schema_of(site.operator.target).name
        shares: list[Handle] = []
        if normal:
            value, _ = shifted(site, value, [dim], axes)
            shares.append(site.call(aten.squeeze.dim, sum_of_exponentials(site, value, [dim]), dim))
        labelled = not self.probabilities(site)
        shares += self.of_labels(site, value) if labelled else self.of_probabilities(site, value)
        stacked = site.call(aten.stack.default, shares)
        total = site.reduce(stacked, axes, target=torch.ops.autopar.p_to_r.default)
        queue = iter([site.call(aten.select.int, total, 0, index) for index in range(len(shares))])
        normaliser = site.call(aten.log.default, next(queue)) if normal else None
        losses = site.call(aten.neg.default, next(queue))
        weights = list(queue)
        if normaliser is not None:
            weighted = site.call(aten.mul.Tensor, normaliser, weights[0]) if weights else normaliser
            losses = site.call(aten.add.Tensor, losses, weighted)
        if not labelled:
            return narrowed(site, losses), None
        ignored = site.call(aten.eq.Scalar, target, int(site["ignore_index"]))
        kept = weights[-1] if weights else site.call(aten.ones_like.default, losses)
        kept, losses = self._own(site, kept, ignored), self._own(site, losses, ignored)
        return narrowed(site, losses), narrowed(site, kept)

    def of_labels(self, site: Site, value: Handle) -> list[Handle]:
        """The rank's shares of sum a x, with a the weights of classes in a loss; of sum a; and of the label's
        class weight. Without class weights both are 1, and left out."""
        dim, weights = self.dim(site), None
        if site.has("weight"):  # of labels torch has no gradient for it
            weights = self._of_classes(site, site.call(aten.detach.default, site.values[2]))
        local, foreign = local_index(site, site.values[1], 0, dim)
        index = site.call(aten.unsqueeze.default, local, dim)
        picked = site.call(aten.squeeze.dim, site.call(aten.gather.default, value, dim, index), dim)
        found = [self._own(site, picked, foreign)]
        if weights is not None:
            flat = site.call(aten.flatten.using_ints, weights)
            kept = self._own(site, site.call(aten.index.Tensor, flat, [local]), foreign)
            found = [site.call(aten.mul.Tensor, found[0], kept), kept]
        smooth = float(site.arguments.get("label_smoothing") or 0.0)
        return [*self._smoothed(site, found, value, weights, smooth), *found[1:]] if smooth else found

    def _smoothed(
        self, site: Site, of_label: list[Handle], value: Handle, weights: Handle | None, smooth: float
    ) -> list[Handle]:
        """The shares of a label and of all classes alike, mixed."""
        share = smooth / site.shape()[self.dim(site)]
        everywhere = []
        if weights is not None:
            value = site.call(aten.mul.Tensor, value, weights)
            everywhere = [site.call(aten.mul.Scalar, site.call(aten.sum.default, weights), share)]
        alike = site.call(aten.sum.dim_IntList, value, [self.dim(site)])
        everywhere.insert(0, site.call(aten.mul.Scalar, alike, share))
        mine = [site.call(aten.mul.Scalar, each, 1 - smooth) for each in of_label]
        return [site.call(aten.add.Tensor, *pair) for pair in zip(mine, everywhere, strict=True)]

    def of_probabilities(self, site: Site, value: Handle) -> list[Handle]:
        """The rank's shares of sum a x and of sum a, as of labels."""
        dim, smooth, weight = self.dim(site), float(site["label_smoothing"]), widened(site, site.values[1])
        if smooth:
            weight = site.call(aten.mul.Scalar, weight, 1 - smooth)
            weight = site.call(aten.add.Scalar, weight, smooth / site.shape()[dim])
        if site.has("weight"):
            weight = site.call(aten.mul.Tensor, weight, self._of_classes(site, site.values[2]))
        products = site.call(aten.mul.Tensor, weight, value)
        return [site.call(aten.sum.dim_IntList, each, [dim]) for each in (products, weight)]

    def _of_classes(self, site: Site, weight: Handle) -> Handle:
        """The rank's class weights, shaped to meet the logits."""
        after = len(site.shape()) - self.dim(site) - 1
        return site.call(aten.reshape.default, widened(site, weight), [-1, *[1] * after])

    def _own(self, site: Site, value: Handle, others: Handle) -> Handle:
        return site.call(aten.masked_fill.Scalar, value, others, 0.0)

    def samples(self) -> Iterable[Sample]:
        entropy, weight = aten.cross_entropy_loss.default, torch.rand(5) + 0.5
        x, y = torch.randn(6, 5) * 3 + 800, torch.tensor([0, 4, -100, 2, 2, 1])

        def weighted(*args: Any) -> Sample:
            return Sample(args[0], args[1:], constant=("operand_2",))

        yield Sample(entropy, (x, y))
        yield Sample(entropy, (x, y, None, _SUM))
        yield weighted(entropy, x, y, weight)
        yield weighted(entropy, x, y.clamp(min=0), weight, _NONE, 2)
        yield Sample(entropy, (torch.randn(3, 5, 4), torch.randint(0, 5, (3, 4)), None, _NONE))
        yield Sample(entropy, (torch.randn(4, 5, 3, 2), torch.randint(0, 5, (4, 3, 2)), None, _MEAN, 3))
        yield Sample(entropy, (torch.randn(5), torch.tensor(3)))
        yield weighted(entropy, x, y, weight, _MEAN, -100, 0.1)
        yield Sample(entropy, (x, torch.rand(6, 5).softmax(1)), constant=("operand_1",))
        yield Sample(entropy, (x, torch.rand(6, 5).softmax(1), weight, _MEAN, -100, 0.2))
        yield Sample(aten.nll_loss_nd.default, (torch.randn(6, 5), y))
        yield weighted(aten.nll_loss_nd.default, torch.randn(6, 5, 2), torch.randint(0, 5, (6, 2)), weight)
        yield weighted(aten.nll_loss.default, torch.randn(6, 5), y, weight, _SUM)


# On CPUs these write a loss for each element into the result, before it becomes their mean or sum in the
# first of its places (torch 2.13).
declare(aten.mse_loss, aten.smooth_l1_loss, aten.soft_margin_loss, whole_first=True)
declare(aten.nll_loss_forward, aten.nll_loss2d_forward, learning_results=1)  # then the sum of weights
