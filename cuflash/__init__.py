"""Exact, IO-aware attention for arrays."""

from cuflash import reference
from cuflash.api import Explanation, attention, explain, prepare
from cuflash.config import NumpyConfig, SimtConfig

__version__ = "0.1.0"
__all__ = ["Explanation", "NumpyConfig", "SimtConfig", "__version__", "attention", "explain", "prepare", "reference"]
