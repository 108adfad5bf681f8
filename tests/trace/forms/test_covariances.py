"""Covariances and correlations are torch's own, of all forms of input; models that take them are traced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.core.force import Parallelism
from autopar.core.mesh import Mesh
from autopar.planning.asked.request import Request
from autopar.proof.check import check
from autopar.trace.forms.covariances import correlation, covariance
from autopar.trace.target import Target
from costdb.database import Database


@pytest.mark.filterwarnings("ignore:cov.* degrees of freedom")
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("shape", [(4, 7), (1, 7), (7,), (3, 1)])
def test_covariances_and_correlations_are_torch_s(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))
    for correction in (0, 1):
        ours, theirs = covariance(x, correction=correction), torch.cov(x, correction=correction)
        torch.testing.assert_close(ours, theirs, equal_nan=True)
    torch.testing.assert_close(correlation(x), torch.corrcoef(x), equal_nan=True)


def test_numbers_are_taken_as_floats_and_other_shapes_refused_as_by_torch() -> None:
    x = torch.arange(12).reshape(3, 4) ** 2
    torch.testing.assert_close(covariance(x), torch.cov(x))
    with pytest.raises(RuntimeError, match="two or fewer dimensions"):
        covariance(torch.zeros(2, 3, 4))


class Spread(nn.Module):
    """A loss on how features vary together, as of self-supervised learning."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x)
        together = torch.cov(z.T)
        apart = together - torch.diag(together.diagonal())
        return apart.square().sum() + torch.corrcoef(z.T).square().mean()


def test_a_model_that_takes_them_is_split() -> None:
    torch.manual_seed(0)
    target = Target(Spread(), (torch.randn(8, 6),), {}, None, "")
    request = Request(measure=False, alternatives=False, force=Parallelism.BATCH, mesh=Mesh((2,)))
    with Database.in_memory(autopar.__file__) as database:
        report = check(target, ClusterSpec.local(2), request, steps=2, processes=False, database=database)
    assert report.passed, str(report)
