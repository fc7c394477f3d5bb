"""The cast to e4m3 in NumPy against its definition; the kernels' cast is met in tests/ptxsim and tests/multirank."""

from __future__ import annotations

import fp8_reference
import ml_dtypes
import numpy as np
import pytest
from multirank.checks import assert_bits

from cupyep.backends.numpy import fp8

DTYPES = [np.dtype(ml_dtypes.bfloat16), np.dtype("f2"), np.dtype("f4")]


def rows(rng: np.random.Generator, dtype: np.dtype) -> np.ndarray:
    """Groups of every magnitude, and groups of any bits at all, NaN and infinities among them."""
    normal = rng.standard_normal((40, 256)) * np.ldexp(1.0, rng.integers(-40, 40, (40, 1)))
    with np.errstate(over="ignore"):
        normal = normal.astype(dtype)
    unsigned = np.dtype(f"u{dtype.itemsize}")
    return np.concatenate([normal, rng.integers(0, 2 ** (8 * dtype.itemsize), (20, 256), unsigned).view(dtype)])


@pytest.mark.parametrize("round_scale", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_and_scales_are_the_oracles(dtype: np.dtype, round_scale: bool) -> None:
    x = rows(np.random.default_rng(), dtype)
    codes, scales = fp8.quantize(x, 128, round_scale, False)
    expected_codes, expected_scales = fp8_reference.quantize(x, 128, round_scale)
    assert_bits("scales", scales, expected_scales)
    assert_bits("codes", codes, expected_codes)


def test_the_oracle_knows_every_number() -> None:
    """Each e4m3 number is its own code, and so is what lies next to it."""
    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    expected = np.where(np.isnan(values), np.uint8(0x7F), codes)
    assert_bits("codes", fp8_reference.nearest(values), expected)
    some = np.isfinite(values)
    assert_bits("nudged", fp8_reference.nearest((values * np.float32(1.001))[some]), expected[some])


def test_values_come_back() -> None:
    """Within half a step of three mantissa bits, or of the least denormal."""
    x = np.random.default_rng().standard_normal((50, 128), np.float32)
    for round_scale in (False, True):
        codes, scales = fp8.quantize(x, 128, round_scale, False)
        back = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
        assert (np.abs(back - x) <= np.maximum(np.abs(x) / 16, scales * 2.0**-10) * 1.0001).all()


def test_scales_of_special_groups() -> None:
    groups = np.zeros((4, 128), np.float32)
    groups[1], groups[2, 5], groups[3, :2] = np.nan, np.inf, (448, np.nan)
    codes, scales = fp8.quantize(groups, 128, False, False)
    least = np.float32(1e-4) / np.float32(448)
    assert scales.ravel().tolist() == [least, least, np.inf, 1.0]
    assert (codes[0] == 0).all() and (codes[1] == 0x7F).all() and codes[2, 5] == 0x7F
    assert codes[3, :3].tolist() == [0x7E, 0x7F, 0]


@pytest.mark.parametrize("exponent", [-20, -1, 0, 3, 90])
def test_powers_of_two_are_not_smaller(exponent: int) -> None:
    exact = np.ldexp(np.float32(1), np.array([exponent], np.int32)).astype(np.float32)
    above = np.nextafter(exact, np.float32(np.inf))
    assert fp8.power_of_two(exact) == exact
    assert fp8.power_of_two(above) == 2 * exact


def test_exponents_are_packed_lowest_first() -> None:
    scales = np.array([[1.0, 2.0, 0.5, 4.0]], np.float32)
    assert fp8.pack_ue8m0(scales).dtype == np.int32
    assert fp8.pack_ue8m0(scales).view(np.uint8).tolist() == [[127, 128, 126, 129]]
