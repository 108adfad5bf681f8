"""Safetensors files, of which each rank reads and writes its own parts.

    8 bytes: n | n bytes of JSON: {name: {dtype, shape, data_offsets}} | the tensors' bytes, row by row

A part is rows of each dim; in the file it is runs of bytes, which go straight into the rank's tensor and out
of it. Source of the format: https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.core.part import Part
from autopar.errors import InputError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
_OWN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
LONGEST_HEADER = 100_000_000  # bytes, as the format's own reader takes
_LENGTH_BYTES, _ALIGNMENT = 8, 8
SAMPLE_BYTES = 64  # of a tensor's start, middle and end, which a digest takes


@dataclass(frozen=True, slots=True)
class TensorInFile:
    """A tensor of a file: its form, and where its bytes begin."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


# -- where tensors are --------------------------------------------------------------------------


def tensors_in(folder: Path) -> dict[str, TensorInFile]:
    """The tensors of a folder of files, by name. Raises InputError for a folder that isn't one."""
    paths = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        paths = [folder / name for name in _named_by_index(folder)]
    elif folder / ONE_FILE in paths:
        paths = [folder / ONE_FILE]  # others are something else, as transformers takes them
    if not paths:
        raise InputError(
            where=f"weights in {folder}",
            found="no *.safetensors file" if folder.is_dir() else "no such folder",
            wanted="a model's folder, as save_pretrained writes it",
            remedy="name the folder that has model.safetensors, or shards and their index",
        )
    tensors: dict[str, TensorInFile] = {}
    for path in paths:
        found = _header(path)
        if both := sorted(found.keys() & tensors.keys()):
            raise _not_read(path, f"{both[0]}, which {tensors[both[0]].path.name} has, too")
        tensors |= found
    return tensors


def digest(tensors: Mapping[str, TensorInFile]) -> str:
    """Digest of names, forms and some bytes of each tensor, which copies of one model have alike."""
    found = hashlib.blake2b(digest_size=16)
    with ExitStack() as opened:
        files = {
            path: opened.enter_context(path.open("rb")) for path in {item.path for item in tensors.values()}
        }
        for name, item in sorted(tensors.items()):
            found.update(repr((name, item.dtype, item.shape)).encode())
            for place in (0, item.nbytes // 2, max(0, item.nbytes - SAMPLE_BYTES)):
                files[item.path].seek(item.offset + place)
                found.update(files[item.path].read(min(SAMPLE_BYTES, item.nbytes - place)))
    return found.hexdigest()


def own_files(folder: Path) -> set[str]:
    """Names of the files in a folder that are a saved model's, by its index or by their names."""
    names = {path.name for path in folder.iterdir() if _OWN.fullmatch(path.name)}
    if INDEX in names:
        with suppress(InputError):  # it is torn, and names none
            names |= {name for name in _named_by_index(folder) if Path(name).name == name}
    return names


def _named_by_index(folder: Path) -> list[str]:
    files = _json(folder / INDEX, (folder / INDEX).read_bytes()).get("weight_map")
    return sorted(set(map(str, files.values()))) if isinstance(files, dict) else []


def _header(path: Path) -> dict[str, TensorInFile]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            raw = file.read(length) if length <= LONGEST_HEADER else b""
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise _not_read(path, str(error.strerror)) from error
    begin, tensors = _LENGTH_BYTES + length, {}
    for name, entry in _json(path, raw).items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = DTYPES[entry["dtype"]], tuple(map(int, entry["shape"]))
            first, last = entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise _not_read(path, f"{name} in a form that isn't known") from error
        tensors[name] = tensor = TensorInFile(path, dtype, shape, begin + first)
        if last - first != tensor.nbytes or begin + last > size:
            raise _not_read(path, f"{name} of {last - first} bytes, of which the file lacks some")
    return tensors


def _json(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        tree = json.loads(raw)
    except ValueError as error:
        raise _not_read(path, "no JSON where its header should be") from error
    return tree if isinstance(tree, dict) else {}


def _not_read(path: Path, found: str) -> InputError:
    return InputError(
        where=f"weights in {path}",
        found=found,
        wanted="a whole safetensors file",
        remedy="write it again",
    )


# -- reading and writing parts ------------------------------------------------------------------


def read_part(tensor: TensorInFile, part: Part, into: Tensor) -> int:
    """Read a part of a tensor in a file into a rank's own, in place where it can; returns the bytes."""
    is_alike = into.device.type == "cpu" and into.dtype == tensor.dtype and into.is_contiguous()
    mine = into.detach() if is_alike else torch.empty(part.shape, dtype=tensor.dtype)
    count = 0
    with tensor.path.open("rb", buffering=0) as file:
        for place, view in _runs(tensor, part, mine):
            while view and (done := os.preadv(file.fileno(), [view], place)):  # of 2 GiB at most in one call
                count, place, view = count + done, place + done, view[done:]
    if count != mine.nbytes:
        raise _not_read(tensor.path, f"an end after {count} bytes of {mine.nbytes}")
    if is_alike:
        torch.autograd.graph.increment_version(into)
    else:
        into.copy_(mine)
    return count


def write_part(tensor: TensorInFile, part: Part, values: Tensor) -> None:
    """Write a rank's part of a tensor to its place in a file that is there."""
    mine = values.detach().to("cpu", tensor.dtype).contiguous()
    with tensor.path.open("r+b", buffering=0) as file:
        for place, view in _runs(tensor, part, mine):
            while view:
                count = os.pwrite(file.fileno(), view, place)
                place, view = place + count, view[count:]


def _runs(tensor: TensorInFile, part: Part, mine: Tensor) -> Iterator[tuple[int, memoryview]]:
    """Each run of bytes that lie together in the file and in the contiguous part: its place, and memory."""
    raw: Any = mine.view(-1).view(torch.uint8).numpy() if mine.numel() else b""
    memory, size = memoryview(raw), tensor.dtype.itemsize
    rows = [_ranges(part, dim) for dim in range(len(tensor.shape))]
    inner = len(rows)  # dims from here on are whole
    while inner and rows[inner - 1] == [range(tensor.shape[inner - 1])]:
        inner -= 1
    block = math.prod(tensor.shape[inner:]) * size
    strides = [math.prod(tensor.shape[dim + 1 :]) * size for dim in range(len(rows))]
    outer = [[row for span in spans for row in span] for spans in rows[: max(0, inner - 1)]]
    done = 0
    for place in itertools.product(*outer):
        begin = tensor.offset + sum(row * stride for row, stride in zip(place, strides, strict=False))
        for span in rows[inner - 1] if inner else [range(1)]:
            nbytes = len(span) * block
            if nbytes:
                yield begin + span.start * block, memory[done : done + nbytes]
            done += nbytes


def _ranges(part: Part, dim: int) -> list[range]:
    """The rows of a dim that the part has, as runs."""
    rows, runs = part.indices(dim).tolist(), list[range]()
    for row in rows:
        if runs and runs[-1].stop == row:
            runs[-1] = range(runs[-1].start, row + 1)
        else:
            runs.append(range(row, row + 1))
    return runs


# -- laying out files ---------------------------------------------------------------------------


def lay_out(
    folder: Path, forms: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], shard_bytes: int
) -> dict[str, TensorInFile]:
    """Write files with headers and room for these tensors, and their index; where each tensor goes.

    Raises InputError for a dtype that the format doesn't have.
    """
    unknown = [name for name, (dtype, _) in forms.items() if dtype not in NAMES]
    if unknown:
        raise InputError(
            where=f"weights to {folder}",
            found=f"{unknown[0]} in {forms[unknown[0]][0]}",
            wanted=f"one of {', '.join(NAMES.values())}",
            remedy="save by autopar.save, or cast it first",
        )
    shards = _shards(forms, shard_bytes)
    names = [ONE_FILE] if len(shards) == 1 else _shard_names(len(shards))
    tensors: dict[str, TensorInFile] = {}
    for name, shard in zip(names, shards, strict=True):
        tensors |= _lay_out_file(folder / name, {key: forms[key] for key in shard})
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {
            "metadata": {"total_size": total},
            "weight_map": {key: tensor.path.name for key, tensor in sorted(tensors.items())},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return tensors


def _shard_names(count: int) -> list[str]:
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _shards(
    forms: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], shard_bytes: int
) -> Sequence[Sequence[str]]:
    """Names of each file's tensors, of at most `shard_bytes` together unless one alone has more."""
    shards, room = list[list[str]](), 0
    for name, (dtype, shape) in forms.items():
        nbytes = math.prod(shape) * dtype.itemsize
        if not shards or nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= nbytes
    return shards or [[]]


def _lay_out_file(
    path: Path, forms: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> dict[str, TensorInFile]:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, (dtype, shape) in forms.items():
        nbytes = math.prod(shape) * dtype.itemsize
        offsets = [place, place + nbytes]
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": offsets}
        place += nbytes
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(_LENGTH_BYTES, "little") + raw)
        file.truncate(_LENGTH_BYTES + len(raw) + place)
    return _header(path)
