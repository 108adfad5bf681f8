"""The inverse short-time Fourier transform, by operators that have shapes without values.

    frames = irfft(spectra) · window        signal = Σ_frames / Σ_frames window²

where each frame adds at its place, frame t at t · hop. Torch's own asks whether the divisor is zero anywhere.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def inverse_spectra(
    input: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """Return what torch.istft gives of real signals, without its check of the sums of windows."""
    hop, width = hop_length or n_fft // 4, win_length or n_fft
    frames = input.mT[..., : n_fft // 2 + 1]
    signal = torch.fft.irfft(frames, n_fft, norm="ortho" if normalized else "backward")
    if window is None:
        window = torch.ones(width, dtype=signal.dtype, device=signal.device)
    before = (n_fft - width) // 2
    window = F.pad(window, (before, n_fft - width - before))
    count, last = frames.shape[-2], frames.shape[:-2]
    whole = n_fft + hop * (count - 1)
    added = _added((signal * window).reshape(-1, count, n_fft), hop, whole)
    shares = _added(window.square().expand(1, count, n_fft), hop, whole)
    start = n_fft // 2 if center else 0
    end = start + length if length is not None else whole - start
    found = added[:, start : min(end, whole)] / shares[:, start : min(end, whole)]
    return F.pad(found, (0, max(0, end - whole))).reshape(*last, end - start)


def _added(frames: Tensor, hop: int, whole: int) -> Tensor:
    """The sum of frames (signal, frame, time), each `hop` later than the one before."""
    size = frames.shape[-1]
    return F.fold(frames.mT, (1, whole), (1, size), stride=(1, hop)).flatten(1)
