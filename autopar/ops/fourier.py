"""Discrete Fourier transforms, and what goes between real and complex tensors.

rfft2   "d0 d1 t0. t1. -> d0 d1 f0. f1."      the dims that are transformed stay whole
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from autopar.sharding.equation import Equation, Kind, Labels
from autopar.sharding.rule import Instance, Rule, Sample, register
from autopar.torch_seams.schemas import schema_of

aten = torch.ops.aten

_LINEAR = (frozenset({0}),)


@register
class Fourier(Rule):
    """Transforms of one dim, of two, and of any, which may change its length."""

    targets = (
        *(aten.fft_fft.default, aten.fft_ifft.default, aten.fft_rfft.default, aten.fft_irfft.default),
        *(aten.fft_hfft.default, aten.fft_ihfft.default),
        *(aten.fft_fft2.default, aten.fft_ifft2.default, aten.fft_rfft2.default, aten.fft_irfft2.default),
        *(aten.fft_fftn.default, aten.fft_ifftn.default, aten.fft_rfftn.default, aten.fft_irfftn.default),
    )

    def equation(self, op: Instance) -> Equation:
        whole, rank = self.transformed(op), len(op.shape())
        before = tuple(f"t{dim}" if dim in whole else f"d{dim}" for dim in range(rank))
        after = tuple(f"f{dim}" if dim in whole else f"d{dim}" for dim in range(rank))
        kinds = {label: Kind.WHOLE for dim in whole for label in (f"t{dim}", f"f{dim}")}
        return Equation((before,), (after,), kinds, linear=_LINEAR)

    def transformed(self, op: Instance) -> set[int]:
        """All dims unless some are named, or as many lengths: of the last ones then."""
        rank, dims = len(op.shape()), op["dim"]
        if isinstance(dims, int):
            return {op.dim(dims)}
        if dims is None:
            return set(range(rank - len(op["s"]) if op["s"] else 0, rank))
        return {op.dim(dim) for dim in dims}

    def samples(self) -> Iterable[Sample]:
        x = torch.randn(3, 4, 5, 6)
        z = x.to(torch.cfloat)
        yield Sample(aten.fft_rfft.default, (x,))
        yield Sample(aten.fft_rfft.default, (x, 7, 1))
        yield Sample(aten.fft_irfft.default, (z, 9, -2))
        yield Sample(aten.fft_fft.default, (z, None, 2), {"norm": "ortho"})
        yield Sample(aten.fft_rfft2.default, (x,))
        yield Sample(aten.fft_irfft2.default, (z, [8, 7]))
        yield Sample(aten.fft_fftn.default, (x, None, [1, 3]))
        yield Sample(aten.fft_irfftn.default, (z, [4, 5, 6]))


@register
class Complex(Rule):
    """Real and imaginary part as a last dim of length 2, or one of them; the conjugate."""

    targets = (
        *(aten.view_as_real.default, aten.view_as_complex.default, aten.real.default, aten.imag.default),
        *(aten.conj.default, aten._conj.default, aten.resolve_conj.default),
    )

    def equation(self, op: Instance) -> Equation:
        def labels(shape: tuple[int, ...], *, pairs: bool) -> Labels:
            return (*(f"d{dim}" for dim in range(len(shape) - pairs)), *(("pair",) if pairs else ()))

        name = schema_of(op.operator.target).name.split("::")[1]
        operand = labels(op.shape(), pairs=name == "view_as_complex")
        result = labels(op.result_shape(), pairs=name == "view_as_real")
        return Equation((operand,), (result,), {"pair": Kind.WHOLE}, linear=_LINEAR)

    def samples(self) -> Iterable[Sample]:
        z = torch.randn(3, 4, 5, dtype=torch.cfloat)
        yield Sample(aten.view_as_real.default, (z,))
        yield Sample(aten.view_as_complex.default, (torch.randn(3, 4, 2),))
        yield Sample(aten.real.default, (z,))
        yield Sample(aten.imag.default, (z,))
        yield Sample(aten.conj.default, (z,))
