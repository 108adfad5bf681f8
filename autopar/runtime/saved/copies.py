"""Copies between a device and its host, on a stream beside the one that computes.

    computes    op 0 -------- op 1 -------- waits -- op 2
    beside            begun ==================^

A copy begins after all that the stream which computes has been told so far, since its memory may be that of
something that is still read. On CPUs nothing runs beside: a copy is made at once.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


class StartedCopy:
    """A copy that is under way. Its ends stay where they are until it is over, waited for or forgotten."""

    def __init__(self, target: Tensor, source: Tensor, device: torch.device) -> None:
        """Copy `source` to `target`; one of them lies on `device`, the other on its host."""
        self.target, self._source = target, source
        self._complete: torch.cuda.Event | None = None
        if device.type == "cpu":
            target.copy_(source)
        else:
            self._complete = begin_copy(target, source, device)

    def __call__(self) -> Tensor:
        """The copy, complete: its host waits, too, so that either end may be written from now on."""
        self._end()
        return self.target

    def _end(self) -> None:
        if self._complete is not None:
            self._complete.synchronize()
            self._complete = None

    def __del__(self) -> None:
        self._end()


def begin_copy(target: Tensor, source: Tensor, device: torch.device) -> torch.cuda.Event:
    """Begin a copy on the stream beside, after all that the one that computes has been told so far."""
    stream = beside(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        complete: torch.cuda.Event = stream.record_event()
    return complete


@cache
def beside(device: torch.device) -> torch.cuda.Stream:
    """The stream on which copies run."""
    return torch.cuda.Stream(device)


def wait(complete: torch.cuda.Event | None, device: torch.device) -> None:
    """Let the stream that computes wait for a copy."""
    if complete is not None:
        torch.cuda.current_stream(device).wait_event(complete)
