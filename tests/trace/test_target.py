"""A TARGET is loaded as its author wrote it, and whatever is wrong with it is told in its own words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from autopar.errors import InputError
from autopar.trace.target import load_target

GOOD = """
import torch
from torch import nn
import neighbour

def net():
    return nn.Linear(3, 2), torch.ones(4, 3)

def with_loss():
    return nn.Linear(3, 2), (torch.ones(4, 3), torch.zeros(4, 2)), nn.functional.mse_loss

def named():
    return nn.Linear(3, 2), {"input": torch.ones(4, 3)}

def alone():
    return nn.Linear(3, 2)

def no_module():
    return "net", torch.ones(4, 3)

def no_tensors():
    return nn.Linear(3, 2), (1, "two")

def no_loss():
    return nn.Linear(3, 2), torch.ones(4, 3), 7

def raises():
    return nn.Linear(3, 2), torch.ones(neighbour.ROWS).view(5, 5)

def wants(count, *rest, width, depth=2):
    return nn.Linear(3, 2), torch.ones(4, 3)

def leaves():
    raise SystemExit("enough")

NUMBER = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("ROWS = 3\n")
    path = tmp_path / "nets.py"
    path.write_text(GOOD)
    return path


def refused(text: str) -> InputError:
    with pytest.raises(InputError) as caught:
        load_target(text)
    return caught.value


def test_inputs_may_be_a_tensor_a_tuple_or_a_dict_and_the_folder_is_importable(file: Path) -> None:
    assert [item.shape for item in load_target(f"{file}:net").args] == [(4, 3)]
    with_loss = load_target(f"{file}:with_loss")
    assert len(with_loss.args) == 2 and with_loss.loss_fn is torch.nn.functional.mse_loss
    named = load_target(f"{file}:named")
    assert named.args == () and list(named.kwargs) == ["input"]


def test_loading_again_gives_the_same_parameters_from_any_folder(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    first = load_target("nets.py:net")
    torch.rand(5)
    monkeypatch.chdir("/")
    second = load_target(first.source)
    for ours, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_file_named_like_a_module_does_not_replace_it(tmp_path: Path) -> None:
    path = tmp_path / "json.py"
    path.write_text("import torch\n\ndef net():\n    return torch.nn.ReLU(), torch.ones(2)\n")
    assert load_target(f"{path}:net").args[0].shape == (2,)
    import json

    assert json.loads("1") == 1


@pytest.mark.parametrize("text", ["nets.py", "nets.py:", ":net", "no.py:net", "nets.py:a-b"])
def test_an_unknown_file_or_a_malformed_target_is_refused(text: str) -> None:
    assert refused(text).where.startswith("TARGET")


def test_an_unknown_function_is_answered_with_those_that_there_are(file: Path) -> None:
    error = refused(f"{file}:nett")
    assert "nett" in error.found and "with_loss" in error.remedy and "neighbour" not in error.remedy
    assert refused(f"{file}:NUMBER").found == "NUMBER = 3"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("alone", "Linear"),
        ("no_module", "str as the model"),
        ("no_tensors", "without tensors"),
        ("no_loss", "loss_fn = 7"),
    ],
)
def test_another_return_value_is_named(file: Path, name: str, found: str) -> None:
    error = refused(f"{file}:{name}")
    assert found in error.found and "(model, inputs, loss_fn)" in str(error)


def test_a_function_that_wants_arguments_is_told_before_it_is_called(file: Path) -> None:
    error = refused(f"{file}:wants")
    assert error.found == "wants(count, width), which wants arguments"
    assert error.remedy.startswith("give each a default, or choose from net, with_loss")


def test_what_the_function_raises_names_the_users_line(file: Path) -> None:
    error = refused(f"{file}:raises")
    assert "nets.py:" in error.where and "view(5, 5)" in error.where
    assert error.found.startswith("RuntimeError: shape")
    assert refused(f"{file}:leaves").found == "SystemExit: enough"


def test_a_file_that_does_not_run_names_its_line(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def net(:\n    pass\n")
    assert "broken.py:1: def net(:" in refused(f"{broken}:net").where
    fails = tmp_path / "fails.py"
    fails.write_text("x = 1\nimport no_such_module\n")
    error = refused(f"{fails}:net")
    assert error.where.endswith("fails.py:2: import no_such_module")
    assert error.found == "ModuleNotFoundError: No module named 'no_such_module'"


def test_a_target_that_names_no_function_is_answered_with_those_that_are_there(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    for text in ("nets.py", "nets.py:"):
        assert refused(text).remedy.startswith("choose from nets.py:net, nets.py:with_loss")
    assert "write other.py:net, where net() returns (model, inputs)" in str(refused("other.py"))
    assert "name the function that the plan was made for" in str(refused("plan.json"))


@pytest.mark.parametrize("text", ["9" * 5_000, "9" * 5_000 + ".py", "a\0b.py:net", "9" * 5_000 + ".py:net"])
def test_what_can_be_no_path_is_told(text: str) -> None:
    assert len(str(refused(text))) <= 400
