"""The calls that every backward pass is tried on: the problems of `cases`, with gradients of O and LSE."""

import zlib
from typing import Any

import numpy as np
from cases import VIEWS, Case, lay_out, make_inputs
from gold import lse_dtype

import cuflash

DOUT_VIEWS = tuple(VIEWS)
DLSE_VIEWS = ("plain", "every-second-column", "rows-reversed", None)  # None: LSE has no gradient


def make_call(case: Case) -> dict[str, Any]:
    """The array arguments of `attention_backward`, NumPy views: those of the forward, dout, out, lse, and dlse in most.

    What stands beyond `q_lengths` is poison.
    """
    inputs = make_inputs(case)
    out, lse = cuflash.attention(**inputs, **case.options, return_lse=True)
    rng = np.random.default_rng(zlib.crc32(case.id.encode()) + 1)
    bnhd = case.options.get("layout") == "bnhd" and case.rank > 2
    beyond = rows_beyond(case, lse.shape)
    lse[beyond] = np.nan

    def rows_first(x: Any) -> Any:
        """With axes (..., head, row, column)."""
        return x.swapaxes(-3, -2) if bnhd else x

    rows_first(out)[beyond] = np.nan

    def draw(shape: Any) -> Any:
        values = rng.standard_normal(shape)
        if shape == out.shape:
            rows_first(values)[beyond] = np.nan
        return values.astype(out.dtype)

    number = zlib.crc32(case.id.encode())
    dout = lay_out(out.shape, DOUT_VIEWS[number % len(DOUT_VIEWS)] if out.size else "plain", out.dtype, draw)
    call = {**inputs, "dout": dout.of(dout.base), "out": out, "lse": lse}
    if (view := DLSE_VIEWS[number // len(DOUT_VIEWS) % len(DLSE_VIEWS)]) is not None:
        view = view if lse.ndim > 1 else "plain"
        rows = lay_out(
            lse.shape, view, lse_dtype(out.dtype), lambda s: np.where(beyond, np.nan, rng.standard_normal(s))
        )
        call["dlse"] = rows.of(rows.base)
    return call


def rows_beyond(case: Case, shape: tuple[int, ...]) -> Any:
    """Which rows (*batch, head, row) the lengths exclude."""
    if case.q_lengths is None:
        return np.zeros(shape, bool)
    lengths = np.clip(case.q_lengths, 0, case.n[0]) if case.all_batch else np.clip(case.q_lengths[0], 0, case.n[0])
    return np.broadcast_to(np.arange(case.n[0]) >= np.asarray(lengths)[..., None, None], shape)
