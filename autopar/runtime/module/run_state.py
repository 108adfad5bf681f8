"""Everything that a save has of a run, and whether what a save has is this run's.

Tensors go by the serial model's names, whatever plan they are under.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from autopar.errors import InputError
from autopar.runtime.checkpoints.save_folders import Manifest
from autopar.runtime.collectives.roll_call import everybody
from autopar.runtime.collectives.statements import StatementPart
from autopar.runtime.module.parallel_module import ParallelModule, runner_of
from autopar.runtime.programs.agreement import compare

_PARAMETERS, _NAMES = "params", "param_names"  # of a group, beside its options
OptimizerStates = dict[str, dict[str, dict[str, Any]]]  # by the optimizer's number, and names of parameters


@dataclass(frozen=True, slots=True)
class RunState:
    """A model, its optimizers, and what else has a state dict."""

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    others: Mapping[str, Any]

    @staticmethod
    def of(
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
        **others: Any,
    ) -> RunState:
        """The state of a run; those of `others` that are None are not there."""
        single = isinstance(optimizer, torch.optim.Optimizer)
        optimizers = (optimizer,) if single else tuple(optimizer or ())  # type: ignore[arg-type]
        known = {name: item for name, item in others.items() if item is not None}
        for module in model.modules():
            if isinstance(module, ParallelModule):
                runner_of(module).tensors.require_placed()
        return RunState(model, optimizers, known)  # type: ignore[arg-type]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the optimizers' classes."""
        return tuple(type(item).__name__ for item in self.optimizers)

    # -- saving ---------------------------------------------------------------------------------

    def parts(self) -> dict[str, Any]:
        """State dicts of what is neither model nor optimizer."""
        return {name: item.state_dict() for name, item in self.others.items()}

    def require_alike(self, parts: Mapping[str, Any]) -> None:
        """Raise InputError on every rank where they differ in these; collective."""
        remedy = "take the same steps with it on all ranks"
        compare(
            StatementPart(f"state of the {name}", remedy, _digestible(item)) for name, item in parts.items()
        )

    def _model_state(self) -> dict[str, Any]:
        """The model's state by names; a rank of a pipeline may hold none of it."""
        return get_model_state_dict(self.model, options=StateDictOptions(strict=False))

    def tensors(self, *, makes_room: bool = False) -> dict[str, Any]:
        """Chunks that this rank has of model and optimizers; collective.

        An optimizer that hasn't stepped has none, unless this `makes_room` for what is loaded.
        """
        have_stepped = [bool(item.state) for item in self.optimizers]
        states = [
            self._by_names(item)["state"] for item in self.optimizers
        ]  # on all ranks, as it is collective
        named = {
            str(number): states[number] if makes_room or has_stepped else {}
            for number, has_stepped in enumerate(have_stepped)
        }
        return {"model": self._model_state(), "optimizer": named}

    def written(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors that this rank writes: others have the rest, perhaps in other parts."""
        placed = {
            f"{path}." if path else "": runner_of(module).tensors
            for path, module in self.model.named_modules()
            if isinstance(module, ParallelModule)
        }

        def writes(name: str) -> bool:
            inside = (each for each in placed if name.startswith(each))
            return all(placed[each].writes(name.removeprefix(each)) for each in inside)

        return {
            "model": {name: item for name, item in tensors["model"].items() if writes(name)},
            "optimizer": {
                number: {name: item for name, item in states.items() if writes(name)}
                for number, states in tensors["optimizer"].items()
            },
        }

    def _by_names(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """An optimizer's state dict by names; collective.

        Torch lets one that hasn't stepped make a state by a step, which would count: it goes again.
        """
        has_stepped = bool(optimizer.state)
        state: Any = get_optimizer_state_dict(self.model, optimizer)
        if not has_stepped:
            optimizer.state.clear()
        return state  # type: ignore[no-any-return]

    def groups(self) -> list[list[dict[str, Any]]]:
        """Groups of each optimizer, with parameters by name; collective."""
        return [
            [
                {key: value for key, value in group.items() if key != _NAMES}
                for group in self._by_names(item)["param_groups"]
            ]
            for item in self.optimizers
        ]

    @staticmethod
    def forms(weights: Mapping[str, Any]) -> dict[str, str]:
        """Dtype and serial shape of each tensor that this rank has a part of."""
        return {name: _form(item) for name, item in weights.items()}

    @staticmethod
    def kept(states: OptimizerStates) -> dict[str, list[str]]:
        """Names of the values that optimizers keep of each parameter."""
        return {
            f"{number}.{name}": sorted(values)
            for number, state in states.items()
            for name, values in state.items()
        }

    # -- checks ---------------------------------------------------------------------------------

    def check(self, where: str, saved: Manifest, state: Mapping[str, Any], *, only_model: bool) -> None:
        """Raise InputError for a save of another run; collective."""
        forms = merged(everybody(self.forms(self._model_state())))
        _require_same_model(where, saved.model, forms)
        if only_model:
            return
        self._check_parts(where, saved)
        for number, groups in enumerate(self.groups()):
            _require_same_groups(where, self.kinds[number], state["groups"][number], groups)

    def _check_parts(self, where: str, saved: Manifest) -> None:
        theirs = [*(f"optimizer {name}" for name in saved.optimizers), *saved.parts]
        mine = [*(f"optimizer {name}" for name in self.kinds), *self.others]
        if sorted(theirs) != sorted(mine) or saved.optimizers != self.kinds:
            raise InputError(
                where=where,
                found=f"a save of {', '.join(['the model', *theirs])}",
                wanted=f"one of {', '.join(['the model', *mine])}, as passed",
                remedy="pass what autopar.save was given, in the same order; only_model=True leaves out all "
                "but parameters and buffers",
            )

    # -- loading --------------------------------------------------------------------------------

    def load(self, path: Path, state: Mapping[str, Any], *, only_model: bool) -> None:
        """Load the save at `path`, which has been checked; collective."""
        for parameter in self.model.parameters():
            parameter.grad = None
        wanted: dict[str, Any] = {"model": self._model_state()} if only_model else self._wanted(path, state)
        load_tensors(wanted, storage_reader=FileSystemReader(path), no_dist=not dist.is_initialized())
        strict = StateDictOptions(strict=bool(wanted["model"]))  # a stage may have nothing
        set_model_state_dict(self.model, wanted["model"], options=strict)
        if only_model:
            return
        for number, item in enumerate(self.optimizers):
            given: Any = {"state": wanted["optimizer"][str(number)], "param_groups": state["groups"][number]}
            set_optimizer_state_dict(self.model, item, given, options=StateDictOptions(strict=False))
        for name, other in self.others.items():
            other.load_state_dict(state[name])

    def _wanted(self, path: Path, state: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors to load, without the state of parameters that had none yet; collective.

        Raises InputError on every rank where an optimizer keeps other values than the saved one did.
        """
        wanted = self.tensors(makes_room=True)
        kept, mine = state["kept"], merged(everybody(self.kept(wanted["optimizer"])))
        other = [name for name in kept if mine.get(name) != kept[name]]
        if other:
            number, _, name = other[0].partition(".")
            raise InputError(
                where=f"autopar.load of {path}",
                found=f"{', '.join(kept[other[0]])} of {name}, kept by {self.kinds[int(number)]}",
                wanted=", ".join(mine.get(other[0], ())) or "no state of it, as it isn't learned here",
                remedy="make the optimizer with the same options, of parameters that learn as they did",
            )
        for number, states in wanted["optimizer"].items():
            for name in [name for name in states if f"{number}.{name}" not in kept]:
                del states[name]
        return wanted


def merged(told: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The entries of all ranks."""
    return {name: value for each in told for name, value in each.items()}


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


def _digestible(value: Any) -> bytes:
    """Bytes that are the same for equal values, whichever objects they share."""
    buffer = BytesIO()
    pickler = pickle.Pickler(buffer)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()


def _require_same_model(where: str, saved: Mapping[str, str], forms: Mapping[str, str]) -> None:
    """Raise InputError naming what differs between the save's model and this one."""
    both = [name for name in forms if name in saved and saved[name] != forms[name]]
    kinds = {
        "with {}, which this model lacks": [name for name in saved if name not in forms],
        "without {}": [name for name in forms if name not in saved],
        "with {}": [f"{name} as {saved[name]} (here {forms[name]})" for name in both],
    }
    if found := [words.format(_few(names)) for words, names in kinds.items() if names]:
        raise InputError(
            where=where,
            found=f"a save of another model: {'; '.join(found)}",
            wanted="this model's names, shapes and dtypes",
            remedy="build the model as it was saved, or pass the folder of this one's run",
        )


def _few(names: Sequence[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _require_same_groups(
    where: str, kind: str, saved: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]
) -> None:
    """Raise InputError where an optimizer has other parameters, or puts together what had other options."""
    options = {name: _options(group) for group in saved for name in group["params"]}
    names = {name for group in groups for name in group["params"]}
    other = sorted(names ^ options.keys())
    joined = [
        group["params"][0] for group in groups if len({options.get(name) for name in group["params"]}) > 1
    ]
    if other or joined:
        raise InputError(
            where=where,
            found=f"{kind} with "
            + (f"{other[0]} in one of them alone" if other else f"{joined[0]} in another group"),
            wanted="the groups of parameters that were saved",
            remedy="make the optimizer as it was made for the run that was saved",
        )


def _options(group: Mapping[str, Any]) -> str:
    return repr({key: value for key, value in group.items() if key != _PARAMETERS})
