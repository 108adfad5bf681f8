"""What a device does that torch has no public name for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from autopar.torch_seams.required import required

with required():
    sleep_on_gpu: Callable[[int], None] = torch.cuda._sleep
    """Keep the GPU busy for so many cycles, while calls are put into its queue."""
