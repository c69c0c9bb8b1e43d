"""Exact, IO-aware attention for arrays."""

from cuflash import reference
from cuflash.api import Explanation, attention, explain, prepare
from cuflash.config import MmaConfig, NumpyConfig, SimtConfig, WgmmaConfig

__version__ = "0.1.0"
__all__ = [
    "Explanation",
    "MmaConfig",
    "NumpyConfig",
    "SimtConfig",
    "WgmmaConfig",
    "__version__",
    "attention",
    "explain",
    "prepare",
    "reference",
]
