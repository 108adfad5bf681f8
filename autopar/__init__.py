"""autopar: auto-parallelization of PyTorch models across batch, domain, model and pipeline stages.

What is exported here is imported when it is first used: the command line tells help and wrong words
without torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from autopar.core.version import VERSION
from autopar.torch_seams.torch_version import check_torch

if TYPE_CHECKING:
    from autopar.api import compare, explain, parallelize, plan, report, timeline
    from autopar.cluster import ClusterSpec, Link
    from autopar.core.mesh import Mesh
    from autopar.errors import AutoparError
    from autopar.planning.asked.options import PlanOptions
    from autopar.proof.declared import verify_operator
    from autopar.results.plan.plan import Plan
    from autopar.runtime.module.parallel_module import ParallelModule
    from autopar.runtime.module.pretrained import load_pretrained, save_pretrained
    from autopar.runtime.module.saves import finish_saves, load, save
    from autopar.runtime.module.steps import steps
    from autopar.runtime.module.whole_model import full
    from autopar.sharding.declared import register
    from autopar.sharding.vertex_order import order_vertices
    from autopar.trace.forms.linear_loss import linear_cross_entropy
    from autopar.trace.forms.linear_scan import scan
    from autopar.updates.rules import every, gossip, server, stale, summed

__all__ = [
    "AutoparError",
    "ClusterSpec",
    "Link",
    "Mesh",
    "ParallelModule",
    "Plan",
    "PlanOptions",
    "compare",
    "every",
    "explain",
    "finish_saves",
    "full",
    "linear_cross_entropy",
    "gossip",
    "load",
    "load_pretrained",
    "order_vertices",
    "parallelize",
    "plan",
    "register",
    "report",
    "save",
    "save_pretrained",
    "scan",
    "server",
    "steps",
    "stale",
    "summed",
    "timeline",
    "verify_operator",
]
__version__ = VERSION
_MODULE_OF = {
    "AutoparError": "autopar.errors",
    "ClusterSpec": "autopar.cluster",
    "Link": "autopar.cluster",
    "Mesh": "autopar.core.mesh",
    "ParallelModule": "autopar.runtime.module.parallel_module",
    "Plan": "autopar.results.plan.plan",
    "PlanOptions": "autopar.planning.asked.options",
    "compare": "autopar.api",
    "every": "autopar.updates.rules",
    "explain": "autopar.api",
    "finish_saves": "autopar.runtime.module.saves",
    "full": "autopar.runtime.module.whole_model",
    "linear_cross_entropy": "autopar.trace.forms.linear_loss",
    "gossip": "autopar.updates.rules",
    "load": "autopar.runtime.module.saves",
    "load_pretrained": "autopar.runtime.module.pretrained",
    "order_vertices": "autopar.sharding.vertex_order",
    "parallelize": "autopar.api",
    "plan": "autopar.api",
    "register": "autopar.sharding.declared",
    "report": "autopar.api",
    "save": "autopar.runtime.module.saves",
    "save_pretrained": "autopar.runtime.module.pretrained",
    "scan": "autopar.trace.forms.linear_scan",
    "server": "autopar.updates.rules",
    "steps": "autopar.runtime.module.steps",
    "stale": "autopar.updates.rules",
    "summed": "autopar.updates.rules",
    "timeline": "autopar.api",
    "verify_operator": "autopar.proof.declared",
}


def __getattr__(name: str) -> Any:
    """PEP 562: an exported name, or a module of the package."""
    if name in _MODULE_OF:
        check_torch()
        value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
        return value
    if not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The API alone: modules and what this file imports are found by those who know of them."""
    return sorted([*__all__, "__version__"])
