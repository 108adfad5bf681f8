"""`autopar explain`: why a plan is as it is, by solving what it is not.

plan ── its mesh, stages and micro-batches ── solved again ──┬── with layers pinned to something else
                                                             ├── without the memory cap, and with more
                                                             └── under other circumstances (planned anew)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from autopar.errors import InfeasibleError
from autopar.explaining import constraints
from autopar.explaining.asked import LEAST_PATIENCE, Asked
from autopar.explaining.data_parallel import why_not
from autopar.explaining.infeasible import remedies
from autopar.explaining.layers import DEAREST, FEW, MOST, Alternatives
from autopar.explaining.what_if import read, what_if
from autopar.planning.search import decide
from autopar.results.explanation import Explanation, LayerChoices, Outcome
from autopar.results.plan import Plan
from costdb.database import Database

ROUNDS = 3  # of measuring what was solved and solving it again, at most


def explained(asked: Asked, layer: str | None = None, circumstances: Sequence[str] = ()) -> Explanation:
    """The explanation of a plan, of one `layer` or of its dearest ones, under `circumstances` besides.

    Raises InputError for a layer that the plan doesn't have, and for circumstances that say nothing; what
    `autopar.plan` raises, unless no plan meets the memory cap: then the explanation says what to change.
    """
    for text in circumstances:
        read(text)
    name, cluster = asked.target.source, str(asked.cluster)
    begun = time.monotonic()
    try:
        plan = asked.plan(alternatives=True)
    except InfeasibleError as error:
        asked = waiting(asked, begun)
        if error.least is None and asked.options.get("memory") is None and asked.cluster.memory is None:
            raise
        found = tuple(remedies(asked, error))
        return Explanation(
            name,
            cluster,
            None,
            infeasible=f"{error.found}; wanted {error.wanted}",
            remedies=found,
            what_if=tuple(what_if(asked, text) for text in circumstances),
        )
    asked = waiting(asked, begun)
    alternatives, base, layers = solved_again(asked, plan, layer)
    return Explanation(
        name,
        cluster,
        plan,
        base=Outcome.of(base),
        layers=tuple(layers),
        memory=tuple(constraints.memory(alternatives, base)),
        options=tuple(constraints.options(asked)),
        data_parallel=why_not(asked, plan),
        what_if=tuple(what_if(asked, text) for text in circumstances),
    )


def waiting(asked: Asked, begun: float) -> Asked:
    """What is asked with the patience for other plans that the first one's seconds suggest."""
    return replace(asked, patience=max(LEAST_PATIENCE, 2 * (time.monotonic() - begun)))


def solved_again(
    asked: Asked, plan: Plan, layer: str | None
) -> tuple[Alternatives, Plan, list[LayerChoices]]:
    """A plan's own program, solved with what it pins, and with its layers split otherwise."""
    request = replace(asked.request()[0].settled(plan), alternatives=False)
    compiler, target = asked.compiler(request), asked.target
    graph = compiler.trace_step(target.model, target.args, target.kwargs).graph
    with Database.open(asked.options.get("costdb")) as database:
        decision = decide(graph, asked.cluster, request, database=database, progress=asked.progress)
        problem = decision.problem
        for number in range(ROUNDS):
            alternatives = Alternatives(problem, asked.cluster)
            base = alternatives.base()
            layers = chosen_layers(alternatives, base, layer)
            measures = request.measure and problem.model.here and number + 1 < ROUNDS
            model = problem.model
            if measures:
                model = model.measure(alternatives.calls, database, asked.progress)
            if model is problem.model:
                break
            problem = type(problem)(
                graph, problem.atoms, problem.mesh, problem.cluster, model, request, problem.cap, problem.hop
            )
    return alternatives, base, layers


def chosen_layers(alternatives: Alternatives, base: Plan, layer: str | None) -> list[LayerChoices]:
    """The named layer's operators with products, or its dearest; without a name the plan's dearest ones."""
    if layer is None:
        every = range(len(base.layers))
        indices = alternatives.dearest(base, every, DEAREST)
        return [alternatives.explained(index, base, FEW) for index in indices]
    named = alternatives.named(layer)
    heavy = [index for index in named if base.layers[index].flops] or named
    indices = alternatives.dearest(base, heavy, DEAREST)
    most = MOST if len(indices) == 1 else MOST // 2
    return [alternatives.explained(index, base, most) for index in sorted(indices)]
