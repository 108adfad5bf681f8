"""What is derived of a program is derived once, and remedies change nothing but what they are for."""

from __future__ import annotations

from random import Random

from autopar.core.mesh import Mesh
from autopar.cost.program.priced_program import PricedProgram
from autopar.solve.assignment.search import choose
from autopar.solve.choices.fold import fold
from autopar.solve.choices.space import build_space
from tests.solve.brute_force import blocks, random_prices


def priced() -> PricedProgram:
    graph = blocks(2)
    prices = random_prices(graph, Mesh((2,)), Random(0))
    folding = fold(graph, prices.dims)
    program = choose(graph, prices, build_space(graph, prices, folding), folding).program
    return PricedProgram(prices, program)


def test_programs_that_differ_in_remedies_share_their_values_and_their_tape() -> None:
    plain = priced()
    count = len(plain.graph.operators)
    lean = plain.remedied(recompute=((0, count),))
    leaner = lean.remedied(recompute=((0, count // 2), (count // 2, count)))
    assert lean.values is leaner.values is plain.values
    assert lean.tape is leaner.tape is plain.tape
    assert lean.operator_prices is plain.operator_prices
    assert lean.cost.backward > plain.cost.backward and lean.cost.forward == plain.cost.forward
    assert lean.peak.saved < plain.peak.saved


def test_each_derived_value_is_that_of_the_program_by_itself() -> None:
    plain = priced()
    for each in (plain, plain.remedied(recompute=((0, 2),)), plain.remedied(recompute=((0, 2),)).plain):
        alone = PricedProgram(plain.prices, each.program)
        assert (alone.cost, alone.peak, alone.tape) == (each.cost, each.peak, each.tape)
        assert alone.seconds == each.seconds == each.cost.weighted(plain.prices.step_weight)


def test_without_a_change_there_is_no_other_program() -> None:
    plain = priced()
    assert plain.plain is plain and plain.remedied(recompute=()) is plain
    lean = plain.remedied(recompute=((0, 2),))
    assert lean.remedied(offload=()) is lean
    assert lean.plain.program == plain.program and lean.program.recompute == ((0, 2),)
