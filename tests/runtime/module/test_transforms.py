"""What takes functions apart is refused by name; torch.compile compiles the programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.core.mesh import Mesh
from autopar.errors import InputError
from autopar.rewrite.render import describe
from autopar.runtime.execute.bound_program import Bound
from autopar.runtime.module.parallel_module import ParallelModule
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler

Pools = Callable[[int], Pool]
X = torch.ones(4, 3)


def _parallel() -> ParallelModule:
    torch.manual_seed(0)
    compiler = forced_compiler(Mesh((1,)), ["batch"])
    return ParallelModule(nn.Linear(3, 2), compiler, describe=describe, device=torch.device("cpu"))


def _fake(module: nn.Module) -> Any:
    with FakeTensorMode() as mode:
        return module(mode.from_tensor(X))


def _forward_mode(module: nn.Module) -> Any:
    with forward_ad.dual_level():
        return module(forward_ad.make_dual(X, torch.ones_like(X)))


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "vmap": lambda module: torch.vmap(module)(X),
    "torch.func": lambda module: torch.func.grad(lambda x: module(x).sum())(X),
    "torch.fx.symbolic_trace": torch.fx.symbolic_trace,
    "torch.export": lambda module: torch.export.export(module, (X,), strict=False),
    "torch.jit.trace": lambda module: torch.jit.trace(module, (X,)),  # type: ignore[no-untyped-call]
    "make_fx": lambda module: make_fx(module)(X),
    "FakeTensorMode": _fake,
    "torch.autograd.forward_ad.dual_level": _forward_mode,
}


def _refused() -> dict[str, str]:
    module, found = _parallel(), {}
    module(X)
    for name, transform in TRANSFORMS.items():
        with pytest.raises(InputError) as raised:
            transform(module)
        found[name] = str(raised.value)
    module(X).sum().backward()
    return found


def test_transforms_of_a_parallel_module_are_refused_by_name(pools: Pools) -> None:
    (found,) = pools(1).run(_refused)
    for name, text in found.items():
        assert f"found a call inside {name}" in text or name in text.split("found")[1], text
        assert "autopar.full(parallel)" in text and len(text) <= 400


def _compiled_by_torch() -> tuple[list[float], list[str]]:
    """Losses by the module as it is, by what torch.compile gives of it, and by itself after that."""
    from tests.runtime.compiled.test_program import tracing

    module, losses, kinds = _parallel(), [], []
    wrapped: nn.Module = torch.compile(module)  # type: ignore[assignment]
    with tracing():
        for call in (module, wrapped, module):
            loss: Tensor = call(X).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            program = module._autopar._current
            assert isinstance(program, Bound)
            losses.append(loss.item())
            kinds.append(type(program._run).__name__)
    return losses, kinds


def test_torch_compile_compiles_the_programs_of_a_parallel_module(pools: Pools) -> None:
    ((losses, kinds),) = pools(1).run(_compiled_by_torch)
    assert losses == [pytest.approx(losses[0])] * 3
    assert kinds == ["function", "_Timed", "_Timed"]


def _options_refused() -> None:
    module = _parallel()
    with pytest.raises(InputError, match="mode.*call parallel.compile()"):
        module.compile(mode="max-autotune")


def test_options_of_torch_compile_are_refused(pools: Pools) -> None:
    pools(1).run(_options_refused)
