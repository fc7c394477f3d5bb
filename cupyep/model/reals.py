"""Checks of real numbers, beside cupyep.checks. Each error names the argument, what was expected and what came."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any


def nonnegative(name: str, value: Any) -> None:
    """`value` is 0 or more, and finite."""
    _real(name, value)
    if not value >= 0:
        raise ValueError(f"{name}: expected at least 0, got {value}")
    if value == math.inf:
        raise ValueError(f"{name}: expected a finite number, got {value}")


def positive(name: str, value: Any, *, finite: bool = False) -> None:
    """`value` is more than 0; not NaN; `finite`: nor infinite."""
    _real(name, value)
    if not value > 0:
        raise ValueError(f"{name}: expected more than 0, got {value}")
    if finite and value == math.inf:
        raise ValueError(f"{name}: expected a finite number, got {value}")


def _real(name: str, value: Any) -> None:
    if not isinstance(value, Real):
        raise TypeError(f"{name}: expected a number, got {value!r}")
