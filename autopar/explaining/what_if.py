"""Other circumstances: `memory=40GB`, `devices=4`, `batch=64`, alone or joined by commas."""

from __future__ import annotations

from dataclasses import replace

import torch

from autopar.cluster import ClusterSpec
from autopar.core.cutting import Rows
from autopar.errors import InputError, show_value
from autopar.explaining.asked import REFUSED, AskedPlan, reason_of
from autopar.results.explanation.explanation import Change
from autopar.units import parse_bytes

WORDS = ("memory", "devices", "batch")
WHERE = "--what-if"


def what_if(asked: AskedPlan, text: str) -> Change:
    """The plan under other circumstances. Raises InputError for words that say none."""
    said = read(text)
    try:
        return changed(asked, said).change(text)
    except REFUSED as error:
        return Change(text, None, reason_of(error))


def more_of_groups(asked: AskedPlan) -> tuple[Change, ...]:
    """The plan with one more of each unlike group, which says what that would give."""
    cluster = asked.cluster
    larger = [(group, cluster.with_more(number)) for number, group in enumerate(cluster.groups)]
    what = "device" if cluster.nodes == 1 else "node"
    return tuple(
        replace(asked, cluster=spec).change(f"one more {what} of {group.name}")
        for group, spec in larger
        if spec is not None
    )


def read(text: str) -> dict[str, str]:
    """The circumstances that a text names; raises InputError for others."""
    found: dict[str, str] = {}
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if name not in WORDS or not equals or name in found or not _is_value(name, value):
            raise InputError(
                where=WHERE,
                found=show_value(text),
                wanted="memory=SIZE, devices=COUNT or batch=COUNT, joined by commas",
                remedy="write --what-if memory=40GB, or --what-if devices=8,batch=64",
            )
        found[name] = value
    return found


def _is_value(name: str, value: str) -> bool:
    if name == "memory":
        return parse_bytes(value, where=f"{WHERE} memory") > 0
    return value.isascii() and value.isdecimal() and len(value) < 10 and int(value) > 0


def changed(asked: AskedPlan, said: dict[str, str]) -> AskedPlan:
    """The asked plan under other circumstances, as `read` found them; raises InputError for impossible
    ones."""
    if "devices" in said:
        asked = replace(asked, cluster=resized(asked.cluster, int(said["devices"])))
    if "batch" in said:
        asked = with_batch(asked, int(said["batch"]))
    return asked.saying(memory=said["memory"]) if "memory" in said else asked


def resized(cluster: ClusterSpec, count: int) -> ClusterSpec:
    """The cluster with another number of equal devices: processes of this machine share its memory, other
    devices keep theirs. Raises InputError for a number that fills no whole nodes."""
    if cluster == ClusterSpec.local(cluster.num_devices):
        return ClusterSpec.local(count)
    per_node = min(count, cluster.devices_per_node) if cluster.nodes > 1 else count
    nodes, rest = divmod(count, per_node)
    if rest:
        raise InputError(
            where=f"{WHERE} devices={count}",
            found=f"nodes of {per_node} devices",
            wanted="whole nodes",
            remedy=f"choose a multiple of {per_node}",
        )
    return cluster.shaped(nodes, per_node)


def batch_of(asked: AskedPlan) -> int:
    """Samples in the example; raises InputError where it can't be told which dims hold them."""
    planner, target = asked.planner(asked.request()[0]), asked.target
    return planner.parts(target.model, target.args, target.kwargs).cutting().size


def with_batch(asked: AskedPlan, size: int) -> AskedPlan:
    """Copy the question for `size` samples, repeated or left out: their values decide nothing.

    Raises InputError where it can't be told which dims hold the samples.
    """
    planner, target = asked.planner(asked.request()[0]), asked.target
    parts = planner.parts(target.model, target.args, target.kwargs)
    cutting = parts.cutting()
    tensors = tuple(
        tensor if rows is None else _repeated(tensor, rows, cutting.size, size)
        for tensor, rows in zip(parts.call.tensors, cutting.rows, strict=True)
    )
    args, kwargs = parts.call.rebuild(tensors)
    return replace(asked, target=replace(target, args=args, kwargs=kwargs))


def _repeated(tensor: torch.Tensor, rows: Rows, before: int, after: int) -> torch.Tensor:
    """A tensor of `before` samples with `after` of them."""
    at = torch.arange(after, device=tensor.device) % before
    places = torch.arange(tensor.shape[rows.dim], device=tensor.device).reshape(
        rows.outer, before, rows.inner
    )
    return tensor.index_select(rows.dim, places[:, at].reshape(-1)).detach()
