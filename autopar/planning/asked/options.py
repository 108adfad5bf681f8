"""Options of planning, each declared once: its name, type, default, meaning and check.

    autopar.plan(..., stages=2)            keywords of a door, which type checkers know: PlanOptions
    autopar plan TARGET --stages 2         flags of the command line, made from OPTIONS
    AUTOPAR_OPTIONS='{"stages": 2}'        where a script that calls parallelize says nothing

None says nothing. What nobody says is the door's own default, or else the table's. Nothing here needs torch
or a solver, so that wrong words are told at once; planning/asked/request.py makes a Request of what is right.
"""

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, TypeVar, get_args

from autopar.core.force import Force, Parallelism, Pins
from autopar.core.gathering import ShardState
from autopar.core.loss_pieces import LossPieces
from autopar.core.mesh import Mesh
from autopar.core.offload import Offload
from autopar.core.outputs import Outputs
from autopar.core.precision import Precision
from autopar.core.recompute import Recompute
from autopar.core.schedule import ScheduleKind
from autopar.errors import InputError, show_value
from autopar.planning.asked.option_values import (
    AUTO,
    as_said,
    read_batch_dims,
    read_choice,
    read_count,
    read_force,
    read_gap,
    read_imbalance,
    read_measure_seconds,
    read_memory,
    read_mesh,
    read_optimizer,
    read_schedule,
    read_static,
    read_time_limit,
)

if TYPE_CHECKING:
    from autopar.planning.asked.optimizer_state import OptimizerLike

DEFAULT_GAP = 1e-3  # relative
MEASURE_SECONDS = 60.0
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """Declaration of an option, shared by the Python API, the command line and the environment.

    `words` are the types as which JSON says it, `types` those that only Python says, of which errors show an
    `example`; `metavar` and `help` are the command line's, `more` what a line can't say; `read` checks a
    value and gives what the search takes, or raises InputError.
    """

    help: str
    more: str = ""
    without: str = ""  # the help of the flag that says no, where an option is yes or no
    metavar: str = ""
    default: Any = None
    words: tuple[type, ...] = (str,)
    types: tuple[type, ...] = ()
    example: str = ""
    read: Callable[[Any], Any] = as_said

    def fits(self, word: Any) -> bool:
        """Whether `word` of a JSON object is of the option's type."""
        return isinstance(word, self.words) and (bool in self.words or not isinstance(word, bool))

    def check_type(self, name: str, value: Any) -> None:
        """Raise InputError for a `value` that Python says and that is of another type."""
        if value is None or isinstance(value, self.types) or self.fits(value):
            return
        raise InputError(
            where=name,
            found=f"{show_value(value)}, a {type(value).__name__}",
            wanted=" or ".join(kind.__name__ for kind in (*self.words, *self.types)),
            remedy=f"write {name}={self.example or repr(self.default)}",
        )


_OPTIMIZER = OptionSpec(
    metavar="NAME",
    default="adam",
    types=(object,),  # whatever has a state to measure
    read=read_optimizer,
    help="Whose state counts: sgd, sgd-momentum, adam or adamw.",
    more="In Python also a class, a function of the parameters, or an optimizer: the size of its state is "
    "measured.",
)
_MEASURE = OptionSpec(
    default=True,
    words=(bool,),
    help="Measure what is not measured yet.",
    without="Estimate what is not measured yet.",
)
_MEASURE_SECONDS = OptionSpec(
    metavar="S",
    default=MEASURE_SECONDS,
    words=(int, float),
    read=read_measure_seconds,
    help="Seconds of measuring, at most.",
    more="Operators that decide between the best plans come first; others follow from measured ones of other "
    "sizes, or are estimated, and the plan says how much is which. What was measured stays in the database, "
    "so that the next plan goes on from there.",
)


class SearchOptions(TypedDict, total=False):
    """Options that every search takes."""

    memory: Annotated[
        int | str | None,
        OptionSpec(
            metavar="2GiB",
            words=(int, str),
            types=(float,),
            example='"2GiB"',
            read=read_memory,
            help="Cap per device.",
            more="In bytes, or a text with a unit; None is the cap of the cluster, if it has one.",
        ),
    ]
    time_limit: Annotated[
        float | None,
        OptionSpec(
            metavar="S",
            words=(int, float),
            example="60",
            read=read_time_limit,
            help="Seconds for the plan, by the clock.",
        ),
    ]
    gap: Annotated[
        float | None,
        OptionSpec(
            metavar="G",
            default=DEFAULT_GAP,
            words=(int, float),
            read=read_gap,
            help="Relative gap at which the solver may stop.",
        ),
    ]
    shard_state: Annotated[
        str | None,
        OptionSpec(
            metavar="LEVEL",
            default=AUTO,
            types=(object,),
            read=partial(read_choice, "--shard-state", ShardState),
            help="What of the weights' state lies in shards: none, optimizer, gradients, weights; "
            "auto: as is best.",
            more="As far as dims of trainable weights are long enough. Of the levels, optimizer leaves full "
            "copies of weights and sums of gradients that last all step, gradients full weights that last "
            "from forward to backward, and weights neither; auto chooses for each weight.",
        ),
    ]
    dtype: Annotated[
        str | None,
        OptionSpec(
            metavar="fp32|bf16|fp16",
            default=Precision.FP32.value,
            types=(object,),
            read=partial(read_choice, "--dtype", Precision),
            help="What autocast computes in; weights stay as they are.",
            more="As torch.autocast around every call: with fp32 nothing is cast. Where the caller is under "
            "torch.autocast itself, that holds.",
        ),
    ]
    reduce_dtype: Annotated[
        str | None,
        OptionSpec(
            metavar="fp32|bf16|fp16",
            default=Precision.FP32.value,
            types=(object,),
            read=partial(read_choice, "--reduce-dtype", Precision),
            help="What gradients of weights that are cast are summed in over ranks.",
            more="bf16 halves the bytes of these sums, which lose what bfloat16 does not tell apart; "
            "gradients and the optimizer's state stay as they are. Weights that are not cast, or are used in "
            "their own dtype too, are not concerned.",
        ),
    ]
    imbalance: Annotated[
        float | None,
        OptionSpec(
            metavar="X",
            words=(int, float),
            read=read_imbalance,
            help="Rows of the fullest rank of a mixture's experts, in even shares.",
            more="Plans whose experts lie on several ranks are priced by it, and say so; without, by what "
            "the example's routers choose, or by 1.25. A rank with more rows takes longer, and more memory, "
            "than they say.",
        ),
    ]
    costdb: Annotated[
        str | None,
        OptionSpec(metavar="PATH", types=(Path,), example='"costs.db"', help="Database of measurements."),
    ]


class PlacementOptions(TypedDict, total=False):
    """Options of where and when operators run."""

    mesh: Annotated[
        Mesh | tuple[int, ...] | str | None,
        OptionSpec(
            metavar="2x2",
            types=(Mesh, tuple, list),
            example='"2x2"',
            read=read_mesh,
            help="One mesh instead of all that fit; 1+3 for two stages with meshes of their own.",
            more="One mesh leaves as many stages as it goes into the devices, unless their number is given.",
        ),
    ]
    force: Annotated[
        Force | Pins | str | None,
        OptionSpec(
            metavar="KIND[+KIND...]",
            types=(Parallelism, tuple, list, Mapping),
            example='"batch"',
            read=read_force,
            help="One kind (batch, domain, filter, channel, experts, model, sequence, pipeline), or one for "
            "each axis: batch+filter.",
            more="Sequence is another word for domain; pipeline is one device for each stage. In Python also "
            "pins of single layers, by name, to a factor for each axis.",
        ),
    ]
    stages: Annotated[
        int | str | None,
        OptionSpec(
            metavar="K|auto",
            words=(int, str),
            types=(object,),  # refused by the flag's name
            read=partial(read_count, "--stages"),
            help="Pipeline ranks; 1 with --force, else auto.",
            more="The devices form so many; they ask for train_step.",
        ),
    ]
    micro_batches: Annotated[
        int | str | None,
        OptionSpec(
            metavar="M|auto",
            words=(int, str),
            types=(object,),  # refused by the flag's name
            read=partial(read_count, "--micro-batches"),
            help="Parts of the batch that follow each other; without, auto.",
            more="A step is cut in time, which asks for train_step.",
        ),
    ]
    batch_dims: Annotated[
        Mapping[str | int, int | None] | str | None,
        OptionSpec(
            metavar="INPUT=DIM,...",
            types=(object,),  # refused by the flag's name
            read=read_batch_dims,
            help="Dims of inputs that hold samples, where graphs can't tell: input_0=1,labels=none.",
            more="By the input's path or number; None for an input that micro-batches take whole. In Python "
            "also a mapping: batch_dims={0: 1, 'labels': None}.",
        ),
    ]
    static: Annotated[
        Sequence[str] | str | None,
        OptionSpec(
            metavar="NAME,...",
            types=(object,),
            read=read_static,
            help="Arguments and buffers whose values a program is made for: a graph's structure.",
            more="Edge lists are seen by themselves. By the argument's name in forward, or the buffer's; in "
            "Python a tuple: static=('batch',).",
        ),
    ]
    schedule: Annotated[
        str | None,
        OptionSpec(
            metavar="NAME",
            default=AUTO,
            types=(object,),
            read=read_schedule,
            help=", ".join([*(kind.value for kind in ScheduleKind), AUTO]) + ".",
            more="The order of the micro-batches in the stages; auto: the fastest.",
        ),
    ]
    recompute: Annotated[
        str | None,
        OptionSpec(
            metavar="none|all|auto",
            default=AUTO,
            types=(object,),
            read=partial(read_choice, "--recompute", Recompute),
            help="What to compute again in backward; auto: what a memory cap asks.",
            more="With all, little is kept for backward and the rest is computed again; with auto as much "
            "as it takes to meet the cap, where that is faster than other ways to meet it.",
        ),
    ]
    loss_pieces: Annotated[
        str | None,
        OptionSpec(
            metavar="none|all|auto",
            default=AUTO,
            types=(object,),
            read=partial(read_choice, "--loss-pieces", LossPieces),
            help="Losses of a last product, in pieces of rows; auto: where a memory cap asks.",
            more="In pieces logits are never whole, unless the model returns them, and gradients are found "
            "in forward; with auto they are where that is faster than other ways to meet the cap.",
        ),
    ]
    offload: Annotated[
        str | None,
        OptionSpec(
            metavar="none|all|state|auto",
            default=AUTO,
            types=(object,),
            read=partial(read_choice, "--offload", Offload),
            help="What waits in host memory; auto: under a memory cap activations whose copies hide, "
            "and weights if nothing else fits.",
            more="Where the cluster has a link to the host. All, with one stage only, are the activations "
            "that are worth a copy; auto takes as many as a cap asks for, in stages of schedules that don't "
            "split backward. State, with one stage only, are all weights, their gradients and what the "
            "optimizer keeps, which steps there: a weight is on the device while it is used.",
        ),
    ]


class RunOptions(TypedDict, total=False):
    """Options of how what is planned runs, for which plans are made."""

    overlap: Annotated[
        bool | None,
        OptionSpec(
            default=False,
            words=(bool,),
            help="Start exchanges early, beside compute, where memory is left: gathers of weights, sums.",
            more="In plans without stages. Gathers start by groups, up to two of which are in memory then; "
            "gradients of weights are made beside sums of activations' gradients. What a cap leaves too "
            "little for is not started early. On processes of one machine it gains nothing.",
        ),
    ]
    compile: Annotated[
        bool | None,
        OptionSpec(
            default=False,
            words=(bool,),
            help="Compile the programs of ranks and stages, by torch.compile; plan for that.",
            more="Each at its first call, which takes long. Costs are those of fused groups of operators. "
            "Plans with compile have no schedule that splits backward, and offload nothing.",
        ),
    ]


class VerifyOptions(PlacementOptions, SearchOptions, RunOptions, total=False):
    """Options of `verify`: where state is SGD's with momentum, and nothing is measured."""


class PlanOptions(VerifyOptions, total=False):
    """Options of `plan` and `parallelize`; help(autopar.plan) tells what each means."""

    optimizer: Annotated["OptimizerLike | None", _OPTIMIZER]
    measure: Annotated[bool | None, _MEASURE]
    measure_seconds: Annotated[float | None, _MEASURE_SECONDS]


class CompareOptions(SearchOptions, total=False):
    """Options of `compare`, which takes steps with an optimizer that has a name."""

    optimizer: Annotated[str | None, _OPTIMIZER]
    measure: Annotated[bool | None, _MEASURE]
    measure_seconds: Annotated[float | None, _MEASURE_SECONDS]


OPTIONS: Mapping[str, OptionSpec] = {
    name: annotation.__metadata__[0] for name, annotation in PlanOptions.__annotations__.items()
}


# -- who takes which, and what holds for those that nobody says -----------------------------------------


@dataclass(frozen=True, slots=True)
class Door:
    """A function that takes options: their names, and its own defaults in the place of the table's."""

    name: str
    options: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def default(self, option: str) -> Any:
        """The option's value where none is given."""
        return self.defaults.get(option, OPTIONS[option].default)

    def check(self, said: Mapping[str, Any]) -> None:
        """Raise TypeError for a name that is no option of the door, with those that are near.

        A TypeError, since it is the program that is wrong and not what a user handed in: so Python says
        it, and so do tools expect it that try what a function takes.
        """
        wrong = [name for name in said if name not in self.options]
        if wrong:
            near = {near for name in wrong for near in get_close_matches(name, self.options)}
            remedy = f"did you mean {', '.join(sorted(near))}?" if near else f"see help(autopar.{self.name})"
            raise TypeError(
                f"{self.name}: found the unknown option {', '.join(wrong)}, "
                f"wanted {', '.join(self.options)}; {remedy}"
            )

    def describe(self) -> str:
        """A paragraph for each option."""
        return "\n".join(self._paragraph(name, OPTIONS[name]) for name in self.options)

    def _paragraph(self, name: str, option: OptionSpec) -> str:
        text = f"{option.help} {option.more}".strip()
        indent = " " * 8
        body = textwrap.fill(text, width=100, initial_indent=indent, subsequent_indent=indent)
        return f"    {name} = {self.default(name)!r}\n{body}"


_WHOLE_STEP = {"stages": 1, "micro_batches": 1}  # a loop that calls backward needs both
_NO_PIPELINE = {**_WHOLE_STEP, "schedule": ScheduleKind.ONE_F_ONE_B.value}
NARROWING = (
    "mesh",
    "force",
    "stages",
    "micro_batches",
    "schedule",
    "recompute",
    "loss_pieces",
    "offload",
    "shard_state",
)  # leave the search less to choose
HOW_IT_RUNS = ("compile", "overlap")  # of what plans depend on: no plan says it
PLAN = Door("plan", tuple(PlanOptions.__annotations__))
PARALLELIZE = Door("parallelize", tuple(PlanOptions.__annotations__), _WHOLE_STEP)
VERIFY = Door("verify", tuple(VerifyOptions.__annotations__), {"optimizer": "sgd-momentum", "measure": False})
COMPARE = Door("compare", tuple(CompareOptions.__annotations__), _NO_PIPELINE)
PROFILE = Door("profile", ("mesh", "dtype", "costdb"), _NO_PIPELINE)


def documented(door: Door) -> Callable[[Function], Function]:
    """Adds every option of the door to the text that `help` shows of a function."""

    def add(function: Function) -> Function:
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nOptions:\n\n{door.describe()}\n"
        return function

    return add


@dataclass(frozen=True, slots=True, init=False)
class Options:
    """A value for every option of the table, read as an attribute: what is said, or else the default."""

    values: Mapping[str, Any]
    said: Mapping[str, Any]  # those that are no defaults

    def __init__(self, door: Door = PARALLELIZE, /, **said: Any) -> None:
        """Raises TypeError for names that the door doesn't know."""
        door.check(said)
        defaults = {name: door.default(name) for name in OPTIONS}
        values = defaults | without_none(said)
        object.__setattr__(self, "values", values)
        own = {name: value for name, value in values.items() if value != defaults[name]}
        object.__setattr__(self, "said", own)

    def __getattr__(self, name: str) -> Any:
        if name in OPTIONS:
            return self.values[name]
        raise AttributeError(f"no option {name}")

    def read(self) -> dict[str, Any]:
        """Every option as the search takes it; raises InputError for values that make no sense."""
        for name, option in OPTIONS.items():
            option.check_type(name, self.values[name])
        return {name: option.read(self.values[name]) for name, option in OPTIONS.items()}


def without_none(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are said."""
    return {name: value for name, value in options.items() if value is not None}


Reach = Literal["global", "local"]  # the whole batch on every rank, or each rank's own part
OutputReach = Literal["auto", "global", "local"]


def is_local(value: str) -> bool:
    """Whether the `inputs` option is "local"; raises InputError for any word but "local" and "global"."""
    if value in get_args(Reach):
        return value == "local"
    raise InputError(
        where="inputs",
        found=show_value(value),
        wanted="'global' or 'local'",
        remedy="say whether every rank passes the whole batch or its own samples",
    )


def read_outputs(value: str) -> Outputs:
    """Read the way in which outputs leave the program; raises InputError for other words."""
    return read_choice("outputs", Outputs, value)
