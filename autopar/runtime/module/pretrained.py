"""A model's weights from and to a folder of safetensors files: each rank its own parts.

model-00001-of-00002.safetensors  --runs of bytes-->  this rank's rows, in place        and back
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopar.core.part import Part
from autopar.errors import InputError
from autopar.results.files.whole_file import sync_file, sync_folder
from autopar.runtime.checkpoints.safetensors_files import (
    INDEX,
    TensorInFile,
    digest,
    lay_out,
    own_files,
    read_part,
    tensors_in,
    write_part,
)
from autopar.runtime.collectives.roll_call import collective, everybody
from autopar.runtime.module.parallel_module import ParallelModule, runner_of
from autopar.runtime.module.runner import Runner
from autopar.runtime.module.saves import on_all_ranks, on_rank_0
from autopar.runtime.parameters.parameters import local
from autopar.torch_seams.modules import unsaved_buffers

SHARD_BYTES = 5 << 30  # of a file at most, where nobody says another number
DRAFT = ".autopar.part"  # in the folder itself, so that files are moved within one file system
Rename = Callable[[str], str | None]


def load_pretrained(model: nn.Module, folder: str | Path, *, rename: Rename | None = None) -> None:
    """Load the weights of a folder of safetensors files into a parallel module; on all ranks.

    Each rank reads the rows that it holds and no others, so a model on the meta device, or larger than a
    rank's memory, is loaded without a whole copy anywhere. Names are the serial model's; `rename` gives the
    model's name for each one of the files, None for one to leave out. A tied weight is read by whichever of
    its names the files have. Values are cast to the parameters' dtypes. Each rank reads the folder that it
    sees: on several nodes each may have a copy.

    Raises InputError on every rank, before anything is changed, for names, shapes and kinds of numbers that
    differ, names of a tied weight with different values and ranks that see other weights, and after loading
    for buffers that no file has and the meta device left without values.
    """
    where, folder = "autopar.load_pretrained", Path(folder)
    runner = _runner(where, model)
    with collective(where):
        files = _files_of_all(where, folder, rename)
        _require_same(where, runner, files)
        sources = {
            name: [each for each in names if each in files] for name, names in _names_of(runner).items()
        }
        _require_one_value(where, runner, files, sources)
        on_all_ranks(where, lambda: _read(runner, files, sources))
        runner.tensors.accept_changes()
        left = sorted(name for name in runner.tensors.missing.names if not sources[name])
        runner.tensors.missing.names.intersection_update(left)
        if left := [name for name in left if name in _unsaved(runner)]:
            raise InputError(
                where=where,
                found=f"{', '.join(left[:3])} without values: buffers on the meta device",
                wanted="their values, which no file has",
                remedy="build the model with its parameters alone on the meta device, as by "
                "accelerate.init_empty_weights()",
            )


def save_pretrained(model: nn.Module, folder: str | Path, *, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a parallel module's weights to a folder that `from_pretrained` takes; on all ranks.

    Each rank writes the rows that it holds into safetensors files of at most `shard_bytes`, so that no rank
    has the whole. Tied weights are written once, by their first name. A model with a `config` of
    transformers has that written, too. All ranks must see the folder. Files of a model that was there are
    replaced once all is written, and other files stay.

    Raises InputError on every rank where the folder can't be written.
    """
    where, folder = "autopar.save_pretrained", Path(folder)
    runner = _runner(where, model)
    with collective(where):
        parts = {name: (tensor, part) for name, tensor, part in _parts(runner)}
        forms = _forms(runner, parts)
        draft = folder / DRAFT
        try:
            files = on_rank_0(where, lambda: _begin(draft, forms, shard_bytes))
            _require_written(where, everybody(_written(parts, files)))
            on_rank_0(where, lambda: _publish(draft, folder, model))
        finally:
            if dist.get_rank() == 0:
                shutil.rmtree(draft, ignore_errors=True)


def _runner(where: str, model: nn.Module) -> Runner:
    if not isinstance(model, ParallelModule):
        raise InputError(
            where=where,
            found=f"a {type(model).__name__}",
            wanted="the parallel module",
            remedy="pass what parallelize returned; transformers' from_pretrained loads a serial model",
        )
    runner = runner_of(model)
    runner.tensors.require_placed()
    return runner


def _parts(runner: Runner) -> Iterable[tuple[str, torch.Tensor, Part]]:
    """Parameters and saved buffers of this rank by the first of their saved names, with its part of each."""
    names, unsaved = _names_of(runner), _unsaved(runner)
    for name, tensor in runner.tensors.named():
        if saved := [each for each in (name, *names[name]) if each not in unsaved]:
            yield saved[0], tensor, runner.tree.stored[name].part.part


def _unsaved(runner: Runner) -> set[str]:
    """Names of buffers that no state dict has."""
    modules = runner.tree.root.named_modules()
    return {f"{path}.{name}".lstrip(".") for path, module in modules for name in unsaved_buffers(module)}


def _names_of(runner: Runner) -> dict[str, tuple[str, ...]]:
    """By each name of a parameter or buffer all that it has: several where it is tied."""
    parts = {name: item.part for name, item in runner.tree.stored.items()}
    return {name: (part.target, *part.aliases) for name, part in parts.items()}


def _files_of_all(where: str, folder: Path, rename: Rename | None) -> dict[str, TensorInFile]:
    """The tensors of this rank's files by the model's names. Raises InputError on every rank where one can't
    read them or they differ; collective."""
    files: dict[str, TensorInFile] = {}

    def look() -> str:
        files.update(_renamed(where, tensors_in(folder), rename))
        return digest(files)

    told = on_all_ranks(where, look)
    if other := [rank for rank, each in enumerate(told) if each != told[0]]:
        raise InputError(
            where=where,
            found=f"other tensors or values in {folder} on rank {other[0]} than on rank 0",
            wanted="the same weights for all ranks, by the same names",
            remedy="give all nodes copies of one folder, and pass the same rename= on all ranks",
        )
    return files


@torch.no_grad()
def _read(runner: Runner, files: Mapping[str, TensorInFile], sources: Mapping[str, Sequence[str]]) -> None:
    """Read this rank's parts."""
    for name, tensor, part in _parts(runner):
        read_part(files[sources[name][0]], part, local(tensor))


def _renamed(where: str, files: Mapping[str, TensorInFile], rename: Rename | None) -> dict[str, TensorInFile]:
    """The files' tensors by the model's names. Raises InputError where two have one."""
    olds: dict[str, str] = {}
    for old in files:
        new = _new_name(where, old, rename)
        if new is None:
            continue
        if new in olds:
            raise InputError(
                where=where,
                found=f"{new} given by rename= for {olds[new]} and for {old}",
                wanted="a name of its own for each tensor of the files",
                remedy="give None for the one to leave out",
            )
        olds[new] = old
    return {new: files[old] for new, old in olds.items()}


def _new_name(where: str, old: str, rename: Rename | None) -> str | None:
    try:
        return rename(old) if rename else old
    except Exception as error:
        raise InputError(
            where=where,
            found=f"{type(error).__name__} in rename= of {old}: {error}",
            wanted="the model's name, or None",
            remedy="mend the function",
        ) from error


def _require_same(where: str, runner: Runner, files: Mapping[str, TensorInFile]) -> None:
    """Raise InputError for names that the model or the files lack, and shapes and kinds that differ."""
    names, unsaved = _names_of(runner), _unsaved(runner)
    specs = {name: item.part.spec for name, item in runner.tree.stored.items()}
    wanted = {name: tuple(spec.shape) for name, spec in specs.items() if name not in unsaved}
    lacks = sorted(name for name in wanted if files.keys().isdisjoint(names[name]))
    more = sorted(files.keys() - wanted.keys())
    shapes = [name for name in wanted if name in files and files[name].shape != wanted[name]]
    others = [
        name for name in wanted if name in files and _kind(files[name].dtype) != _kind(specs[name].dtype)
    ]
    wrong = (
        ("without {}", lacks),
        ("with {}, which this model lacks", more),
        ("with {}", [f"{name} of {list(files[name].shape)} (here {list(wanted[name])})" for name in shapes]),
        ("with {}", [f"{name} of {files[name].dtype} (here {specs[name].dtype})" for name in others]),
    )
    if found := [words.format(_few(names)) for words, names in wrong if names]:
        raise InputError(
            where=where,
            found=f"files {'; '.join(found)}",
            wanted="the serial model's names, shapes and kinds of numbers",
            remedy="pass rename=, which gives the model's name for each of the files' or None; tie weights "
            "of a model on the meta device by tie_weights(); load whole what transformers joins",
        )


def _kind(dtype: torch.dtype) -> str:
    """The numbers of a dtype, which a cast keeps but for rounding."""
    if dtype.is_floating_point or dtype.is_complex:
        return "complex" if dtype.is_complex else "real"
    return "bool" if dtype is torch.bool else "integer"


def _require_one_value(
    where: str, runner: Runner, files: Mapping[str, TensorInFile], sources: Mapping[str, list[str]]
) -> None:
    """Raise InputError on every rank where the files have different values of one tied weight; collective."""

    def unlike() -> list[str]:
        differ = []
        for name, tensor, part in _parts(runner):
            first, *others = sources[name]
            values = _bytes_of(files[first], part, tensor.dtype) if others else None
            differ += [
                f"{first} unlike {other}"
                for other in others
                if values is not None and not torch.equal(values, _bytes_of(files[other], part, tensor.dtype))
            ]
        return differ

    if found := sorted({words for told in on_all_ranks(where, unlike) for words in told}):
        raise InputError(
            where=where,
            found=f"files with {_few(found)}",
            wanted="one value of a weight that this model ties",
            remedy="build the model untied, as it was saved, or leave one of them out: rename= gives None",
        )


def _bytes_of(source: TensorInFile, part: Part, dtype: torch.dtype) -> torch.Tensor:
    """A part of a tensor in a file, in the model's dtype, as bytes."""
    values = torch.empty(part.shape, dtype=dtype)
    read_part(source, part, values)
    return values.reshape(-1).view(torch.uint8)


def _few(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _forms(
    runner: Runner, parts: Mapping[str, tuple[torch.Tensor, Part]]
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Dtypes and serial shapes of all tensors to write, in the model's order; collective."""
    dtypes: dict[str, torch.dtype] = {}
    for told in everybody({name: tensor.dtype for name, (tensor, _) in parts.items()}):
        dtypes |= told
    stored = runner.tree.stored
    return {
        name: (dtypes[name], tuple(item.part.spec.shape)) for name, item in stored.items() if name in dtypes
    }


def _begin(
    draft: Path, forms: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], shard_bytes: int
) -> dict[str, TensorInFile]:
    draft.mkdir(parents=True, exist_ok=True)
    for left in draft.iterdir():
        left.unlink()
    return lay_out(draft, forms, shard_bytes)


def _written(parts: Mapping[str, tuple[torch.Tensor, Part]], files: Mapping[str, TensorInFile]) -> str:
    """Write this rank's parts that no rank before it has, too; words for what went wrong; collective."""
    rows = everybody({name: repr(part) for name, (_, part) in parts.items()})
    me = dist.get_rank()
    try:
        for name, (tensor, part) in parts.items():
            if not any(other.get(name) == repr(part) for other in rows[:me]):
                write_part(files[name], part, local(tensor))
    except OSError as error:
        return f"on rank {me}: {error.strerror}"
    return ""


def _require_written(where: str, faults: list[str]) -> None:
    if found := next(filter(None, faults), None):
        raise InputError(
            where=where,
            found=found,
            wanted="a folder that all ranks see and can write",
            remedy="name a folder on a file system that all nodes share, with room for the weights",
        )


def _publish(draft: Path, folder: Path, model: Any) -> None:
    """Move the files to the folder, the index last, beside the model's own description."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)
    made, before = sorted(draft.iterdir(), key=lambda path: path.name == INDEX), own_files(folder)
    for path in made:
        sync_file(path)
    for path in made:
        os.replace(path, folder / path.name)
    for name in before - {path.name for path in made}:
        (folder / name).unlink(missing_ok=True)
    sync_folder(folder)
