"""What no mesh has a plan for, said before it is solved: too many stages, kinds that split nothing."""

from __future__ import annotations

from autopar.core.force import Force, name_of
from autopar.core.graph import Graph
from autopar.core.pipeline import stages_per_rank
from autopar.core.schedule import ScheduleKind
from autopar.cost.operators.prices import Prices
from autopar.errors import InfeasibleError, InputError
from autopar.planning.asked.request import Request
from autopar.solve.choices.kinds import Kinds, kind_by_axis
from autopar.solve.choices.space import has_sizes, split_by_force


def stageable(graph: Graph, request: Request) -> list[ScheduleKind]:
    """The schedules whose stages have an operator each; raises InputError if none are left."""
    kinds, most = request.kinds(), len(graph.operators)
    found = [kind for kind in kinds if request.pipeline_ranks * stages_per_rank(kind) <= most]
    if kinds and not found:
        least = min(request.pipeline_ranks * stages_per_rank(kind) for kind in kinds)
        raise InputError(
            where="--stages",
            found=f"{least} stages for {most} operators",
            wanted=f"at most {most}",
            remedy="use fewer stages",
        )
    return found


def check_force(graph: Graph, prices: Prices, force: Force) -> None:
    """Raise InfeasibleError for a forced kind if none of its operators has a factor as long as an axis."""
    kinds, mesh = Kinds(graph, prices.dims), prices.dims.mesh
    splitting = split_by_force(graph, prices)
    by_axis = kind_by_axis(force, mesh)
    compiled = "" if prices.groups is None else " of a compiled program, whose sizes are fixed,"
    for wanted in dict.fromkeys(by_axis):
        least = min((mesh.shape[axis] for axis in kinds.axes() if by_axis[axis] is wanted), default=1)
        lengths = [kinds.lengths(item, wanted) for item in splitting]
        fixed = (size for each in lengths for factor, size in each.items() if has_sizes(factor, prices))
        longest = max(fixed, default=0)
        if longest < least or not longest:
            raise InfeasibleError(
                where=f"--force {name_of(force)} on mesh {mesh}",
                found=f"no {wanted.value} dim longer than {longest}"
                if longest
                else f"no operator{compiled} that can be split by {wanted.value}",
                wanted=f"one of at least {least}, the size of an axis",
                remedy="choose another kind, a smaller mesh or larger inputs",
            )
