"""Weights come from safetensors files and go back, each rank's own parts, under any plan."""

from __future__ import annotations

import json
import os
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file, save_model
from torch import Tensor, nn

import autopar
from autopar.cluster import ClusterSpec
from autopar.core.part import Part
from autopar.errors import InputError
from autopar.runtime.checkpoints.safetensors_files import DTYPES, lay_out, read_part, tensors_in, write_part
from autopar.runtime.module.parallel_module import ParallelModule
from tests.pool import Pool

Pools = Callable[[int], Pool]
PLANS: dict[str, dict[str, Any]] = {
    "batch": {"force": "batch", "shard_state": "none"},
    "filter": {"force": "filter"},
    "weights in shards": {"force": "batch", "shard_state": "weights"},
    "2 stages": {"stages": 2},
}


class Net(nn.Module):
    """A fused qkv, a tied matrix, running statistics, and a dim that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.qkv, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head.weight = self.out.weight
        self.up, self.down = nn.Linear(8, 7), nn.Linear(7, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.first(x))).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(h).unflatten(2, (3, 4, 2)).permute(2, 0, 3, 1, 4).unbind()
        mixed = (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).transpose(1, 2).flatten(2)
        return F.mse_loss(self.down(torch.tanh(self.up(self.head(torch.tanh(self.out(mixed)))))).mean(1), y)


def parallel(model: nn.Module, case: str) -> ParallelModule:
    example = torch.zeros(4, 2, 4, 2), torch.zeros(4, 8)
    cluster = ClusterSpec.local(dist.get_world_size())
    made: ParallelModule = autopar.parallelize(
        model, cluster, example, measure=False, quiet=True, **PLANS[case]
    )
    return made


def meta_net() -> Net:
    with torch.device("meta"):
        return Net()


def seeded_net() -> Net:
    torch.manual_seed(3)
    net = Net()
    net.norm.running_mean.uniform_()  # type: ignore[operator]
    return net


def weights_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: item.clone() for name, item in net.state_dict().items()}


def write_shards(folder: Path) -> None:
    """The seeded net's weights in two files with an index, as transformers writes them."""
    weights = weights_of(seeded_net())
    del weights["head.weight"]
    names = list(weights)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({name: weights[name] for name in part}, folder / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _loaded(case: str, folder: Path, to: Path) -> dict[str, Tensor]:
    model = parallel(meta_net(), case)
    autopar.load_pretrained(model, folder)
    autopar.save_pretrained(model, to, shard_bytes=1000)
    return weights_of(model)


@pytest.mark.parametrize("case", PLANS)
def test_a_model_on_the_meta_device_loads_shards_and_writes_them_again(
    case: str, pools: Pools, tmp_path: Path
) -> None:
    write_shards(tmp_path)
    expected = weights_of(seeded_net())
    for found in pools(2).run(_loaded, case, tmp_path, tmp_path / "again"):
        assert found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    written = {
        name: item
        for path in (tmp_path / "again").glob("*.safetensors")
        for name, item in load_file(path).items()
    }
    assert written.keys() == expected.keys() - {"head.weight"}
    assert all(torch.equal(written[name], expected[name]) for name in written)
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


# -- tied weights -------------------------------------------------------------------------------


def _loads_ties(case: str, folder: Path) -> None:
    expected = weights_of(seeded_net())
    for kept in ("first", "other", "both", "model"):
        model = parallel(meta_net(), case)
        autopar.load_pretrained(model, folder / kept)
        found = weights_of(model)
        assert [name for name in found if not torch.equal(found[name], expected[name])] == [], kept
    net = seeded_net()
    with torch.no_grad():
        net.out.weight.mul_(2)
    model = parallel(net, case)
    before = weights_of(model)
    with pytest.raises(InputError, match=r"(out|head)\.weight unlike (out|head)\.weight, wanted one value"):
        autopar.load_pretrained(model, folder / "differ")
    with pytest.raises(InputError, match=r"head\.weight of \[8, 4\] \(here \[8, 8\]\)"):
        autopar.load_pretrained(model, folder / "shape")
    assert all(torch.equal(before[name], item) for name, item in weights_of(model).items())
    autopar.load_pretrained(
        model, folder / "differ", rename=lambda name: None if name == "head.weight" else name
    )
    assert torch.equal(model.state_dict()["head.weight"], expected["out.weight"])


@pytest.mark.parametrize("case", ["filter", "2 stages"])
def test_a_tied_weight_is_loaded_by_whichever_name_files_have_and_two_values_are_refused(
    case: str, pools: Pools, tmp_path: Path
) -> None:
    weights = weights_of(seeded_net())
    row = weights["head.weight"].clone()
    row[-1, -1] += 1
    changed: dict[str, dict[str, Tensor | None]] = {
        "first": {"head.weight": None},
        "other": {"out.weight": None},
        "both": {},
        "differ": {"head.weight": row},
        "shape": {"head.weight": torch.zeros(8, 4)},
    }
    for kind, change in changed.items():
        (tmp_path / kind).mkdir()
        file = {name: item for name, item in (weights | change).items() if item is not None}
        save_file(file, tmp_path / kind / "model.safetensors")
    (tmp_path / "model").mkdir()
    save_model(seeded_net(), str(tmp_path / "model" / "model.safetensors"))
    pools(2).run(_loads_ties, case, tmp_path)


# -- ranks that see other files -------------------------------------------------------------------


def _sees_its_own(case: str, plan: str, folder: Path) -> str:
    """On a rank with a folder of its own: what is refused, with old values kept, or "" after loading."""
    rank, weights = dist.get_rank(), weights_of(seeded_net())
    del weights["head.weight"]
    own = folder / str(rank)
    own.mkdir()
    if rank and case == "other values":
        weights["down.weight"] += 1
    if rank and case == "other kinds":
        weights["down.weight"] = weights["down.weight"].half()
    if rank == 0 or case != "none":
        note = {"note": "a header that is longer " * rank}
        save_file(weights, own / "model.safetensors", metadata=note)
    model = parallel(make_old(), plan)

    def rename(name: str) -> str:
        return str([name][rank if case == "an error in rename" else 0])

    try:
        autopar.load_pretrained(model, own, rename=rename)
    except InputError as error:
        assert all(
            torch.equal(item, make_old().state_dict()[name]) for name, item in weights_of(model).items()
        )
        return str(error)
    expected = weights_of(seeded_net())
    assert all(torch.equal(item, expected[name]) for name, item in weights_of(model).items())
    return ""


def make_old() -> Net:
    torch.manual_seed(4)
    return Net()


@pytest.mark.parametrize("plan", ["batch", "weights in shards"])
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("longer headers", ""),
        ("other values", "on rank 1 than on rank 0"),
        ("other kinds", "on rank 1 than on rank 0"),
        ("none", r"1: found no such folder|1: found no \*\.safetensors file"),
        ("an error in rename", "IndexError in rename= of "),
    ],
)
def test_each_rank_reads_what_it_sees_and_other_weights_are_refused_on_all(
    case: str, words: str, plan: str, pools: Pools, tmp_path: Path
) -> None:
    found = pools(2).run(_sees_its_own, case, plan, tmp_path)
    assert bool(words) == all(found) and all(re.search(words, each) for each in found)


def _loads_integers(folder: Path) -> None:
    weights = weights_of(seeded_net())
    del weights["head.weight"]
    weights["down.weight"] = weights["down.weight"].to(torch.int8)
    if dist.get_rank() == 0:
        save_file(weights, folder / "model.safetensors")
    dist.barrier()
    with pytest.raises(InputError, match=r"down\.weight of torch\.int8 \(here torch\.float32\)"):
        autopar.load_pretrained(parallel(seeded_net(), "filter"), folder)


def test_codes_of_quantized_weights_are_not_taken_for_weights(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(_loads_integers, tmp_path)


# -- memory -------------------------------------------------------------------------------------

ROWS = 1 << 18  # of a table of 64 MiB
IN_USE, AT_MOST = re.compile(r"^VmRSS:\s+(\d+) kB", re.M), re.compile(r"^VmHWM:\s+(\d+) kB", re.M)


class Table(nn.Module):
    """Nearly all that it has is one tensor."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).square().mean()


def memory(pattern: re.Pattern[str]) -> int:
    match = pattern.search(Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) << 10


def _loads_table(case: str, folder: Path) -> tuple[int, int]:
    """Bytes of a rank's part, and those that planning and loading took at most."""
    for rows in (64, ROWS):  # the first one imports
        with torch.device("meta"):
            net = Table(rows)
        Path("/proc/self/clear_refs").write_text("5")  # the most so far is what is in use
        before = memory(IN_USE)
        options = PLANS[case]
        model: ParallelModule = autopar.parallelize(
            net,
            ClusterSpec.local(2),
            torch.zeros(4, 8, dtype=torch.long),
            measure=False,
            quiet=True,
            **options,
        )
        if rows == ROWS:
            autopar.load_pretrained(model, folder)
    most = memory(AT_MOST) - before
    mine = model.table.weight.to_local()  # type: ignore[operator]
    assert mine.aminmax() == (0.5, 0.5)
    return mine.nbytes, most


@pytest.mark.parametrize("case", ["filter", "weights in shards"])
def test_a_rank_never_has_more_than_its_part_of_a_model_on_the_meta_device(
    case: str, pools: Pools, tmp_path: Path
) -> None:
    save_file({"table.weight": torch.full((ROWS, 64), 0.5)}, tmp_path / "model.safetensors")
    for part, most in pools(2).run(_loads_table, case, tmp_path):
        assert part == ROWS * 64 * 4 // 2
        assert part <= most <= 1.6 * part  # planning takes some; a copy of the part would be 2


# -- folders ------------------------------------------------------------------------------------


def _saves_again(folder: Path) -> None:
    model = parallel(seeded_net(), "filter")
    there = os.getcwd()
    os.chdir(folder / "linked")
    try:
        autopar.save_pretrained(model, Path("."), shard_bytes=1000)
        autopar.load_pretrained(model, ".")
    finally:
        os.chdir(there)
    autopar.save_pretrained(model, folder / "link")
    autopar.load_pretrained(model, folder / "link")


def test_a_save_replaces_the_model_that_was_there_and_no_other_file(pools: Pools, tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "linked")
    write_shards(tmp_path / "linked")
    others = {"model_ema.safetensors", "model-best.safetensors", "notes.txt"}
    for name in others:
        (tmp_path / "linked" / name).write_text("mine")
    pools(2).run(_saves_again, tmp_path)
    assert {path.name for path in (tmp_path / "linked").iterdir()} == others | {"model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == {"link", "linked"}
    assert all((tmp_path / "linked" / name).read_text() == "mine" for name in others)
    expected = weights_of(seeded_net())
    written = load_file(tmp_path / "linked" / "model.safetensors")
    assert all(torch.equal(written[name], expected[name]) for name in written)


def _fails_to_save(folder: Path) -> None:
    """Rank 1 can't write, and what was there stays."""
    model = parallel(seeded_net(), "filter")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (256, before[1]))
    try:
        with pytest.raises(InputError, match=r"on rank 1: File too large"):
            autopar.save_pretrained(model, folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_save_that_fails_leaves_the_model_that_was_there(pools: Pools, tmp_path: Path) -> None:
    write_shards(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    pools(2).run(_fails_to_save, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def _refusals(folder: Path) -> None:
    model = parallel(seeded_net(), "filter")
    before = weights_of(model)
    for words, act in {
        r"files without down\.bias and \d+ more; with other\.down\.bias": lambda: autopar.load_pretrained(
            model, folder / "renamed"
        ),
        r"qkv.weight of \[12, 8\] \(here \[24, 8\]\)": lambda: autopar.load_pretrained(
            model, folder / "renamed", rename=lambda name: name.removeprefix("other.")
        ),
        "no such folder": lambda: autopar.load_pretrained(model, folder / "none"),
        r"of which the file lacks some|no JSON": lambda: autopar.load_pretrained(model, folder / "torn"),
        "a Net, wanted the parallel module|a Linear, wanted": lambda: autopar.load_pretrained(
            nn.Linear(1, 1), folder
        ),
        r"qkv\.bias given by rename= for other\.qkv\.bias and for other\.qkv\.weight": lambda: (
            autopar.load_pretrained(
                model, folder / "renamed", rename=lambda name: "qkv.bias" if "qkv" in name else name
            )
        ),
        r"first\.bias, which a\.safetensors has, too": lambda: autopar.load_pretrained(
            model, folder / "twice"
        ),
        "Not a directory": lambda: autopar.save_pretrained(model, folder / "renamed/model.safetensors/x"),
    }.items():
        with pytest.raises(InputError, match=words) as told:
            act()
        assert len(str(told.value)) <= 400
    assert all(torch.equal(before[name], item) for name, item in weights_of(model).items())


def test_files_of_other_names_shapes_and_torn_ones_are_refused_on_all_ranks(
    pools: Pools, tmp_path: Path
) -> None:
    weights = weights_of(seeded_net())
    del weights["head.weight"]
    weights["qkv.weight"] = torch.zeros(12, 8)
    (tmp_path / "renamed").mkdir()
    file = tmp_path / "renamed" / "model.safetensors"
    save_file({f"other.{name}": item for name, item in weights.items()}, file)
    (tmp_path / "twice").mkdir()
    for name in ("a", "b"):
        save_file({"first.bias": torch.zeros(8)}, tmp_path / "twice" / f"{name}.safetensors")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "model.safetensors").write_bytes(file.read_bytes()[:-8])
    pools(2).run(_refusals, tmp_path)


class Rotary(nn.Module):
    """A table that no state dict has."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.lin(x) * self.table).square().mean()


def _unsaved(folder: Path) -> None:
    for everything in (True, False):
        with torch.device("meta"):
            net = Rotary()
        if not everything:
            net.table = torch.arange(4.0)
        model: ParallelModule = autopar.parallelize(
            net, ClusterSpec.local(2), torch.zeros(4, 4), measure=False, quiet=True
        )
        if everything:
            with pytest.raises(InputError, match=r"found table without values: .*init_empty_weights"):
                autopar.load_pretrained(model, folder)
        else:
            autopar.load_pretrained(model, folder)
            assert torch.equal(model.table, torch.arange(4.0))


def test_buffers_that_no_file_has_must_have_values(pools: Pools, tmp_path: Path) -> None:
    save_file(dict(Rotary().state_dict()), tmp_path / "model.safetensors")
    pools(2).run(_unsaved, tmp_path)


def test_a_part_that_comes_in_several_reads_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = torch.arange(60.0).view(12, 5)
    save_file({"a": full}, tmp_path / "model.safetensors")
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, views, place: read(file, [views[0][:7]], place))
    mine = torch.empty(4, 5)
    part = Part(((12,), (5,)), (((4, 8),), ((0, 5),)))
    assert read_part(tensors_in(tmp_path)["a"], part, mine) == 80
    assert torch.equal(mine, part.take(full))
    monkeypatch.setattr(os, "preadv", lambda file, views, place: 0)
    with pytest.raises(InputError, match="an end after 0 bytes of 80"):
        read_part(tensors_in(tmp_path)["a"], part, mine)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_parts_go_to_their_places_and_come_back_in_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.randint(0, 2, (12, 5, 2, dtype.itemsize), dtype=torch.uint8)
    full = raw.view(torch.uint8).reshape(12, 5, 2 * dtype.itemsize).view(dtype)
    parts = [
        Part(((3, 4), (5,), (2,)), (((0, 3), (0, 2)), ((0, 5),), ((0, 2),))),
        Part(((3, 4), (5,), (2,)), (((0, 3), (2, 4)), ((0, 3),), ((0, 2),))),
        Part(((3, 4), (5,), (2,)), (((0, 3), (2, 4)), ((3, 5),), ((0, 1),))),
        Part(((3, 4), (5,), (2,)), (((0, 3), (2, 4)), ((3, 5),), ((1, 2),))),
    ]
    tensors = lay_out(
        tmp_path, {"a": (torch.int8, (3,)), "b": (dtype, (12, 5, 2)), "c": (dtype, ())}, 1 << 20
    )
    for part in parts:
        write_part(tensors["b"], part, part.take(full))
    written = load_file(tmp_path / "model.safetensors")
    assert torch.equal(written["b"].view(torch.uint8), full.contiguous().view(torch.uint8))
    for part in parts:
        mine = torch.empty(part.shape, dtype=dtype)
        assert read_part(tensors_in(tmp_path)["b"], part, mine) == mine.nbytes, "and nothing else"
        assert torch.equal(mine.view(torch.uint8), part.take(full).contiguous().view(torch.uint8))
    scalar = torch.empty((), dtype=dtype)
    assert read_part(tensors["c"], Part((), ()), scalar) == dtype.itemsize
