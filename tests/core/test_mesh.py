"""Meshes: ranks lie row-major, and groups of an axis partition the world."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.core.mesh import Mesh, parse_key
from autopar.errors import InputError

MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(lambda shape: Mesh(tuple(shape)))


def test_the_drawing_in_the_docstring() -> None:
    mesh = Mesh((2, 3))
    assert [mesh.coordinate(rank) for rank in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert mesh.group((1,), 4) == (3, 4, 5) and mesh.group((0,), 4) == (1, 4)
    assert mesh.key((1,)) == "b@2x3" and mesh.key((1, 0)) == "ab@2x3"
    assert mesh.group((0, 1), 2) == tuple(range(6))


@given(MESHES)
def test_rank_and_coordinate_are_inverse(mesh: Mesh) -> None:
    assert [mesh.rank(mesh.coordinate(rank)) for rank in range(mesh.num_devices)] == list(
        range(mesh.num_devices)
    )


@given(MESHES, st.data())
def test_groups_partition_the_world_in_rank_order(mesh: Mesh, data: st.DataObject) -> None:
    axes = data.draw(st.sets(st.sampled_from(mesh.axes)))
    groups = list(mesh.groups(axes))
    assert set(groups) == {mesh.group(axes, rank) for rank in range(mesh.num_devices)}
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.num_devices))
    assert all(list(group) == sorted(group) for group in groups)
    assert all(rank in mesh.group(axes, rank) for rank in range(mesh.num_devices))


@given(MESHES, st.data())
def test_a_group_key_says_mesh_and_axes(mesh: Mesh, data: st.DataObject) -> None:
    axes = tuple(sorted(data.draw(st.sets(st.sampled_from(mesh.axes), min_size=1))))
    assert parse_key(mesh.key(axes)) == (mesh, axes)


SHARES = st.lists(
    st.sampled_from([(), (1, 2), (2, 2), (1, 3, 5), (7,) * 4, (4, 4, 2)]), min_size=1, max_size=3
)


@given(SHARES)
def test_a_mesh_with_shares_is_read_as_it_is_written(shares: list[tuple[int, ...]]) -> None:
    mesh = Mesh(tuple(len(each) or 2 for each in shares), tuple(shares))
    assert Mesh.parse(str(mesh)) == mesh
    assert mesh.even == Mesh(mesh.shape) and (mesh == mesh.even) == (not mesh.shares)
    for axis, each in enumerate(shares):
        ours, total = mesh.shares_of(axis), sum(each) or mesh.shape[axis]
        assert [share / sum(ours) for share in ours] == [share / total for share in each or (1,) * len(ours)]
    assert mesh.key(mesh.axes) == mesh.even.key(mesh.axes)


def test_shares_are_written_in_least_terms_and_runs() -> None:
    assert str(Mesh((2, 2), ((50, 100), ()))) == "1:2x2" and str(Mesh((2,), ((3, 3),))) == "2"
    assert str(Mesh.parse("2*12:6*4")) == "1*12:3*4" and Mesh.parse("1*12:3*4").shape == (16,)


def test_shares_of_other_ranks_are_refused() -> None:
    for shares in (((1, 2, 3),), ((1, 0),), ((1, 2), ()), ((1, 2_000_000),)):
        with pytest.raises(InputError, match="shares"):
            Mesh((2,), shares)


@pytest.mark.parametrize(
    "text", ["", "2x", "0", "2x-1", "2x2x2x2", "two", "1:", ":2", "1:0", "1:-2", "1*0:0*2", "1*999999999:2"]
)
def test_what_is_no_mesh_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="mesh"):
        Mesh.parse(text)


@pytest.mark.parametrize("text", ["1.5:2", ":2", "1:2*", "1*0:2*2", "1:-2"])
def test_shares_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="mesh"):
        Mesh.parse(text)
