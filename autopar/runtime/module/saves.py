"""A run's state in a folder, and back: into any plan, any number of ranks, and the serial model.

    save    tensors --chunks in serial order-->  torch.distributed.checkpoint    each rank its own file
            the rest: groups, random states, modes, samples                      rank 0, state.pt
            what is in it, sizes of files                                        rank 0, save.json; rename

Folders and their names are known by checkpoints/save_folders.py. What is done on rank 0 alone fails on all
ranks, so that none waits for one that has raised.
"""

from __future__ import annotations

import copy
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors

from autopar.errors import InputError
from autopar.runtime.checkpoints import save_folders
from autopar.runtime.checkpoints.random_states import random_states, restore
from autopar.runtime.checkpoints.save_folders import GoodSave, Manifest, cut
from autopar.runtime.collectives.roll_call import collective, everybody
from autopar.runtime.module.extra_values import require_alike_extra
from autopar.runtime.module.parallel_module import ParallelModule, runner_of
from autopar.runtime.module.run_state import RunState, merged
from autopar.runtime.module.runner import Runner
from autopar.runtime.module.sampler import BatchSampler

KEPT_SAVES = 3  # good saves that stay in a folder, where nobody says another number
STATE_FILE = "state.pt"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LoadedSave:
    """A save that was loaded: its folder, and what `save` was told of the run."""

    path: Path
    step: int | None
    samples: int | None
    extra: Any


def save(
    folder: str | Path,
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    sampler: Any = None,
    step: int | None = None,
    extra: Any = None,
    keep: int = KEPT_SAVES,
    background: bool = False,
) -> Path:
    """Save the run below `folder`, where it counts once it is whole; returns the save's own folder.

    Saved are the model's parameters and buffers, optimizers' state, the state dicts of `scheduler`, `scaler`
    and `sampler`, modes of modules, random states, `step`, and `extra`, plain values and whole tensors that
    all ranks have alike. The last `keep` good saves stay. Call it between steps, on all ranks: gradients
    aren't saved.

    With `background` tensors are copied, and a thread writes the copies while the run goes on: the save
    counts once `finish_saves`, or the next `save` or `load`, has given it its name.

    Raises InputError on every rank, leaving earlier saves as they are, where ranks differ or the folder can't
    be written.
    """
    folder = Path(folder).absolute()
    where = f"autopar.save to {folder}"
    if keep < 1:
        raise InputError(where=where, found=f"keep={keep}", wanted="at least 1", remedy="leave it out")
    run = RunState.of(model, optimizer, scheduler=scheduler, scaler=scaler, sampler=sampler)
    finish_saves()
    with collective("autopar.save"):
        parts = run.parts()
        run.require_alike(parts)
        require_alike_extra(where, extra)
        tensors = run.written(run.tensors())
        forms = merged(everybody(run.forms(tensors["model"])))
        state = {
            **parts,
            "extra": extra,
            "groups": run.groups(),
            "kept": merged(everybody(run.kept(tensors["optimizer"]))),
            "modes": {path: module.training for path, module in model.named_modules()},
            "streams": _streams(model),
            "random": everybody(random_states()),
        }
        manifest = Manifest(
            step=step,
            samples=sampler.samples if isinstance(sampler, BatchSampler) else None,
            world=len(state["random"]),
            model=forms,
            optimizers=run.kinds,
            parts=tuple(parts),
            files={},
            torch=str(torch.__version__),
        )
        draft = on_rank_0(where, lambda: _begin(folder, where, state))
        under_way = SaveUnderWay(where, draft, manifest, keep)
        return under_way.begin(tensors) if background else under_way.write(tensors)


def require_folder(where: str, folder: Path) -> None:
    """Raise InputError on every rank unless rank 0 can write to the folder, and all see it; collective."""
    path = on_rank_0(where, lambda: save_folders.probe(folder, where))
    seen = everybody(path.is_file())
    on_rank_0(where, path.unlink)
    if not all(seen):
        raise InputError(
            where=where,
            found=f"no file of rank 0's on rank {seen.index(False)}",
            wanted="one folder that all ranks see",
            remedy="name a folder on a file system that all nodes share",
        )


@dataclass(slots=True)
class SaveUnderWay:
    """A draft that ranks write, in a thread if they `begin` it, and its name once all have."""

    where: str
    draft: Path
    manifest: Manifest
    keep: int
    _thread: threading.Thread | None = None
    _error: BaseException | None = None
    _files: dict[str, tuple[int, int]] = field(default_factory=dict)

    def write(self, tensors: dict[str, Any]) -> Path:
        """Write the tensors and publish the save; collective."""
        self._write(tensors, None)
        return self.finish()

    def begin(self, tensors: dict[str, Any]) -> Path:
        """Write copies of the tensors in a thread; where the save will be; collective."""
        global _under_way
        copies, group = _copied(tensors), _group_of_saves()
        self._thread = threading.Thread(
            target=self._write, args=(copies, group), name="autopar save", daemon=True
        )
        self._thread.start()
        _under_way = self
        return save_folders.published_name(self.draft)

    def _write(self, tensors: dict[str, Any], group: dist.ProcessGroup | None) -> None:
        """Write this rank's tensors, and find their checksums; what goes wrong is told by `finish`."""
        try:
            with _told_by_torch(self.where):
                writer, alone = FileSystemWriter(self.draft), not dist.is_initialized()
                save_tensors(tensors, storage_writer=writer, process_group=group, no_dist=alone)
            self._files = save_folders.listed(self.draft, f"__{_rank()}_*")
        except BaseException as error:
            self._error = error

    @property
    def is_written(self) -> bool:
        """Whether this rank has written all of its own."""
        return self._thread is None or not self._thread.is_alive()

    def finish(self) -> Path:
        """Publish the save once all ranks have written, or raise what went wrong; collective."""
        if self._thread is not None:
            self._thread.join()
        try:
            if self._error is not None:
                raise self._error
            written = merged(everybody(self._files))
            path = on_rank_0(self.where, lambda: _finish(self.draft, self.where, self.manifest, written))
        except BaseException:
            if _rank() == 0:
                shutil.rmtree(self.draft, ignore_errors=True)
            raise
        on_rank_0(self.where, lambda: save_folders.drop_old(self.draft.parent, self.keep))
        return path


_under_way: SaveUnderWay | None = None
_groups: dict[int, dist.ProcessGroup] = {}  # for threads that save, by the id of the world


def finish_saves(*, wait: bool = True) -> None:
    """Let a save count that `save(background=True)` has begun, on all ranks; nothing where there is none.

    Without `wait` only if all ranks have written it. Raises InputError on every rank where it couldn't be.
    """
    global _under_way
    under_way = _under_way
    if under_way is None:
        return
    with collective("autopar.finish_saves"):
        if wait or all(everybody(under_way.is_written)):
            _under_way = None
            under_way.finish()


def _group_of_saves() -> dist.ProcessGroup | None:
    """Group of all ranks on which threads alone speak; collective the first time."""
    world = dist.group.WORLD
    if world is None:
        return None
    if id(world) not in _groups:
        made: Any = dist.new_group(backend="gloo")
        _groups[id(world)] = made
    return _groups[id(world)]


def _copied(tree: Any) -> Any:
    """The tree with copies of its tensors."""
    if isinstance(tree, Mapping):
        return {name: _copied(item) for name, item in tree.items()}
    return tree.detach().clone() if isinstance(tree, Tensor) else copy.deepcopy(tree)


def _begin(folder: Path, where: str, state: dict[str, Any]) -> Path:
    """Make a draft with what rank 0 writes beside tensors."""
    raw = _packed(where, state)
    draft = save_folders.begin(folder)
    try:
        (draft / STATE_FILE).write_bytes(raw)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return draft


def _finish(draft: Path, where: str, manifest: Manifest, written: Mapping[str, tuple[int, int]]) -> Path:
    """Give the draft its name."""
    if absent := [name for name in written if not (draft / name).is_file()]:
        raise InputError(
            where=where,
            found=f"no {absent[0]} of another rank in rank 0's folder",
            wanted="one folder that all ranks see",
            remedy="name a folder on a file system that all nodes share",
        )
    own = {path.name for path in draft.iterdir()} - written.keys()
    files = {**written, **merged(save_folders.listed(draft, name) for name in own)}
    return save_folders.publish(draft, replace(manifest, files=files))


def _packed(where: str, state: dict[str, Any]) -> bytes:
    """The bytes of a state that can be loaded without running anyone's code."""
    for name, value in state.items():
        try:
            _unpacked(_bytes(value))
        except Exception as error:  # of the user's own classes any
            raise InputError(
                where=where,
                found=f"{name} with what can't be loaded again: {cut(error)}",
                wanted="numbers, texts, tensors, and lists and dicts of them",
                remedy="pass such values, and make the rest of them when it is loaded",
            ) from error
    return _bytes(state)


def _bytes(value: Any) -> bytes:
    buffer = BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(raw: bytes) -> Any:
    return torch.load(BytesIO(raw), map_location="cpu", weights_only=True)


# -- loading ------------------------------------------------------------------------------------


def load(
    folder: str | Path,
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    sampler: Any = None,
    only_model: bool = False,
    missing_ok: bool = False,
) -> LoadedSave | None:
    """Load the newest good save below `folder`, or the save at `folder`, on all ranks; returns what it was.

    `model` is a parallel module under any plan, or the serial model. All that was saved must be passed, so
    that no state is left out unseen; with `only_model` parameters and buffers alone are loaded. Newer
    folders that aren't good are told on stderr. Gradients are dropped. With `missing_ok` a folder without any
    save gives None, as at the first start of a job.

    Raises InputError on every rank for a folder without a good save, and for a save of another run.
    """
    folder = Path(folder).absolute()
    where = f"autopar.load of {folder}"
    finish_saves()
    run = RunState.of(model, optimizer, scheduler=scheduler, scaler=scaler, sampler=sampler)
    with collective("autopar.load"):
        good = _found(folder, where)
        if good is None and missing_ok:
            return None
        if good is None:
            raise InputError(
                where=where,
                found="no save",
                wanted="a folder that autopar.save has written",
                remedy="name that folder, or pass missing_ok=True where a run may begin",
            )
        where = f"autopar.load of {good.path}"
        state = on_rank_0(where, lambda: _unpacked((good.path / STATE_FILE).read_bytes()))
        run.check(where, good.manifest, state, only_model=only_model)
        with _told_by_torch(where):
            run.load(good.path, state, only_model=only_model)
        if not only_model:
            _restore(model, state)
        manifest = good.manifest
        return LoadedSave(good.path, manifest.step, manifest.samples, state["extra"])


def _found(folder: Path, where: str) -> GoodSave | None:
    """The save to load, of whose files each rank has read some; None where there is nothing; collective."""
    spoiled: dict[str, str] = {}
    while True:
        good = on_rank_0(where, lambda: save_folders.find(folder, spoiled))
        if good is None:
            return None
        faults = everybody(save_folders.spoiled_file(good, _rank(), _size()))
        if not any(faults):
            break
        spoiled[good.path.name] = next(filter(None, faults))
    for name, fault in good.left_out.items() if _rank() == 0 else ():
        print(f"autopar: {name} is {fault}; loading {good.path.name}", file=sys.stderr, flush=True)
    return good


def _restore(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Put back modes and random states, these last: loading may draw."""
    for path, module in model.named_modules():
        module.training = state["modes"].get(path, module.training)
    runners = _runners(model)
    for path, place in state["streams"].items():
        if path in runners and (stream := runners[path].stream) is not None:
            stream.go_to(tuple(place))
    alike = any(runner.draws_alike for runner in runners.values())
    restore(state["random"], _rank(), _size(), alike=alike)


def _runners(model: nn.Module) -> dict[str, Runner]:
    """The runners of parallel modules in a model, by their paths."""
    modules = model.named_modules()
    return {path: runner_of(module) for path, module in modules if isinstance(module, ParallelModule)}


def _streams(model: nn.Module) -> dict[str, tuple[int, int]]:
    """The places of the streams from which parallel modules draw masks, by their paths."""
    streams = {path: runner.stream for path, runner in _runners(model).items()}
    return {path: stream.place for path, stream in streams.items() if stream is not None}


# -- ranks --------------------------------------------------------------------------------------


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def on_rank_0(where: str, act: Callable[[], T]) -> T:
    """Rank 0's result on all ranks, or its error on all; collective."""
    told = everybody(_tried(where, act) if _rank() == 0 else None)[0]
    if isinstance(told, InputError):
        raise told
    return told  # type: ignore[return-value]


def on_all_ranks(where: str, act: Callable[[], T]) -> list[T]:
    """Every rank's result on all ranks, or the first rank's error on all; collective."""
    told = everybody(_tried(where, act))
    if errors := [each for each in told if isinstance(each, InputError)]:
        raise errors[0]
    return told  # type: ignore[return-value]


def _tried(where: str, act: Callable[[], T]) -> T | InputError:
    """The result on this rank, or what went wrong, for others to be told."""
    try:
        return act()
    except InputError as error:
        return error
    except Exception as error:  # of files that are torn, of memory, or of a user's function
        return _failed(where, error, _rank())


@contextmanager
def _told_by_torch(where: str) -> Iterator[None]:
    """Context in which a failure of torch's own saving and loading is an InputError on all ranks."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # the serial model's
            yield
    except CheckpointException as error:
        rank, (cause, _) = next(iter(error.failures.items()))
        raise (cause if isinstance(cause, InputError) else _failed(where, cause, rank)) from error


def _failed(where: str, cause: BaseException, rank: int) -> InputError:
    return InputError(
        where=where,
        found=f"on rank {rank}: {cut(cause)}",
        wanted="a folder that can be written and read, with room for the save",
        remedy="make room or name another folder; saves that were good stay as they are",
    )
