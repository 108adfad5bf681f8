"""Rows and columns of factored moments, between serial order and that of a parameter's parts.

Adafactor and its kin keep a parameter's second moment without one of its dims: absent, or of size 1. The
dims that are left run as the parameter's do, so where its parts lie apart, so do they:

    qkv, 2 heads of 1 row            serial       q0 q1 k0 k1 v0 v1      order  0 2 4 1 3 5
    on 2 ranks by heads              its parts    q0 k0 v0 q1 k1 v1

    parts[i] = serial[order[i]]
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.runtime.tree.stored import Stored

Order = tuple[int, ...]


def to_serial(value: Tensor, parameter: DTensor, stored: Stored) -> Tensor | None:
    """The full moment in serial order, of one that runs as the parameter's parts; None if it isn't factored.

    A collective where the parameter is stored apart, and for DTensors.
    """
    orders = _orders(value.shape, parameter, stored)
    if orders is None:
        return None
    full = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
    for dim, order in enumerate(orders):
        full = full.index_select(dim, _inverse(order).to(full.device))
    return full


def to_parts(value: Tensor, parameter: DTensor, stored: Stored) -> Tensor | None:
    """The full moment as the parameter's parts run, of one in serial order; None if it isn't factored.

    A collective where the parameter is stored apart.
    """
    orders = _orders(value.shape, parameter, stored)
    if orders is None:
        return None
    for dim, order in enumerate(orders):
        value = value.index_select(dim, torch.tensor(order, device=value.device))
    return value


def _orders(shape: Sequence[int], parameter: DTensor, stored: Stored) -> tuple[Order, ...] | None:
    """The order of each dim of a factored moment; None of other tensors, or if its dims can't be told.

    They can't where another choice of dims gives another order, nor of a square whose sides differ in it: a
    preconditioner has one dim of the parameter on both.
    """
    choices = _choices(tuple(shape), tuple(parameter.shape))
    if not choices:
        return None
    known = _parameter_orders(parameter, stored)
    found = {tuple((0,) if dim is None else known[dim] for dim in dims) for dims in choices}
    orders = next(iter(found))
    is_square = len(orders) == 2 and len({*map(len, orders)}) == 1
    return orders if len(found) == 1 and not (is_square and len({*orders}) > 1) else None


def _choices(shape: tuple[int, ...], whole: tuple[int, ...]) -> list[tuple[int | None, ...]]:
    """Which dims of the parameter the moment's may be; None for a dim of size 1 instead."""
    dims = range(len(whole))
    absent = [
        tuple(dim for dim in dims if dim != gone)
        for gone in dims
        if len(whole) > 1 and shape == whole[:gone] + whole[gone + 1 :]
    ]
    kept = [
        tuple(None if dim == gone else dim for dim in dims)
        for gone in dims
        if shape == (*whole[:gone], 1, *whole[gone + 1 :]) != whole
    ]
    return [*absent, *kept]


def _parameter_orders(parameter: DTensor, stored: Stored) -> list[Order]:
    """For each dim of the parameter, the serial row of each row of its parts side by side."""
    if not stored.serial.is_apart:
        return [tuple(range(size)) for size in parameter.shape]
    orders = []
    for dim, size in enumerate(parameter.shape):
        view = [size if each == dim else 1 for each in range(parameter.dim())]
        rows = torch.arange(size).reshape(view).expand(parameter.shape)
        laid = stored.cut(rows, parameter.device_mesh).full_tensor()
        orders.append(tuple(laid.movedim(dim, 0).reshape(size, -1)[:, 0].tolist()))
    return orders


def _inverse(order: Order) -> Tensor:
    return torch.argsort(torch.tensor(order))
