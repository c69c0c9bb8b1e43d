"""Exact, IO-aware attention for arrays."""

import importlib
import typing

from cuflash import reference
from cuflash.api import (
    Explanation,
    attention,
    attention_backward,
    attention_forward,
    explain,
    explain_backward,
    prepare,
    prepare_backward,
)
from cuflash.backward_config import BackwardMmaConfig, BackwardSimtConfig, BackwardWgmmaConfig
from cuflash.config import MmaConfig, NumpyConfig, SimtConfig, WgmmaConfig
from cuflash.tuned import UntunedError, load_configs, require_tuned

__version__ = "0.1.0"
__all__ = [
    "BackwardMmaConfig",
    "BackwardSimtConfig",
    "BackwardWgmmaConfig",
    "Explanation",
    "MmaConfig",
    "NumpyConfig",
    "SimtConfig",
    "UntunedError",
    "WgmmaConfig",
    "__version__",
    "attention",
    "attention_backward",
    "attention_forward",
    "explain",
    "explain_backward",
    "load_configs",
    "prepare",
    "prepare_backward",
    "reference",
    "require_tuned",
]

if not typing.TYPE_CHECKING:

    def __getattr__(name):
        """`cuflash.torch` and `cuflash.tuning`, which import PyTorch and Optuna, on their first use."""
        if name in ("torch", "tuning"):
            return importlib.import_module(f"cuflash.{name}")
        raise AttributeError(f"module 'cuflash' has no attribute {name!r}")
