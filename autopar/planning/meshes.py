"""Which meshes a plan may have."""

from __future__ import annotations

from autopar.cluster import ClusterSpec
from autopar.core.force import name_of
from autopar.core.mesh import Mesh
from autopar.errors import InfeasibleError
from autopar.planning.asked.request import Request


def meshes_of(cluster: ClusterSpec, request: Request) -> list[Mesh]:
    """The mesh that is asked for, or all that have an axis for each kind or factor that is forced."""
    if request.mesh:
        return [request.mesh]
    kinds, pins = request.force, request.pins or {}
    counts = {len(pin) for pin in pins.values()}
    if isinstance(kinds, tuple):
        counts.add(len(kinds))
    fitting = [mesh for mesh in cluster.meshes() if counts <= {len(mesh.shape)}]
    if not fitting:
        wanted = " and ".join(map(str, sorted(counts)))
        raise InfeasibleError(
            where=f"--force {name_of(kinds)}" if isinstance(kinds, tuple) else f"force[{', '.join(pins)}]",
            found=f"no mesh of {wanted} axes",
            wanted=f"{wanted} axes of two or more devices each",
            remedy="use more devices, or one kind of parallelism"
            if isinstance(kinds, tuple)
            else "give as many factors for each name as a mesh has axes",
        )
    return fitting
