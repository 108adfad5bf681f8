"""One rank's program, or a stage's, as a compiled function.

    eager       regather by hooks on what autograd saves      parts run again by torch's checkpoint
    compiled    both are marks on operators, which tell the compiler what to keep and what to make anew

    kept          results of collectives, and what they took if backward needs it; seeds of masks
    made anew     gathered weights that the plan regathers; all else of a part that is recomputed
    free          the compiler may compute anew what is cheaper so: it keeps at most what is needed

Collectives keep the program's order (turns.py). Random numbers are those of the eager program.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autopar.core.operator_facts import is_random
from autopar.errors import AutoparError, InputError, cut_text
from autopar.runtime.compiled.compiler import check_program
from autopar.runtime.saved.recompute import Recomputed, stays
from autopar.runtime.saved.regather import is_regather
from autopar.torch_seams.schemas import short_name

_MASK = torch.ops.autopar.shard_mask.default
_SERIAL_MASK = torch.ops.autopar.dropout_mask.default
_said = False  # what compiling took


def compiled(program: fx.GraphModule, *, tells: bool) -> Callable[..., Any]:
    """Compile `program` at its first call; rank 0 `tells` once how long that took.

    Raises InputError for what can't be compiled.
    """
    from autopar.runtime.compiled.turns import InTurn  # with torch's compiler, which takes a second

    check_program(program)
    options: dict[str, Any] = {"post_grad_custom_post_pass": InTurn(), "fallback_random": True}
    run = torch.compile(compilable(program), fullgraph=True, dynamic=False, options=options)
    return _Timed(run, tells=tells)


class _Timed:
    """A compiled function, whose first call compiles it."""

    def __init__(self, run: Callable[..., Any], *, tells: bool) -> None:
        self._run, self._tells, self._is_new = run, tells, True

    def __call__(self, *tensors: Tensor) -> Any:
        if not self._is_new:
            return self._run(*tensors)
        began = time.monotonic()
        try:
            results = self._run(*tensors)
        except AutoparError:
            raise
        except Exception as cause:
            if not type(cause).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            raise _not_compiled(cause) from cause
        self._is_new = False
        if self._tells:
            _say(time.monotonic() - began)
        return results


def _say(seconds: float) -> None:
    global _said
    if not _said:
        _said = True
        print(f"autopar: compiling took {seconds:.1f} s (said once)", file=sys.stderr, flush=True)


def _not_compiled(cause: Exception) -> InputError:
    return InputError(
        where="compile",
        found=cut_text(" ".join(str(cause).split()), 160),
        wanted="a program that torch.compile takes",
        remedy="parallelize without compile",
    )


# -- marks for the compiler -----------------------------------------------------------------------------


def compilable(program: fx.GraphModule) -> fx.GraphModule:
    """The program with marks on what is made anew in backward, and draws by number."""
    return _marked(program, itertools.count(), inside=False)


def _marked(program: fx.GraphModule, numbers: Iterator[int], *, inside: bool) -> fx.GraphModule:
    root, graph = nn.Module(), fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in program.graph.nodes:
        if node.op == "call_module":
            part = program.get_submodule(str(node.target))
            assert isinstance(part, Recomputed) and isinstance(part.body, fx.GraphModule)
            body = _marked(part.body, numbers, inside=True)
            root.add_module(str(node.target), Again(body, mutated=part.mutated))
        copy = made[node] = graph.node_copy(node, lambda old: made[old])
        if copy.target is _MASK:
            with graph.inserting_before(copy):
                seed = graph.call_function(torch.ops.autopar.mask_seed.default, (next(numbers),))
            copy.target, copy.args = torch.ops.autopar.mask_of.default, (seed, *copy.args)
        elif copy.target is _SERIAL_MASK:
            copy.target, copy.args = torch.ops.autopar.serial_mask.default, (next(numbers), *copy.args)
        elif is_regather(copy.target) and not inside:
            copy.target = _regathering(copy.target)
    return fx.GraphModule(root, graph, class_name=program.__class__.__name__)


class Again(nn.Module):
    """A part that is recomputed in backward; `mutated` are the places of buffers that it writes to."""

    def __init__(self, body: fx.GraphModule, *, mutated: Sequence[int]) -> None:
        super().__init__()
        self.body, self.mutated = body, tuple(mutated)

    def forward(self, *tensors: Tensor) -> Any:
        """The tuple that `body` returns."""
        if not torch.is_grad_enabled():
            return self.body(*tensors)

        def run(*arguments: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            values = list(arguments)
            for place in self.mutated:
                values[place] = values[place].clone()
            return list(self.body(*values)), [values[place] for place in self.mutated]

        results, written = checkpoint(run, *tensors, use_reentrant=False, context_fn=_contexts(_part))
        with torch.no_grad():
            for place, value in zip(self.mutated, written, strict=True):
                tensors[place].copy_(value)
        return tuple(results)


@functools.cache
def _regathering(gather: Any) -> Callable[..., Any]:
    """`gather` of a weight, which backward repeats."""

    def regathered(*arguments: Any) -> Any:
        return checkpoint(gather, *arguments, use_reentrant=False, context_fn=_contexts(_anew))

    regathered.__name__ = regathered.__qualname__ = short_name(gather)
    return regathered


def _contexts(policy: Callable[..., CheckpointPolicy]) -> Callable[[], Any]:
    return partial(create_selective_checkpoint_contexts, policy)


def _anew(_: Any, target: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def _part(_: Any, target: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Decide what a recomputed part saves: random draws, whose seeds are small, and whatever always stays."""
    if is_random(target) or stays(target):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.MUST_RECOMPUTE if is_regather(target) else CheckpointPolicy.PREFER_RECOMPUTE
