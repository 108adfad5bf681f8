"""What a call computes, by its sizes: floating-point operations, and the matrix products that they belong to.

    batch x (m x k) (k x n)       2 batch m n k operations, two for each multiply-add

Each gradient of a product costs what the product does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.core.graph import Call, TensorSpec


@dataclass(frozen=True, slots=True)
class SizedCall:
    """A call with its operands, and its first result when that is asked for."""

    call: Call
    operands: tuple[TensorSpec, ...]
    result: Callable[[], TensorSpec]


@dataclass(frozen=True, slots=True)
class Flops:
    """Flops of one forward and of its backward."""

    forward: int
    backward: int

    @classmethod
    def of_product(cls, forward: int, *factors: TensorSpec) -> Flops:
        """Flops of a product, whose gradients are one more product for each factor that has one."""
        return cls(forward, forward * sum(factor.requires_grad for factor in factors))


@dataclass(frozen=True, slots=True)
class MatrixProduct:
    """`batch` products of m x k and k x n."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def left(self) -> MatrixProduct:
        """The product that computes the gradient of the first operand."""
        return MatrixProduct(self.batch, self.m, self.k, self.n)

    @property
    def right(self) -> MatrixProduct:
        """The product that computes the gradient of the second operand."""
        return MatrixProduct(self.batch, self.k, self.n, self.m)


@dataclass(frozen=True, slots=True)
class Multiplication:
    """The product of a call, and which of its operands are the factors."""

    product: MatrixProduct
    left: TensorSpec
    right: TensorSpec


@dataclass(frozen=True, slots=True)
class FusedScores:
    """Fused attention: in each head (of each sample) queries times keys, of `key` elements, and values of
    `value`. A causal mask takes no memory, one that is `masked` is read."""

    heads: int
    queries: int
    keys: int
    key: int
    value: int
    causal: bool = False
    masked: bool = False
