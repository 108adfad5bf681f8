"""Tensors without values, as torch traces with them."""

from __future__ import annotations

import torch

from autopar.torch_seams.required import expect, required

with required():
    from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
    from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError as FakeTensorDeviceMismatchError
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.fake_tensor import UnsupportedFakeTensorException as UnsupportedFakeTensorException
    from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
    from torch._subclasses.meta_utils import MetaTensorDescriber as MetaTensorDescriber

expect(issubclass(FakeTensor, torch.Tensor), "FakeTensor", "a tensor")
expect(hasattr(MetaTensorDescriber, "describe_tensor"), "MetaTensorDescriber.describe_tensor")
