"""Tensors that are made of numbers or drawn. Their operators have no rule: they take no operands to shard."""

from __future__ import annotations

import torch

from autopar.core.operator_facts import declare

aten = torch.ops.aten

declare(aten.zeros, aten.ones, aten.full, aten.empty, aten.rand, aten.randn, aten.randint, rows_alike=True)
declare(aten.empty_like, aten.zeros_like, aten.new_empty, aten.new_zeros, aten.randint_like, rows_alike=True)
declare(aten.bernoulli, aten.uniform, aten.exponential, aten.geometric, aten.poisson, draws_each=True)
declare(aten.normal, aten.normal_functional, aten.log_normal, aten.cauchy, aten.random, draws_each=True)
declare(aten.arange, aten.linspace, by_sizes=True)
declare(aten.empty, aten.empty_like, is_undefined=True)
declare(aten.zeros, aten.new_zeros, is_zero=True)
