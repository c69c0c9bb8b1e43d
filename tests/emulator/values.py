"""Numbers for the emulator's own tests, the same whichever tests ran before, and how far a sum of them may be off."""

from __future__ import annotations

from typing import Any

import numpy as np

FLOAT_ROUNDING = 2.0**-24  # of a float32 to the nearest, relative


def floats(*shape: int, seed: int = 7) -> Any:
    """Normally distributed float32; of one shape and seed always the same, so that two operands need two seeds."""
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def sum_error(roundings: int, magnitudes: Any) -> Any:
    """The most by which a sum in float32 that is rounded so often is off, of terms whose magnitudes add up to this.

    Higham, "Accuracy and Stability of Numerical Algorithms", section 4.2: γ_n Σ|x| with γ_n = n u / (1 - n u).
    """
    return roundings * FLOAT_ROUNDING / (1 - roundings * FLOAT_ROUNDING) * magnitudes
