"""autopar: auto-parallelization of PyTorch models across batch, domain, model and pipeline stages."""

__version__ = "0.1.0"

from autopar.api import compare, parallelize, plan, timeline
from autopar.cluster import ClusterSpec, Link
from autopar.core.mesh import Mesh
from autopar.errors import AutoparError
from autopar.results.plan import Plan
from autopar.runtime.module.parallel_module import ParallelModule

__all__ = [
    "AutoparError",
    "ClusterSpec",
    "Link",
    "Mesh",
    "ParallelModule",
    "Plan",
    "compare",
    "parallelize",
    "plan",
    "timeline",
]
