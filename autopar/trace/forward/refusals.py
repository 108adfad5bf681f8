"""What torch.export raises, said as what the user's code does: its line, in our words, in 400 characters.

the code's own error         a wrong shape, a ValueError: eager calls raise it, too
a value that is asked for    bool(tensor), int(tensor), a size that follows from values
anything else                torch's own first line
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from autopar.errors import TraceError, ValuesAskedError, cut_text
from autopar.torch_seams.fakes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)
from autopar.trace.call.user_source import first_line, user_line
from autopar.trace.forward.forward_error import ForwardError

FORWARD = "the model's forward"
_VALUE_ERRORS = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
_MIXED = "compressed tensor instance need to be on the same device"  # of structure's places and traced values
_COMPUTED = "a CSR matrix of values that forward computes, as GraphUNet multiplies two of"
_READS = re.compile(r"\.(item|tolist)\(|\b(float|int)\(")
_BRANCHES = re.compile(r"\b(if|elif|while|assert|not|bool|range)\b")
_COUNTS = re.compile(r"\.(any|numel|nelement|size|sum)\(|\.shape\b|\blen\(")
_TEXT_LENGTH = 110  # characters of torch's words


def refusal(cause: Exception, part: str) -> TraceError:
    """The error of a trace that has raised `cause` in a `part` of the call: the model's forward, the loss."""
    where = user_line(cause, part)
    if not where.startswith(part) and part != FORWARD:
        where = f"{part}, {where}"
    if isinstance(cause, ForwardError):
        kind = ValuesAskedError if cause.asks else TraceError
        return kind(where=cause.line or where, found=cause.found, wanted=cause.wanted, remedy=cause.remedy)
    if _asks_for_values(cause):
        return ValuesAskedError(
            where=where,
            found="a branch, number or size that depends on a tensor's values",
            wanted="the same operators for all values",
            remedy=_without_values(where, cause),
        )
    said = cut_text(f"{type(cause).__name__}: {first_line(cause)}", _TEXT_LENGTH)
    if _is_of_sparse(cause):
        return sparse_refusal(where, _COMPUTED if _MIXED in str(cause) else said)
    if not type(cause).__module__.startswith("torch."):
        return TraceError(
            where=where,
            found=said,
            wanted="inputs that fit, and operators that torch.export knows",
            remedy="call it eagerly with these inputs: if that raises, too, mend the call",
        )
    return TraceError(
        where=where,
        found=said,
        wanted=f"a call of {part} that torch.export can trace",
        remedy="rewrite that line with plain tensor operators, or move it out of the model",
    )


def _without_values(where: str, cause: BaseException) -> str:
    """How the user's line, which `where` ends in, does without values of tensors."""
    if _READS.search(where) and not _BRANCHES.search(where):
        return "leave out .item(), .tolist(), float() and int(): return the tensor, read it after the call"
    if any(isinstance(each, DynamicOutputShapeException) for each in _chain(cause)):
        return "keep the shape: multiply by the mask, or choose by torch.where(mask, x, 0)"
    if _COUNTS.search(where) and _BRANCHES.search(where):
        return "leave the branch out where no rows change nothing, or choose by torch.where(condition, a, b)"
    return "choose by torch.where(condition, a, b), or decide before the call and pass a flag"


def _chain(cause: BaseException | None) -> Iterator[BaseException]:
    while cause is not None:
        yield cause
        cause = cause.__cause__


def sparse_refusal(where: str, found: str) -> TraceError:
    """The error of an operator on a sparse tensor that isn't one of the products."""
    return TraceError(
        where=where,
        found=found,
        wanted="products of a sparse matrix and a dense one",
        remedy="multiply by A @ x, torch.sparse.mm or addmm, make A by "
        "torch.sparse_coo_tensor(edges, values, size), pass layers of PyTorch Geometric edge_index, or do it "
        "before the call",
    )


def _is_of_sparse(cause: Exception) -> bool:
    """Whether torch's own words are of a sparse tensor; "meta converter" is all that it says of COO's."""
    words = str(cause)[:2000].lower()
    return isinstance(cause, (RuntimeError, UnsupportedFakeTensorException)) and any(
        each in words for each in ("sparse", "compressed tensor", "meta converter nyi")
    )


def _asks_for_values(cause: BaseException | None) -> bool:
    return any(
        isinstance(each, _VALUE_ERRORS) or "data-dependent" in str(each)[:2000] for each in _chain(cause)
    )
