"""How many devices should I use? The best plan on more and more of them, for the same batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.cluster import ClusterSpec
from autopar.errors import InfeasibleError, InputError
from autopar.planning.strategies_beside import reason_of
from autopar.results.comparison.scaling import Scaled, Scaling
from autopar.results.plan.plan import Plan


def scale(clusters: Sequence[ClusterSpec], plan: Callable[[ClusterSpec], Plan]) -> Scaling:
    """The best plan on each cluster; one without says why. Raises its error where no cluster has a plan."""
    rows, errors = [], []
    for cluster in clusters:
        found, reason = None, None
        try:
            found = plan(cluster)
        except (InfeasibleError, InputError) as error:
            reason = reason_of(error)
            errors.append(error)
        rows.append(Scaled(cluster.num_devices, cluster.devices, found, reason))
    if len(errors) == len(rows):
        raise errors[-1]
    return Scaling(tuple(rows))
