"""The dtypes of mixed precision, by the names that options have for them; torch's are in `trace/autocast`."""

from __future__ import annotations

from enum import Enum


class Precision(Enum):
    """Number format of products and other operators; weights stay as they are."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def nbytes(self) -> int:
        """Bytes of a number."""
        return 4 if self is Precision.FP32 else 2
