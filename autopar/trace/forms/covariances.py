"""Covariances and correlations of rows, by operators that have shapes without values.

    C = (X - mean)(X - mean)ᴴ / (n - correction)        R = C / √(diag C diag Cᵀ)

of n observations. Torch's own asks whether the divisor is above zero.
"""

from __future__ import annotations

import torch
from torch import Tensor


def covariance(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    """Return what torch.cov gives of variables in rows; of weights torch itself asks for values."""
    if fweights is not None or aweights is not None or input.dim() > 2:
        return torch.cov(input, correction=correction, fweights=fweights, aweights=aweights)
    rows = input.reshape(1, -1) if input.dim() < 2 else input
    if not (rows.is_floating_point() or rows.is_complex()):
        rows = rows.to(torch.get_default_dtype())
    centred = rows - rows.mean(1, keepdim=True)
    return (centred @ centred.mH / max(rows.shape[1] - correction, 0)).squeeze()


def correlation(input: Tensor) -> Tensor:
    """Return what torch.corrcoef gives of variables in rows, without the check of torch.cov."""
    found = covariance(input)
    if found.dim() == 0:
        return found / found
    deviations = found.diagonal().real.sqrt() if found.is_complex() else found.diagonal().sqrt()
    scaled = found / deviations[:, None] / deviations
    if found.is_complex():
        return torch.complex(scaled.real.clip(-1, 1), scaled.imag.clip(-1, 1))
    return scaled.clip(-1, 1)
