"""Published runs: a table with a row for each, as the Ultra-Scale Playbook's raw one has them.

dp tp pp mbs batch_accum zero_stage     the split
tok/s/gpu                               the throughput; none where memory ran out
AllReduce, AllGather, ReduceScatter     GB/s of bus bandwidth, measured in the row's own job
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import InputError

GIGA = 1e9
NEEDED = ("hidden_size", "num_layers", "num_heads", "vocab_size", "interm_dim", "seq_len", "dp", "tp", "pp")


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
    """The file's runs; raises InputError for a file without the columns or with a cell that is no number."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as cause:
        raise _wrong(str(path), str(cause)) from cause
    if missing := [name for name in NEEDED if not rows or name not in rows[0]]:
        raise _wrong(str(path), f"no column {', '.join(missing)}")
    try:
        return list(_runs(rows))
    except (ValueError, ZeroDivisionError) as cause:
        raise _wrong(str(path), str(cause)) from cause


def _runs(rows: Sequence[Mapping[str, str]]) -> Iterator[Run]:
    known = {_model(row): row for row in rows if row.get("num_kv_heads")}  # left empty where memory ran out
    for row in rows:
        whole = known.get(_model(row), row)
        shape = Shape(
            hidden=_count(row["hidden_size"]),
            layers=_count(row["num_layers"]),
            heads=_count(row["num_heads"]),
            kv_heads=_count(whole.get("num_kv_heads") or row["num_heads"]),
            inner=_count(row["interm_dim"]),
            vocabulary=_count(row["vocab_size"]),
            sequence=_count(row["seq_len"]),
            tied=whole.get("tie_word_embeddings") == "True",
        )
        split = Split(
            dp=_count(row["dp"]),
            tp=_count(row["tp"]),
            pp=_count(row["pp"]),
            samples=_count(row["mbs"]),
            micro_batches=_count(row["batch_accum"]),
            zero=_count(row.get("zero_stage") or "0"),
        )
        speed = row.get("tok/s/gpu")
        tokens = split.dp * split.samples * split.micro_batches * shape.sequence
        yield Run(
            shape=shape,
            split=split,
            nodes=_count(row.get("nodes") or str(-(-split.devices // 8))),
            seconds=tokens / (float(speed) * split.devices) if speed else None,
            mended=row.get("after_pp_fix") == "True",
            all_reduce=_rate(row.get("AllReduce (GB/s)")),
            all_gather=_rate(row.get("AllGather (GB/s)")),
        )


def _model(row: Mapping[str, str]) -> tuple[str, ...]:
    names = ("hidden_size", "num_layers", "num_heads", "vocab_size", "interm_dim")
    return tuple(row[name] for name in names)


def _count(text: str) -> int:
    return int(float(text))


def _rate(text: str | None) -> float | None:
    return GIGA * float(text) if text else None


def _wrong(where: str, found: str) -> InputError:
    return InputError(
        where=where,
        found=found,
        wanted="a CSV file of runs with the columns of the Ultra-Scale Playbook's raw table",
        remedy="give the path of such a file",
    )
