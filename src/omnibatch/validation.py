"""What a field may hold, asked in many places."""

from __future__ import annotations

import math
import numbers
from typing import Any


def is_integer(value: Any) -> bool:
    """Whether it is an integer of any library, and no truth value."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether it is a finite real number of any library, and no truth value."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def require_positive_integer(name: str, value: Any) -> None:
    """Raise a ``ValueError`` that names the field unless it is one."""
    if not (is_integer(value) and value > 0):
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
