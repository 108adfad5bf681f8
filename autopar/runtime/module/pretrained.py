"""A model's weights from and to a folder of safetensors files: each rank its own parts.

model-00001-of-00002.safetensors  --runs of bytes-->  this rank's rows, in place        and back
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
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
    lay_out,
    read_part,
    tensors_in,
    write_part,
)
from autopar.runtime.collectives.roll_call import collective, everybody
from autopar.runtime.module.parallel_module import ParallelModule, runner_of
from autopar.runtime.module.runner import Runner
from autopar.runtime.module.saves import on_rank_0
from autopar.runtime.parameters.parameters import local
from autopar.torch_seams.modules import unsaved_buffers

SHARD_BYTES = 5 << 30  # of a file at most, where nobody says another number
Rename = Callable[[str], str | None]


def load_pretrained(model: nn.Module, folder: str | Path, *, rename: Rename | None = None) -> None:
    """Load the weights of a folder of safetensors files into a parallel module; on all ranks.

    Each rank reads the rows that it holds and no others, so a model on the meta device, or larger than a
    rank's memory, is loaded without a whole copy anywhere. Names are the serial model's; `rename` gives the
    model's name for each one of the files, None for one to leave out. Values are cast to the parameters'
    dtypes.

    Raises InputError on every rank, before anything is changed, for names and shapes that differ, and after
    loading for buffers that no file has and the meta device left without values.
    """
    where, folder = "autopar.load_pretrained", Path(folder)
    runner = _runner(where, model)
    with collective(where):
        files = _renamed(on_rank_0(where, lambda: tensors_in(folder)), rename)
        _require_same(where, runner, files)
        with torch.no_grad():
            for name, tensor, part in _parts(runner):
                if name in files:
                    read_part(files[name], part, local(tensor))
        runner.tensors.accept_changes()
        left = sorted(runner.tensors.valueless - files.keys() - _aliases(runner, files))
        runner.tensors.valueless.intersection_update(left)
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
    transformers has that written, too. All ranks must see the folder.

    Raises InputError on every rank where the folder can't be written.
    """
    where, folder = "autopar.save_pretrained", Path(folder)
    runner = _runner(where, model)
    with collective(where):
        parts = {name: (tensor, part) for name, tensor, part in _parts(runner)}
        forms = _forms(runner, parts)
        draft = folder.with_name(f".{folder.name}.part")
        files = on_rank_0(where, lambda: _begin(draft, forms, shard_bytes))
        rows = everybody({name: repr(part) for name, (_, part) in parts.items()})
        me, faults = dist.get_rank(), ""
        try:
            for name, (tensor, part) in parts.items():
                if not any(other.get(name) == repr(part) for other in rows[:me]):
                    write_part(files[name], part, local(tensor))
        except OSError as error:
            faults = f"on rank {me}: {error.strerror}"
        _require_written(where, everybody(faults))
        on_rank_0(where, lambda: _publish(draft, folder, model))


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
    """Parameters and saved buffers of this rank by their names, with its part of each."""
    unsaved = _unsaved(runner)
    for name, tensor in runner.tensors.named():
        if name not in unsaved:
            yield name, tensor, runner.tree.stored[name].part.part


def _unsaved(runner: Runner) -> set[str]:
    """Names of buffers that no state dict has."""
    modules = runner.tree.root.named_modules()
    return {f"{path}.{name}".lstrip(".") for path, module in modules for name in unsaved_buffers(module)}


def _aliases(runner: Runner, files: Mapping[str, Any]) -> set[str]:
    """Further names of tied tensors of which the files have one."""
    groups = [{item.part.target, *item.part.aliases} for item in runner.tree.stored.values()]
    return {name for names in groups if names & files.keys() for name in names}


def _renamed(files: Mapping[str, TensorInFile], rename: Rename | None) -> dict[str, TensorInFile]:
    pairs = ((rename(name) if rename else name, tensor) for name, tensor in files.items())
    return {name: tensor for name, tensor in pairs if name is not None}


def _require_same(where: str, runner: Runner, files: Mapping[str, TensorInFile]) -> None:
    """Raise InputError for names that the model or the files lack, and shapes that differ."""
    stored, unsaved = runner.tree.stored, _unsaved(runner)
    wanted = {name: tuple(item.part.spec.shape) for name, item in stored.items() if name not in unsaved}
    known = wanted.keys() | {name for item in stored.values() for name in item.part.aliases}
    lacks = sorted(wanted.keys() - files.keys() - _aliases(runner, files))
    more = sorted(files.keys() - known)
    shapes = [name for name in wanted if name in files and files[name].shape != wanted[name]]
    kinds = (
        ("without {}", lacks),
        ("with {}, which this model lacks", more),
        ("with {}", [f"{name} of {list(files[name].shape)} (here {list(wanted[name])})" for name in shapes]),
    )
    if found := [words.format(_few(names)) for words, names in kinds if names]:
        raise InputError(
            where=where,
            found=f"files {'; '.join(found)}",
            wanted="the serial model's names and shapes",
            remedy="pass rename=, which gives the model's name for each of the files' or None; tie weights "
            "of a model on the meta device by tie_weights(); load whole what transformers joins",
        )


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
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config.save_pretrained(folder)
    for old in (*folder.glob("model*.safetensors"), folder / INDEX):
        old.unlink(missing_ok=True)
    for path in sorted(draft.iterdir(), key=lambda path: path.name == INDEX):
        sync_file(path)
        os.replace(path, folder / path.name)
    draft.rmdir()
    sync_folder(folder)
