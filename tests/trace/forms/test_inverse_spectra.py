"""The inverse short-time Fourier transform by its parts is torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.cluster import ClusterSpec
from autopar.core.force import Parallelism
from autopar.planning.asked.request import Request
from autopar.proof.check import check
from autopar.trace.forms.inverse_spectra import inverse_spectra
from autopar.trace.target import Target

WINDOW = torch.hann_window(8, dtype=torch.float64)
OPTIONS: list[dict[str, Any]] = [
    {"window": WINDOW},
    {"window": WINDOW, "hop_length": 3, "length": 50},
    {"window": WINDOW, "length": 70},
    {"window": WINDOW[:6] + 0.1, "win_length": 6, "hop_length": 4, "normalized": True},
    {"window": WINDOW + 0.1, "center": False},
    {"onesided": False},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("shape", [(60,), (2, 60)])
def test_signals_are_torchs(options: dict[str, Any], shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    given = {name: value for name, value in options.items() if name != "length"}
    spectra = torch.stft(x, 8, return_complex=True, **given) * (1.5 + 0.5j)
    torch.testing.assert_close(inverse_spectra(spectra, 8, **options), torch.istft(spectra, 8, **options))


class Masked(nn.Module):
    """A mask of spectra, as separators of sources learn it."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Linear(5, 5)
        self.register_buffer("window", WINDOW.clone())

    def forward(self, x: Tensor) -> Tensor:
        spectra = torch.stft(x, 8, 4, window=self.window, return_complex=True)
        mask = self.mask(spectra.abs().mT).sigmoid().mT
        return (torch.istft(spectra * mask, 8, 4, window=self.window, length=60) - x).square().mean()


def test_a_mask_of_spectra_learns_as_in_the_serial_model() -> None:
    target = Target(Masked().double(), (torch.randn(4, 60, dtype=torch.float64),), {}, None, "")
    request = Request(measure=False, force=Parallelism.BATCH)
    report = check(target, ClusterSpec.local(2), request, steps=2, changes=0)
    assert report.passed, report
