"""The small program of what a relaxation chose: whole answers lie near it, and are found there soon.

    relaxed      0.4 batch  0.6 filter  0 domain  0 channel
    small        a whole one of batch and filter

Its answers are some of the whole program's, so the relaxation's bound holds for them: how far they are from
the best is known.
"""

from __future__ import annotations

from dataclasses import replace

from autopar.solve.linear_program import LinearProgram, SolverAnswer

SUPPORT = 1e-6  # the share above which a relaxation counts as having chosen something


def of_chosen(program: LinearProgram, relaxed: SolverAnswer) -> LinearProgram:
    """The program without the integer variables of which the relaxation takes nothing."""
    assert relaxed.values is not None
    uppers = [
        0.0 if whole and value <= SUPPORT else upper
        for upper, whole, value in zip(program.uppers, program.integer, relaxed.values, strict=True)
    ]
    return replace(program, uppers=uppers, solved=[])
