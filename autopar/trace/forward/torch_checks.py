"""What torch's own Python decides by values, and in-place operators without functional form, made traceable.

    bool((mask == causal).all())        nn.Transformer: is it the causal mask? It is applied as it is, but
                                        refused beside keys that torch adds, which it hides if it is
    assert isfinite(x).all()            passed, and that is noted
    if torch.any(var < 0): raise        Gaussian NLL, distributions: checks are left out, and that is noted.
    1 / float(num_batches_tracked)      a batch norm's cumulative average: computed by tensors
    x.normal_(), x.fill_diagonal_(v)    by torch.randn and torch.where
    bincount(x, minlength=n)            as n counts, and an error where x has a larger value
    x.as_strided(...) of windows        by reshape and unfold, if x is dense
    if not isfinite(x).all(): clamp     clamped always, where that changes nothing finite
    F.dropout(x, 0.0), or of no training   x itself, which writes to the result reach

What writes to weights (max_norm) and what has shapes by values (packed sequences, CTC loss, counts and
classes of unknown number) is refused by name. Generators that a forward passes to a draw are refused: their
state would be that of the trace.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

from autopar.torch_seams.fakes import FakeTensor
from autopar.torch_seams.tracing import (
    any_element,
    batch_norm,
    causal_masks,
    distribution_made,
    distribution_sampled,
)
from autopar.trace.call.user_source import calling_line
from autopar.trace.forms.covariances import correlation, covariance
from autopar.trace.forms.inverse_spectra import inverse_spectra
from autopar.trace.forward.data_writes import DATA, DataWrites, noted
from autopar.trace.forward.drawn_decisions import DrawnDecisions
from autopar.trace.forward.finite_checks import FiniteChecks
from autopar.trace.forward.forward_error import ForwardError
from autopar.trace.forward.same_masks import SameMasks
from autopar.trace.forward.strided_windows import windows
from autopar.trace.forward.value_checks import passing_answer

_NO_DIMS = torch.Size()


@contextmanager
def traceable(notes: list[str]) -> Iterator[None]:
    """Let traces follow torch's functions that ask for values; checks that are left out go to `notes`."""
    masks = _Masks()
    rewriting = _Rewriting(notes, masks)
    with (
        causal_masks.replaced(masks.is_causal),
        batch_norm.replaced(_batch_norm(batch_norm.now)),
        _unchecked_distributions(notes),
        noted(rewriting.data),
        rewriting,
    ):
        yield


class _Masks:
    """Questions of nn.Transformer about masks. One is applied as it is unless the caller says that it is
    causal."""

    def __init__(self) -> None:
        self.asked = False

    def is_causal(self, mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        self.asked |= mask is not None and is_causal is None
        return is_causal is True

    def check(self, bias_k: Tensor | None, add_zero_attn: bool) -> None:
        """Raise ForwardError for keys that torch adds, and hides where it takes the mask for causal."""
        if self.asked and (bias_k is not None or add_zero_attn):
            raise ForwardError(
                f"{'add_zero_attn' if add_zero_attn else 'add_bias_kv'} beside a mask that may be causal",
                "to be told: torch hides the added key where it takes a mask for causal",
                "pass is_causal=False or True beside the mask",
            )


# -- checks of values -----------------------------------------------------------------------------------


def _note(notes: list[str], name: str) -> None:
    note = f"torch's checks of values in {name} are not in the program"
    if note not in notes:
        notes.append(note)


@contextmanager
def _unchecked_distributions(notes: list[str]) -> Iterator[None]:
    make = Distribution.__init__

    def made(
        self: Distribution,
        batch_shape: torch.Size = _NO_DIMS,
        event_shape: torch.Size = _NO_DIMS,
        validate_args: bool | None = None,
    ) -> None:
        if validate_args or validate_args is None and self._validate_args:
            _note(notes, type(self).__name__)
        make(self, batch_shape, event_shape, validate_args=False)

    def sampled(self: Distribution, value: Tensor) -> None:
        _note(notes, type(self).__name__)

    with ExitStack() as stack:
        stack.enter_context(distribution_made.replaced(made))
        stack.enter_context(distribution_sampled.replaced(sampled))
        yield


# -- batch norms without a momentum ---------------------------------------------------------------------


def _batch_norm(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def cumulative(self: Any, x: Tensor) -> Tensor:
        counts = self.training and self.track_running_stats and self.num_batches_tracked is not None
        if self.momentum is not None or not counts:
            return forward(self, x)
        self._check_input_dim(x)
        self.num_batches_tracked.add_(1)
        dims = [dim for dim in range(x.dim()) if dim != 1]
        with torch.no_grad():
            share = 1 / self.num_batches_tracked.to(self.running_mean.dtype)
            for running, new in ((self.running_mean, x.mean(dims)), (self.running_var, x.var(dims))):
                running.copy_((1 - share) * running + share * new)
        return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)

    return cumulative


# -- in-place operators ---------------------------------------------------------------------------------


def _normal(x: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: None = None) -> Tensor:
    return x.copy_(torch.randn(x.shape, dtype=x.dtype, device=x.device) * std + mean)


def _fill_diagonal(x: Tensor, value: float, wrap: bool = False) -> Tensor:
    if x.dim() != 2 or wrap:
        raise ForwardError(
            found=f"fill_diagonal_ of {x.dim()} dims" + (" with wrap" if wrap else ""),
            wanted="that of a matrix, without wrap",
            remedy="write x = x.masked_fill(mask, value) with a mask that is a buffer",
        )
    rows, columns = (torch.arange(size, device=x.device) for size in x.shape)
    return x.masked_fill_(rows[:, None] == columns, value)


_IN_PLACE: dict[Any, Callable[..., Tensor]] = {
    Tensor.normal_: _normal,
    Tensor.fill_diagonal_: _fill_diagonal,
}


# -- counts of unknown length ---------------------------------------------------------------------------


def _bincount(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    if minlength < 1 or x.dim() != 1:
        raise ForwardError(
            "torch.bincount without minlength, whose size depends on values",
            "a size that doesn't",
            "pass minlength= the number of values that there may be",
            asks=True,
        )
    if weights is None:
        weights = torch.ones(x.shape, dtype=torch.int64, device=x.device)
    elif weights.dtype is not torch.float32:
        weights = weights.to(torch.float64)
    return torch.zeros(minlength, dtype=weights.dtype, device=x.device).index_add(0, x, weights)


def _one_hot(x: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:
        raise ForwardError(
            "one_hot without num_classes, whose size depends on values",
            "a size that doesn't",
            "pass num_classes= the number of classes",
            asks=True,
        )
    return F.one_hot(x, num_classes)


_OF_SIZE: dict[Any, Callable[..., Tensor]] = {
    torch.bincount: _bincount,
    Tensor.bincount: _bincount,
    F.one_hot: _one_hot,
}


def _as_strided(
    x: Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Tensor:
    found = windows(x, size, stride, storage_offset)
    return x.as_strided(size, stride, storage_offset) if found is None else found


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Return the argument of a dropout that is off; torch's own decomposition copies it."""
    return input if p == 0 or not training else F.dropout(input, p, training, inplace)


def _plain_dropout(input: Tensor, p: float, train: bool) -> Tensor:
    return input if p == 0 or not train else torch.dropout(input, p, train)


_BY_ELEMENTS: dict[Any, Callable[..., Tensor]] = {
    torch.as_strided: _as_strided,
    Tensor.as_strided: _as_strided,
}
_COVARIANCES: dict[Any, Callable[..., Tensor]] = {
    torch.cov: covariance,
    Tensor.cov: covariance,
    torch.corrcoef: correlation,
    Tensor.corrcoef: correlation,
}
_INVERSE = (torch.istft, Tensor.istft)
_LEAVING = (Tensor.numpy, Tensor.__array__, Tensor.tolist)  # which work for what is constant

_GIVES_ITSELF: dict[Any, Callable[..., Tensor]] = {F.dropout: _dropout, torch.dropout: _plain_dropout}

_OTHERWISE = _OF_SIZE | _BY_ELEMENTS | _GIVES_ITSELF | _COVARIANCES

_CTC = (F.ctc_loss, torch.ctc_loss)
_LOOKUPS = (F.embedding, F.embedding_bag)


class _Rewriting(TorchFunctionMode):
    """Reads of `tensor.data` are traced as `tensor.detach()`, and `tensor.data = x` as a write: torch.export
    knows neither, and leaves out the latter without a word."""

    def __init__(self, notes: list[str], masks: _Masks) -> None:
        super().__init__()
        self.notes, self.masks = notes, masks
        self.finite, self.same, self.drawn = FiniteChecks(_by_values), SameMasks(), DrawnDecisions()
        self.data = DataWrites()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        if raised[0] is None:
            self.finite.end()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.data.before(function, args, kwargs)
        if (passed := self.passed(function, args)) is not None:
            return passed
        self.finite.before(function, args, kwargs)
        if self.finite.answers_no(function, args):
            return False
        if (answer := self.drawn.answer(function, args)) is not None:
            return answer
        if self.drawn.is_asked(function, args):
            raise _by_a_draw()
        args = self.same.picking(function, args)
        result = self.called(function, args, kwargs)
        self.finite.after(function, args, kwargs, result)
        self.data.after(function, (args, kwargs), result)
        self.same.after(function, args, kwargs, result)
        self.drawn.after(function, args, result)
        return result

    def passed(self, function: Any, args: tuple[Any, ...]) -> bool | None:
        """The answer that lets a check of values pass which raises otherwise; None if the call is no such
        check."""
        if function is not Tensor.__bool__ or not isinstance(args[0], FakeTensor):
            return None
        if args[0].constant is not None:
            return None  # which torch itself answers
        answer = passing_answer(sys._getframe(1))
        note = f"{calling_line()}: this check of values is not in the program"
        if answer is not None and note not in self.notes:
            self.notes.append(note)
        return answer

    def called(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Result of `function`, or of the code that replaces it."""
        _refuse(function, args, kwargs)
        if function == DATA.__get__:
            return args[0].detach()
        if function == DATA.__set__:
            return self.data.write(*args)
        if function is F.multi_head_attention_forward:
            self.masks.check(args[7], args[9])
        if function is F.gaussian_nll_loss:
            _note(self.notes, "gaussian_nll_loss")
            with any_element.replaced(lambda *_: False):  # of `var < 0`
                return function(*args, **kwargs)
        if function in _INVERSE and not (kwargs.get("return_complex") or len(args) > 9):
            _note(self.notes, "istft")
            return inverse_spectra(*args, **kwargs)
        if function in _IN_PLACE:
            with self:
                return _IN_PLACE[function](*args, **kwargs)
        if function in _OTHERWISE:
            return _OTHERWISE[function](*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except RuntimeError as cause:
            if function in _CTC:
                raise ForwardError(
                    "CTC loss, whose sizes depend on the values of the lengths",
                    "shapes that depend on shapes alone",
                    "return the log-probabilities, and call ctc_loss on what the parallel model returns, "
                    "without loss_fn and stages",
                ) from cause
            if function not in _LEAVING:
                raise
            raise ForwardError(
                f"Tensor.{function.__name__}, which takes values out of the program",
                "a forward by tensors alone",
                "compute it with torch, or outside of forward and pass the result",
            ) from cause


def _by_a_draw() -> ForwardError:
    """The refusal of a branch on a random number."""
    return ForwardError(
        "a decision by a random number, as LayerDrop makes it",
        "the same operators at every call",
        "set that probability to 0 (config.layerdrop), or choose by "
        "torch.where(torch.rand(()) < p, x, layer(x))",
    )


def _by_values() -> ForwardError:
    """The refusal of a branch on whether values are finite."""
    return ForwardError(
        "a branch on whether values are finite, that doesn't clamp these first",
        "the same operators for all values",
        "choose by torch.where(condition, a, b), or clamp without asking",
        asks=True,
    )


def _refuse(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if getattr(function, "__name__", "") == "_pack_padded_sequence":
        raise ForwardError(
            "packed sequences: their lengths are values that shapes depend on",
            "padded sequences, of one shape for all lengths",
            "run a recurrent layer of one direction on the padded tensor, and leave out what is past the "
            "lengths by torch.where(step < lengths[:, None, None], output, 0)",
        )
    if function in _LOOKUPS and _max_norm(args, kwargs) is not None:
        raise ForwardError(
            f"{function.__name__} with max_norm, which writes to its weight at each call",
            "parameters that forward only reads",
            "build it without max_norm, and scale in forward the rows that it gives",
        )
    if isinstance(kwargs.get("generator"), torch.Generator):
        raise ForwardError(
            "a torch.Generator, whose state would always be that of the trace",
            "draws from torch's own generator",
            "leave out generator=, or draw outside of forward and pass the tensor",
        )


def _max_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float | None:
    """The max_norm of F.embedding or F.embedding_bag, their fourth argument."""
    return args[3] if len(args) > 3 else kwargs.get("max_norm")
