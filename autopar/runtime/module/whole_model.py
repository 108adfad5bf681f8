"""The serial model for a while: whole tensors in the place of a rank's parts, in the user's classes.

    with autopar.full(parallel) as model:        parts  --gather-->  whole parameters and buffers
        model.generate(ids)                      eager code: nothing of autopar is there
                                                 what has changed  --cut-->  parts, in place; the rest goes

`model` is `parallel` itself. Its tensors are copies, also of those that every rank has whole: what an
exception leaves behind is dropped with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autopar.errors import InputError
from autopar.runtime.collectives.roll_call import collective
from autopar.runtime.module.parallel_module import ParallelModule, runner_of
from autopar.runtime.module.runner import Runner
from autopar.runtime.parameters.parameters import local
from autopar.runtime.programs.agreement import whole_bytes
from autopar.runtime.tree import old_parameters
from autopar.runtime.tree.user_tree import UserTree
from autopar.torch_seams import pytree
from autopar.torch_seams.modules import own_tensors
from autopar.trace.call.user_source import calling_line

WHERE = "the end of autopar.full"
_CHUNK = 1 << 20  # bytes that are summed at a time
_open: dict[int, nn.Module] = {}  # the roots that are whole at the moment, by id


@contextmanager
def full(parallel: Any) -> Iterator[Any]:
    """Context in which the parallel module is the serial model, with all of its weights, on every rank;
    collective.

    For what no program does: `generate`, `save_pretrained`, a submodule's call, an export, a statistic of a
    weight. It takes the memory of the whole model beside that of this rank's parts, and gives it back.

    Parameters and buffers that are changed inside are changed in the parallel module when the block ends,
    which raises InputError where ranks have changed them unlike each other, and where shapes, dtypes or names
    have changed. After an exception they are as they were. Gradients are not there inside; those made there
    are refused at the end, as are steps of the parallel module's optimizer within. Hooks, modes and
    attributes are the module's own, and stay.
    """
    if id(parallel) in _open:
        yield parallel
        return
    if not isinstance(parallel, ParallelModule):
        raise InputError(
            where=calling_line(),
            found=f"autopar.full of a {type(parallel).__name__}",
            wanted="the parallel module, whose parts belong together",
            remedy="pass what parallelize returned, and use its modules inside",
        )
    runner = runner_of(parallel)
    runner.tensors.require_placed()
    with collective("autopar.full"):
        whole = _Whole(runner)
    try:
        with runner.tree.plain() as root, whole.lent():
            _open[id(root)] = root
            try:
                yield root
            finally:
                del _open[id(root)]
        with collective(WHERE):
            whole.write_back()
    finally:
        whole.end()


@dataclass(slots=True)
class _Tensor:
    """One tensor of the model: whole, and this rank's part; `names` are those of tied ones."""

    names: tuple[str, ...]
    whole: Tensor
    part: Tensor | None
    requires_grad: bool
    now: Tensor | None = None  # what is there in the end

    @property
    def name(self) -> str:
        kind = "parameter" if isinstance(self.whole, nn.Parameter) else "buffer"
        return f"{kind} {self.names[0]}"


class _Whole:
    """The whole tensors of a parallel module."""

    def __init__(self, runner: Runner) -> None:
        self._tree = runner.tree
        self._states = runner.tensors.whole_states()
        self._problems: list[str] = []
        held = dict(self._tree.named_tensors())
        names: dict[int, list[str]] = {}
        for name, stored in self._tree.stored.items():
            names.setdefault(id(stored), []).append(name)
        with torch.inference_mode(False), torch.no_grad():
            self._tensors = [self._gather(tuple(tied), held) for tied in names.values()]

    def _gather(self, names: tuple[str, ...], held: Mapping[str, Tensor]) -> _Tensor:
        name = names[0]
        part, stored = held.get(name), self._tree.stored[name]
        whole = stored.gather(part)
        if part is not None and whole.data_ptr() == local(part).data_ptr():
            whole = whole.clone()
        requires_grad = self._states[name][1]
        if self._tree.is_parameter(name):
            whole = nn.Parameter(whole, requires_grad)
        return _Tensor(names, whole, part, requires_grad)

    # -- while it lasts -------------------------------------------------------------------------------

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Modules hold the whole tensors within."""
        before = _Before(self._tree)
        steps = register_optimizer_step_pre_hook(self._refuse_step)
        lists = self._tree.put_by_name({name: item.whole for item in self._tensors for name in item.names})
        try:
            yield
        finally:
            steps.remove()
            held = dict(self._tree.named_tensors())
            for item in self._tensors:
                item.now = held.get(item.names[0])
            self._problems = before.restore()
            self._tree.set_attributes(lists)

    def _refuse_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parts = {id(item.part) for item in self._tensors}
        if any(id(item) in parts for group in optimizer.param_groups for item in group["params"]):
            raise InputError(
                where=f"step of {type(optimizer).__name__}, {calling_line()}",
                found="parameters of the parallel module inside autopar.full",
                wanted="steps outside, where modules hold them",
                remedy="step before or after the block",
            )

    def end(self) -> None:
        """Free the memory of the whole tensors, whoever still holds them."""
        for item in self._tensors:
            if isinstance(item.whole, nn.Parameter):
                old_parameters.ended(item.whole, item.names[0])

    # -- afterwards -----------------------------------------------------------------------------------

    @torch.no_grad()
    def write_back(self) -> None:
        """Change parts as the whole tensors were; raises InputError first for what can't be."""
        self._check()
        self._check_alike()
        for item in self._tensors:
            requires_grad = item.now is not None and item.now.requires_grad
            if (
                item.part is not None
                and requires_grad != item.requires_grad
                and isinstance(item.part, nn.Parameter)
            ):
                item.part.requires_grad_(requires_grad)
            if self._is_changed(item):
                assert item.part is not None
                local(item.part).copy_(self._cut(item))

    def _cut(self, item: _Tensor) -> Tensor:
        assert item.now is not None
        return self._tree.stored[item.names[0]].part.part.take(item.now.detach())

    def _is_changed(self, item: _Tensor) -> bool:
        """Whether this rank's part of the whole tensor differs from the parameter's, bit by bit: some values
        are no numbers."""
        return item.part is not None and whole_bytes(self._cut(item)) != whole_bytes(local(item.part))

    def _check_alike(self) -> None:
        """Raise InputError on every rank where whole tensors differ between ranks; collective."""
        mine = [(item.name, _sums(item.now)) for item in self._tensors if item.now is not None]
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, mine)
        for rank, theirs in enumerate(everywhere):
            for one, other in zip(everywhere[0], theirs, strict=True):
                if one != other:
                    raise _refused(
                        f"{other[0]} on rank {rank} unlike that on rank 0",
                        "the same on all ranks",
                        "change weights alike on all ranks, or those of a copy.deepcopy of the model",
                    )

    def _check(self) -> None:
        """Raise InputError for what can't be taken over."""
        problems = list(self._problems)
        for item in self._tensors:
            now = item.now
            if now is None:
                problems.append(f"{item.name}, which is gone")
            elif (now.shape, now.dtype) != (item.whole.shape, self._states[item.names[0]][0]):
                problems.append(f"{item.name} as {now.dtype}{list(now.shape)}")
        if problems:
            raise _refused(
                problems[0] + (f" and {len(problems) - 1} more" if len(problems) > 1 else ""),
                "names, shapes and dtypes as they were planned",
                "change dtypes of the parallel module itself, and modules before parallelize",
            )
        learned = [item.name for item in self._tensors if item.now is not None and item.now.grad is not None]
        if learned:
            raise _refused(
                f"a gradient of {learned[0]} that was made inside",
                "gradients of the parallel module, which steps take",
                "call the parallel module outside, or model.zero_grad() before the end",
            )


class _Before:
    """Contents of modules before, without attributes, which are the user's to change."""

    def __init__(self, tree: UserTree) -> None:
        self._tensors = [(held, dict(held)) for module in tree.modules for held in own_tensors(module)]
        self._attributes = [(vars(module), dict(vars(module))) for module in tree.modules]

    def restore(self) -> list[str]:
        """Put parts back, and drop attributes that hold a graph; what has come or gone meanwhile."""
        changes: list[str] = []
        for held, before in self._tensors:
            changes += [f"{name}, which came inside" for name in held if name not in before]
            held.clear()
            held.update(before)
        for attributes, before in self._attributes:
            for name in [name for name in attributes if _holds_graph(attributes[name])]:
                if name in before:
                    attributes[name] = before[name]
                else:
                    del attributes[name]
        return changes


def _holds_graph(value: Any) -> bool:
    """Whether a value keeps the whole model's graph, and so its weights."""
    if not isinstance(value, (Tensor, list, tuple, dict)):
        return False
    return any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in pytree.tree_leaves(value))


def _sums(tensor: Tensor) -> tuple[int, ...]:
    """Sums of a tensor's bytes, plain and by their places, modulo 2^64: quicker than a digest."""
    flat = tensor.detach().reshape(-1).resolve_conj().contiguous().view(torch.uint8)
    places = torch.arange(1, 2 * _CHUNK, 2, device=flat.device)
    sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for number, chunk in enumerate(flat.split(_CHUNK), 1):
        words = chunk.long()
        sums += torch.stack([words.sum(), (words * (places[: len(words)] + number)).sum() * (2 * number + 1)])
    return tuple(sums.tolist())


def _refused(found: str, wanted: str, remedy: str) -> InputError:
    return InputError(where=f"{WHERE}, {calling_line()}", found=found, wanted=wanted, remedy=remedy)
