"""What is wrong with what ranks said of themselves, and with the links between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median_high
from typing import Any

from autopar.cluster import ClusterSpec, Link
from autopar.doctor.meeting import Meeting, TimedLink
from autopar.doctor.rank_facts import RankFacts
from autopar.results.explanation.examination import Finding, ok, warn, wrong
from autopar.units import show_bytes

LEAST_SHARED = (
    1_000_000_000  # bytes: containers have 64 MB by default, less than some batches of a DataLoader
)
LEAST_FREE = 1_000_000_000  # bytes for each rank: torch itself takes 300 MB
FILES, FILES_A_RANK = 1_024, 16  # what a process opens, and connections to each other rank
SLOW = 0.75  # of what others of its kind compute: a straggler, beside 0.9 among ranks of a quiet machine
FAR_OFF = 3.0  # times by which a link may be slower than the cluster's file says


def of_machines(ranks: Sequence[RankFacts], cluster: ClusterSpec) -> Iterator[Finding]:
    """A finding for each limit, of the rank that has least."""
    yield _devices(ranks, cluster)
    yield _cores(ranks, cluster)
    yield _memory(ranks, cluster)
    yield _shared_memory(ranks)
    yield _open_files(ranks, cluster.num_devices)


def of_meeting(meeting: Meeting, cluster: ClusterSpec) -> Iterator[Finding]:
    """Findings about the meeting: which ranks came, whether their versions agree, and whether they reach each
    other."""
    world = cluster.num_devices
    if meeting.missing:
        yield _missing(meeting, world)
    elif len(meeting.facts) == world:
        yield ok("ranks", f"all {world} in {meeting.seconds:.1f} s, on {_hosts(meeting.facts)}")
    if meeting.failed:
        yield wrong("network", meeting.failed, _network_remedy(cluster))
    elif meeting.backend and not meeting.missing:
        yield ok("network", f"{meeting.backend}, a sum over {world} ranks is right")
    for name in ("autopar", "torch", "python"):
        yield from _versions(name, meeting.facts)
    yield from (_link(each, cluster) for each in meeting.links)
    if len(meeting.rates) == world > 1:
        yield _speeds(meeting.rates, cluster)


def _hosts(ranks: Sequence[RankFacts]) -> str:
    hosts = sorted({each.host for each in ranks})
    return ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")


def _missing(meeting: Meeting, world: int) -> Finding:
    gone = meeting.missing
    names = ", ".join(map(str, gone[:8])) + (" ..." if len(gone) > 8 else "")
    return wrong(
        "ranks",
        f"{len(gone)} of {world} didn't come in {meeting.seconds:.0f} s: {names}",
        "see the output of these; start all at once, with one MASTER_ADDR that every node reaches",
    )


def _network_remedy(cluster: ClusterSpec) -> str:
    if cluster.device_type == "cuda":
        return "see NCCL_DEBUG=INFO; name the network's device by NCCL_SOCKET_IFNAME, and open its ports"
    return "name the network's device by GLOO_SOCKET_IFNAME, such as eth0, and open its ports"


def _versions(name: str, ranks: Sequence[RankFacts]) -> Iterator[Finding]:
    """Findings about versions that differ between ranks; none for a single rank."""
    counts = Counter(getattr(each, name) for each in ranks)
    if len(counts) > 1:
        (common, _), *_ = counts.most_common()
        others = [each for each in ranks if getattr(each, name) != common]
        told = ", ".join(f"rank {each.rank} on {each.host} has {getattr(each, name)}" for each in others[:4])
        yield wrong(f"{name} on ranks", f"{common}, but {told}", f"install {name} {common} on every node")
    elif len(ranks) > 1:
        yield ok(f"{name} on ranks", f"{next(iter(counts))} on all")


def _devices(ranks: Sequence[RankFacts], cluster: ClusterSpec) -> Finding:
    first = ranks[0]
    here = f"{first.gpus} x {first.device}, NCCL {first.nccl}" if first.gpus else first.device
    if cluster.device_type == "cpu" and first.gpus:
        remedy = f"name a cluster of GPUs to train on them, such as local:{first.gpus}"
        return warn("devices", f"{here}, but the ranks are on the CPU", remedy)
    lacking = [each for each in ranks if each.gpus < cluster.devices_per_node]
    if cluster.device_type == "cuda" and lacking:
        found = f"rank {lacking[0].rank} sees {lacking[0].gpus} GPUs, and not {cluster.devices_per_node}"
        remedy = "install a build of torch for CUDA and the driver, or show the GPUs by CUDA_VISIBLE_DEVICES"
        return wrong("devices", found, remedy)
    kinds = sorted({each.device for each in ranks})
    if len(kinds) > 1 and not cluster.groups:
        remedy = "write [[groups]] into the cluster's file: else plans take all devices for equal"
        return warn("devices", f"different ones: {', '.join(kinds[:3])}", remedy)
    return ok("devices", here)


def _cores(ranks: Sequence[RankFacts], cluster: ClusterSpec) -> Finding:
    least = min(ranks, key=lambda each: each.cores)
    busy = least.threads * cluster.devices_per_node
    told = f"{least.cores:g} a node, for {cluster.devices_per_node} x {least.threads} threads"
    if cluster.device_type == "cpu" and cluster.devices_per_node > least.cores:
        remedy = "fewer ranks; on paper (autopar plan) give the cluster's file cores = N"
        return warn("cores", f"{told}: ranks share cores", remedy)
    if busy > max(least.cores, cluster.devices_per_node):
        share = max(1, int(least.cores // cluster.devices_per_node))
        return warn("cores", f"{told}: more threads than cores", f"set OMP_NUM_THREADS={share}")
    return ok("cores", told)


def _memory(ranks: Sequence[RankFacts], cluster: ClusterSpec) -> Finding:
    least = min(ranks, key=lambda each: each.memory)
    free = [each.free_memory for each in ranks if each.free_memory is not None]
    told = f"{show_bytes(least.memory)} a node" + (f", {show_bytes(min(free))} free" if free else "")
    wanted = (cluster.memory or 0) * cluster.devices_per_node if cluster.device_type == "cpu" else 0
    if wanted > least.memory * 1.01:
        found = f"{told}; the cluster's devices have {show_bytes(wanted)} a node"
        remedy = f"say memory = {least.memory // cluster.devices_per_node} in its file, or --memory"
        return wrong("memory", found, remedy)
    if free and min(free) < LEAST_FREE * cluster.devices_per_node:
        return warn(
            "memory", told, f"leave {show_bytes(LEAST_FREE)} or more to each rank: end what else runs"
        )
    return ok("memory", told)


def _shared_memory(ranks: Sequence[RankFacts]) -> Finding:
    sizes = [each.shared_memory for each in ranks]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes):
        return warn("shared memory", "no /dev/shm", "mount it, or set num_workers=0 of DataLoaders")
    if min(known) < LEAST_SHARED:
        remedy = "start the container with --shm-size=8g (--ipc=host), or set num_workers=0 of DataLoaders"
        return warn("shared memory", f"/dev/shm of {show_bytes(min(known))}", remedy)
    return ok("shared memory", f"/dev/shm of {show_bytes(min(known))}")


def _open_files(ranks: Sequence[RankFacts], world: int) -> Finding:
    wanted = FILES + FILES_A_RANK * world
    limited = [each for each in ranks if 0 <= each.open_files < wanted]
    if not limited:
        fewest = min(each.open_files for each in ranks)
        return ok("open files", "no limit" if fewest < 0 else f"{fewest:,} a process")
    each = min(limited, key=lambda each: each.open_files)
    may = each.most_open_files < 0 or each.most_open_files >= wanted
    remedy = (
        f"ulimit -n {wanted}"
        if may
        else f"have the hard limit raised to {wanted:,} (limits.conf, LimitNOFILE)"
    )
    return warn("open files", f"{each.open_files:,} a process, fewer than {wanted:,}", remedy)


def _link(timed: TimedLink, cluster: ClusterSpec) -> Finding:
    """A link beside the one that the cluster tells; an estimate of ours binds nobody."""
    told: Link | None = cluster.inter if timed.between else cluster.intra
    place = "between nodes" if timed.between else "within a node"
    what, found = f"link {timed.ranks[0]}-{timed.ranks[1]}", f"{timed.link} {place}"
    if told is None or told.estimated or told.bandwidth <= FAR_OFF * timed.link.bandwidth:
        return ok(what, found)
    remedy = "say in the cluster's file what a message gets, or look for a faster network device"
    return warn(what, f"{found}, where the cluster says {told}", remedy)


def _speeds(rates: Sequence[float], cluster: ClusterSpec) -> Finding:
    """How fast ranks compute beside what others of their kind do, as far as their groups say it."""
    told = [cluster.groups[places[0]] for places in cluster.places]
    kinds = [(group.device, group.described) for group in told] or [(cluster.device, None)] * len(rates)
    plain = [rate / group.speed for rate, group in zip(rates, told, strict=True)] if told else rates
    usual = {  # of two ranks the faster one tells what their kind does
        kind: median_high([rate for rate, own in zip(plain, kinds, strict=True) if own == kind])
        for kind in set(kinds)
    }
    parts = [rate / usual[kind] for rate, kind in zip(plain, kinds, strict=True)]
    slow = [rank for rank, part in enumerate(parts) if part < SLOW]
    least = min(range(len(parts)), key=lambda rank: parts[rank])
    if not slow:
        return ok("speeds", f"ranks compute alike, the slowest {parts[least]:.2f} of what its kind does")
    found = ", ".join(f"rank {rank} {parts[rank]:.2f}" for rank in slow[:4])
    speed = parts[least] * (told[least].speed if told else 1.0)
    remedy = f"free it of what else runs there, or make it one of [[groups]] with speed = {speed:.2f}"
    return warn("speeds", f"slower than others of their kind: {found} of what these do", remedy)


def as_dicts(ranks: Sequence[RankFacts]) -> tuple[dict[str, Any], ...]:
    """The facts for JSON."""
    return tuple(each.as_dict() for each in ranks)
