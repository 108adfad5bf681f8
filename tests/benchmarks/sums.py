"""Sums by messages of our own between hosts behind slow links, measured beside what is predicted.

python -m tests.benchmarks.sums                         as root: 4 hosts, 200 Mbit/s, 16 MB
python -m tests.benchmarks.sums --hosts 8 --rate 100mbit --megabytes 32

Hosts are network namespaces of this machine behind one switch, one process each. Predicted is what
`autopar topology` tells of them with a latency and a rate that are measured, of messages from each host to
the next. Run it on a quiet machine: hosts share its cores.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from statistics import median
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from autopar.core.links import Link
from autopar.core.sum_schedules import SumAlgorithm, grid, schedule_of
from autopar.core.topology import Topology, TopologyKind
from autopar.cost.topology.price import loads_of, loads_seconds
from autopar.runtime.collectives.own_sums import start_own_sum
from autopar.runtime.launch import worker
from tests.benchmarks.namespaces import hosts, run_on_hosts

ROUNDS = 3
PINGS = 5
LARGE_BYTES = 4_000_000
SHOWN = (SumAlgorithm.RING, SumAlgorithm.HIERARCHICAL, SumAlgorithm.HALVING, SumAlgorithm.SHIFTED)
Figures = dict[str, tuple[float, int]]  # median seconds, and the most bytes that a rank sends


def topology_of(count: int) -> Topology:
    """All hosts on one switch: as in a tree whose upper links carry all that hosts send."""
    return Topology(TopologyKind.FAT_TREE, count, sizes=grid(count, None))


def measure(nbytes: int) -> tuple[Link, float, Figures]:
    """On a host: the link, seconds of gloo's own sum, and those of each algorithm."""
    worker.init(timeout=timedelta(minutes=5).total_seconds())
    group, count = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    tensor = torch.ones(nbytes // 4)
    figures: Figures = {}
    for algorithm in SHOWN:
        if (schedule := schedule_of(algorithm, count, topology_of(count))) is None:
            continue
        laps = []
        for _ in range(ROUNDS):
            dist.barrier()
            begin = time.perf_counter()
            sent = start_own_sum(tensor.fill_(1), schedule, group).result()
            laps.append(time.perf_counter() - begin)
        assert (tensor == count).all()
        slowest = torch.tensor([median(laps), float(sent)])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        figures[algorithm.value] = float(slowest[0]), int(slowest[1])
    latency = _message_seconds(group, 4)
    return (
        Link(latency, LARGE_BYTES / (_message_seconds(group, LARGE_BYTES) - latency)),
        _gloo(tensor),
        figures,
    )


def _message_seconds(group: dist.ProcessGroup, nbytes: int) -> float:
    """Median seconds of a message to the next host, while others send theirs; of the slowest host."""
    count, me, laps = dist.get_world_size(), dist.get_rank(), []
    sent, received = torch.zeros(nbytes // 4), torch.empty(nbytes // 4)
    for _ in range(PINGS):
        dist.barrier()
        begin = time.perf_counter()
        works = [
            dist.isend(sent, group=group, group_dst=(me + 1) % count),
            dist.irecv(received, group=group, group_src=(me - 1) % count),
        ]
        for work in works:
            assert work is not None
            work.wait()
        laps.append(time.perf_counter() - begin)
    slowest = torch.tensor(median(laps), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _gloo(tensor: torch.Tensor) -> float:
    laps = []
    for _ in range(ROUNDS):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor.fill_(1))
        laps.append(time.perf_counter() - begin)
    return median(laps)


def predicted(algorithm: str, count: int, nbytes: int, link: Link) -> float:
    loads = loads_of(SumAlgorithm(algorithm), topology_of(count), count)
    assert loads is not None
    return loads_seconds(loads, nbytes, link)


def main(
    count: Annotated[int, typer.Option("--hosts", help="processes, each a host")] = 4,
    rate: Annotated[str, typer.Option(help="of each host's link, as tc takes it")] = "200mbit",
    megabytes: Annotated[int, typer.Option(help="of each host, that are summed")] = 16,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure each algorithm, and say by how much it is not what was predicted."""
    from tests.benchmarks import sums  # by which name hosts find it

    nbytes = megabytes * 1_000_000
    with hosts(count, rate=rate) as made:
        link, gloo, figures = run_on_hosts(sums.measure, made, nbytes)[0]
    rows = {
        name: {"seconds": seconds, "predicted": predicted(name, count, nbytes, link), "sent": sent}
        for name, (seconds, sent) in figures.items()
    }
    if as_json:
        json.dump(
            {"latency": link.latency, "bandwidth": link.bandwidth, "gloo": gloo, "rows": rows}, sys.stdout
        )
        return
    links = f"links {rate} ({link.bandwidth / 1e6:.1f} MB/s measured)"
    table = Table(title=f"{count} hosts, {links}, {megabytes} MB; gloo's own sum {gloo:.2f} s")
    for heading in ("sum", "measured s", "predicted s", "measured / predicted", "MB sent by a host"):
        table.add_column(heading)
    for name, row in rows.items():
        share = f"{row['seconds'] / row['predicted']:.2f}"
        table.add_row(
            name, f"{row['seconds']:.2f}", f"{row['predicted']:.2f}", share, f"{row['sent'] / 1e6:.1f}"
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    typer.run(main)
