"""Units: what is read is what was meant, and what is printed can be read again."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.units import (
    parse_bytes,
    parse_rate,
    parse_seconds,
    show_bytes,
    show_rate,
    show_seconds,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("80GB", 80_000_000_000),
        ("2GiB", 2_147_483_648),
        ("1.5 KiB", 1536),
        ("0.1GB", 100_000_000),
        ("7B", 7),
        ("3kB", 3000),
    ],
)
def test_bytes_are_read_with_decimal_and_binary_prefixes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes
    assert isinstance(parse_bytes(text), int)


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [("450GB/s", 450e9), ("200Mbit/s", 25e6), ("5Gbit/s", 625e6), ("8bit/s", 1.0), ("1MiB/s", 2.0**20)],
)
def test_rates_are_bytes_per_second_also_when_written_in_bits(text: str, bytes_per_second: float) -> None:
    assert parse_rate(text) == bytes_per_second


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2us", 2e-6), ("10us", 1e-5), ("2µs", 2e-6), ("1ms", 1e-3), ("30 s", 30.0), ("5ns", 5e-9)],
)
def test_times_are_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["", "80", "GB", "80gb", "80 Gb", "-1GB", "1 GB GB", "nanGB", "0 stones", "1" * 400 + "GB", "80GB/s"],
)
def test_a_size_that_is_not_one_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["5Gb/s", "5Gbps", "5GB", "5GB/ms"])
def test_an_ambiguous_rate_is_refused(text: str) -> None:
    with pytest.raises(InputError):
        parse_rate(text)


def test_the_error_names_the_input_what_was_found_and_the_units() -> None:
    with pytest.raises(InputError) as caught:
        parse_seconds("2 fortnights", where="[links.intra] latency")
    assert caught.value.as_dict() == {
        "kind": "InputError",
        "where": "[links.intra] latency",
        "found": "'2 fortnights'",
        "wanted": "a time such as 2us",
        "remedy": "write a number and one of the units s, ms, us, µs, ns",
    }


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1536, "1.54 kB"),
        (999_400, "999 kB"),
        (999_900, "1 MB"),
        (80_000_000_000, "80 GB"),
        (-2_000_000, "-2 MB"),
    ],
)
def test_bytes_are_shown_with_three_digits(nbytes: int, text: str) -> None:
    assert show_bytes(nbytes) == text


def test_times_and_rates_are_shown_with_three_digits() -> None:
    assert [show_seconds(t) for t in (1234, 75, 1.0, 0.00123, 2e-6, 4e-10)] == [
        "1230 s",
        "75 s",
        "1 s",
        "1.23 ms",
        "2 us",
        "0.4 ns",
    ]
    assert show_rate(4.5e11) == "450 GB/s"


@given(st.integers(1, 10**15))
def test_shown_bytes_are_read_back_to_three_digits(nbytes: int) -> None:
    assert math.isclose(parse_bytes(show_bytes(nbytes)), nbytes, rel_tol=0.00501)


@given(st.floats(1e-9, 1e3))
def test_shown_times_are_read_back_to_three_digits(seconds: float) -> None:
    assert math.isclose(parse_seconds(show_seconds(seconds)), seconds, rel_tol=0.00501)
