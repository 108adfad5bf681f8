"""What ranks of neighbouring stages tell each other where their meshes are unlike: part to part.

    stage 0, mesh 1         stage 1, mesh 3
    r0  rows 0 to 5  -----> r1  rows 0 1       each receiving rank gets what it has of the value
                     -----> r2  rows 2 3       from those that own it; what a value is a sum of
                     -----> r3  rows 4 5       is sent by all, and added where it arrives

Gradients go back by messages of their own, as B is to be summed of them, and P is alike everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.core.part import Part


@dataclass(frozen=True, slots=True)
class StageMessage:
    """What one rank sends to one of a neighbouring stage, or receives from it: `part` of its own piece of
    the value of that number; `peer` is the other's place in its mesh."""

    value: int
    peer: int
    part: Part


@dataclass(frozen=True, slots=True)
class StageBorders:
    """The messages of a rank in each micro-batch: values that are received from the stage before and sent to
    the next, gradients that are received back from the next and sent back to the one before."""

    received: tuple[StageMessage, ...] = ()
    sent: tuple[StageMessage, ...] = ()
    received_back: tuple[StageMessage, ...] = ()
    sent_back: tuple[StageMessage, ...] = ()
