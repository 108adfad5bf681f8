"""Published runs: a table with a row for each, as the Ultra-Scale Playbook's raw one has them.

dp tp pp mbs batch_accum zero_stage     the split
tok/s/gpu                               the throughput; none where memory ran out, which `status` (OOM) or
                                        `oom_error` (True) say too, where there are such columns
AllReduce, AllGather, ReduceScatter     GB/s of bus bandwidth, measured in the row's own job
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import InputError

GIGA = 1e9
NEEDED = (
    *("hidden_size", "num_layers", "num_heads", "vocab_size", "interm_dim", "seq_len"),
    *("dp", "tp", "pp", "mbs", "batch_accum", "tok/s/gpu"),
)
MOST_DEVICES = 1 << 20
EMPTY = ("", "nan", "none", "null", "n/a", "-")  # what tables write where there is nothing
DENSE = ("cp", "ep", "num_experts", "num_local_experts")  # what stands in other tables, and isn't predicted
OUT_OF_MEMORY = ("oom", "out of memory", "outofmemory", "cuda oom", "fail_oom")
PRECISIONS = ("torch.bfloat16", "bfloat16", "bf16")  # of what the stack's constants are fitted to


@dataclass(frozen=True, slots=True)
class Shape:
    """A Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    sequence: int
    tied: bool

    @property
    def layer_weights(self) -> int:
        """Weights of one block."""
        kept = self.hidden * self.kv_heads // self.heads
        return self.hidden * (2 * self.hidden + 2 * kept + 3 * self.inner)

    @property
    def table_weights(self) -> int:
        """Weights of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def weights(self) -> int:
        return self.layers * self.layer_weights + (2 - self.tied) * self.table_weights


@dataclass(frozen=True, slots=True)
class Split:
    """Degrees of parallelism, samples of a micro-batch on one device, and how many of them follow."""

    dp: int
    tp: int
    pp: int
    samples: int
    micro_batches: int
    zero: int

    @property
    def devices(self) -> int:
        return self.dp * self.tp * self.pp


@dataclass(frozen=True, slots=True)
class Run:
    """A published run; `seconds` a step, None where memory ran out; links in bytes per second if known."""

    shape: Shape
    split: Split
    nodes: int
    seconds: float | None
    mended: bool  # whether the stack's pipeline engine had been mended
    all_reduce: float | None
    all_gather: float | None
    inside: float | None = None  # of all-reduces within a node

    @property
    def group(self) -> tuple[Shape, int, bool]:
        """Equal for runs that are compared: of one model, on as many devices, with the same stack."""
        return self.shape, self.split.devices, self.mended

    @property
    def seconds_per_sample(self) -> float | None:
        split = self.split
        samples = split.dp * split.samples * split.micro_batches
        return None if self.seconds is None else self.seconds / samples


def read(path: Path) -> list[Run]:
    """The file's runs; raises InputError for a file without the columns, and names the line and the column of
    a cell that can't be. Columns of other names are passed over."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or ()
            rows = [Row(path, reader.line_num, cells) for cells in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as cause:
        raise _wrong(str(path), str(cause)) from cause
    if missing := [name for name in NEEDED if name not in columns]:
        raise _wrong(str(path), f"no column {', '.join(missing)}")
    if twice := sorted({name for name in columns if columns.count(name) > 1}):
        raise _wrong(str(path), f"several columns {', '.join(twice)}")
    if not rows:
        raise _wrong(str(path), "no run")
    return list(_runs(rows))


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the file."""

    path: Path
    line: int
    cells: Mapping[str, str | None]

    def text(self, name: str) -> str:
        """A cell, empty where there is none."""
        text = (self.cells.get(name) or "").strip()
        return "" if text.lower() in EMPTY else text

    def count(self, name: str, least: int = 1) -> int:
        """A whole number, of `least` at least."""
        value = self.number(name)
        if value is None or value < least or not value.is_integer():
            raise self.refused(name, f"a whole number of at least {least}")
        return int(value)

    def number(self, name: str) -> float | None:
        """A finite number above or at 0, None for an empty cell."""
        text = self.text(name)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            raise self.refused(name, "a number of at least 0")
        return value

    def one_of(self, name: str, known: Sequence[str]) -> str:
        """One of the `known` texts, the first for an empty cell."""
        text = self.text(name) or known[0]
        found = next((each for each in known if each.lower() == text.lower()), None)
        if found is None:
            raise self.refused(name, " or ".join(known))
        return found

    def flag(self, name: str) -> bool:
        """Whether a cell says True."""
        return self.one_of(name, ("False", "True")) == "True"

    def rate(self, name: str) -> float | None:
        """Bytes per second of a cell in GB/s, None for an empty one or 0."""
        value = self.number(name)
        return GIGA * value if value else None

    def refused(self, name: str, wanted: str) -> InputError:
        """The error for a cell that can't be."""
        where = f"{self.path}, line {self.line}, column {name}"
        return InputError(
            where=where,
            found=repr((self.cells.get(name) or "").strip()),
            wanted=wanted,
            remedy="correct the cell, or leave out the line",
        )


def _runs(rows: Sequence[Row]) -> Iterator[Run]:
    known = defaultdict[tuple[str, ...], dict[tuple[int, bool], Row]](dict)
    for row in rows:
        if row.text("num_kv_heads"):  # left empty where memory ran out
            known[_model(row)][row.count("num_kv_heads"), row.flag("tie_word_embeddings")] = row
    for row in rows:
        row.one_of("tp_mode", ("REDUCE_SCATTER",))
        row.one_of("dtype", PRECISIONS)
        row.one_of("accumulate_grad_in_fp32", ("True",))
        for name in DENSE:
            if (row.number(name) or 0) > 1:
                raise row.refused(name, "at most 1: dense models, split by dp, tp and pp")
        shape, split = _shape(row, _whole(row, known[_model(row)])), _split(row)
        speed = _speed(row, split)
        tokens = split.dp * split.samples * split.micro_batches * shape.sequence
        yield Run(
            shape=shape,
            split=split,
            nodes=row.count("nodes") if row.text("nodes") else -(-split.devices // 8),
            seconds=tokens / (speed * split.devices) if speed else None,
            mended=row.flag("after_pp_fix"),
            all_reduce=row.rate("AllReduce (GB/s)"),
            all_gather=row.rate("AllGather (GB/s)"),
            inside=row.rate("AR Intra-node (GB/s)"),
        )


def _whole(row: Row, alike: Mapping[tuple[int, bool], Row]) -> Row:
    """The row itself if it says all of its model, else the one that does; several may not."""
    if row.text("num_kv_heads") or not alike:
        return row
    if len(alike) > 1:
        raise row.refused("num_kv_heads", "the model's, as other lines have several for one so large")
    return next(iter(alike.values()))


def _speed(row: Row, split: Split) -> float | None:
    """The throughput, None where memory ran out; a run that ended otherwise is refused."""
    status, cell = row.text("status").lower(), row.cells.get("tok/s/gpu") or ""
    full = row.flag("oom_error") or status in OUT_OF_MEMORY or cell.strip().lower() in OUT_OF_MEMORY
    if full and cell.strip().lower() in (*EMPTY, *OUT_OF_MEMORY):
        return None
    speed = row.number("tok/s/gpu")
    if speed == 0 or (speed is None and cell.strip()):
        raise row.refused("tok/s/gpu", "a throughput above 0, or nothing")
    if speed is None and status:
        raise row.refused("status", "OOM for a line without a throughput")
    samples = split.dp * split.samples * split.micro_batches
    if speed is not None and row.text("gbs") and row.number("gbs") != samples:
        raise row.refused("gbs", f"dp x mbs x batch_accum, {samples}")
    return speed


def _shape(row: Row, whole: Row) -> Shape:
    heads = row.count("num_heads")
    kv_heads = whole.count("num_kv_heads") if whole.text("num_kv_heads") else heads
    shape = Shape(
        hidden=row.count("hidden_size"),
        layers=row.count("num_layers"),
        heads=heads,
        kv_heads=kv_heads,
        inner=row.count("interm_dim"),
        vocabulary=row.count("vocab_size"),
        sequence=row.count("seq_len"),
        tied=whole.flag("tie_word_embeddings"),
    )
    if shape.hidden % (2 * heads):
        raise row.refused("num_heads", f"a number that divides {shape.hidden}, into heads of even size")
    if heads % kv_heads:
        raise whole.refused("num_kv_heads", f"a divisor of {heads}")
    return shape


def _split(row: Row) -> Split:
    split = Split(
        dp=row.count("dp"),
        tp=row.count("tp"),
        pp=row.count("pp"),
        samples=row.count("mbs"),
        micro_batches=row.count("batch_accum"),
        zero=_zero(row),
    )
    if row.count("num_heads") % split.tp:
        raise row.refused("tp", f"a divisor of {row.text('num_heads')} heads")
    if split.devices > MOST_DEVICES:
        raise row.refused("dp", f"at most {MOST_DEVICES} devices: dp x tp x pp is {split.devices}")
    return split


def _zero(row: Row) -> int:
    stage = row.number("zero_stage") or 0.0
    if stage not in (0, 1):
        raise row.refused("zero_stage", "0 or 1")
    return int(stage)


def _model(row: Row) -> tuple[str, ...]:
    names = ("hidden_size", "num_layers", "num_heads", "vocab_size", "interm_dim")
    return tuple(row.text(name) for name in names)


def _wrong(where: str, found: str) -> InputError:
    return InputError(
        where=where,
        found=found,
        wanted="a CSV file of runs with the columns of the Ultra-Scale Playbook's raw table",
        remedy="give the path of such a file",
    )
