"""The autotuner: searches the fastest configurations for this machine's calls and keeps them on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cuflash.tuning.workload import Workload, like, preset, with_gradients

if TYPE_CHECKING:
    from cuflash.tuning.campaign import tune

__all__ = ["Workload", "like", "preset", "tune", "with_gradients"]


def __getattr__(name: str) -> Any:
    """`tune` loads Optuna, which the processes that compile and measure do without."""
    if name == "tune":
        from cuflash.tuning.campaign import tune

        return tune
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
