"""What one call asks for: a `Problem`, and its `Spec`, the part of it that is compiled into a kernel.

Arguments are checked here, once, from the shapes, strides and dtypes of the arrays alone, so that the same code serves
every array library and every device. Axes are brought into one canonical order, ``(*batch, head, row, column)``, by
arithmetic on strides.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

DTYPES = ("float16", "bfloat16", "float32", "float64")
ITEM_BYTES = {"bool": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8}
LAYOUTS = ("bhnd", "bnhd")
DIAGONALS = ("bottom-right", "top-left")
MAX_HEAD_DIM = 256
MAX_SEQLEN = 2**29  # row + diagonal + window stays within 32 bits
VECTOR_BYTES = 16
LARGEST = {"float32": float(np.finfo(np.float32).max), "float64": float(np.finfo(np.float64).max)}
SOFTCAPS = (1e-30, 1e30)  # beyond, a score over the cap leaves float32


class Operand(NamedTuple):
    """An array as the checks see it: its name in messages, shape, strides in elements, dtype, alignment in bytes."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    alignment: int = VECTOR_BYTES


@dataclass(frozen=True)
class Spec:
    """What is compiled into a kernel. Head dims are rounded up to a multiple of 16; the true ones are sizes.

    `bias` is the dtype of a bias, which is one of keys if it is the same for all query rows.
    """

    dtype: str
    d: int
    d_v: int
    left: bool = False
    right: bool = False
    softcap: bool = False
    mask: bool = False
    bias: str | None = None
    bias_of_keys: bool = False
    q_lengths: bool = False
    kv_lengths: bool = False
    aligned: bool = True

    @property
    def accumulator(self) -> str:
        """The dtype of scores, row statistics and accumulators."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def lse_dtype(self) -> str:
        """The dtype of the log-sum-exp: as wide as a backward pass needs it."""
        return "float64" if self.dtype in ("float32", "float64") else "float32"


@dataclass(frozen=True)
class Problem:
    """One checked call: sizes, options and canonical strides (in elements; batch axes first, broadcast axes 0).

    Attributes
    ----------
    batch : tuple of int
        The broadcast batch axes, in front of (head, row, column).
    left, right : int or None
        Row i sees key j when ``i + delta - left <= j <= i + delta + right``; None is unbounded.
    bottom_right : bool
        delta is ``n_k - n_q`` (of the lengths, where given); otherwise 0.
    strides : dict of str to tuple of int
        For each of q, k, v, out (batch…, head, row), mask, bias (batch…, head, row, column), q_lengths, kv_lengths
        (batch…).
    out_shape, lse_shape : tuple of int
        In the caller's layout.
    """

    spec: Spec
    batch: tuple[int, ...]
    h_q: int
    h_kv: int
    n_q: int
    n_k: int
    d: int
    d_v: int
    scale: float
    left: int | None = None
    right: int | None = None
    bottom_right: bool = True
    softcap: float | None = None
    out_shape: tuple[int, ...] = ()
    lse_shape: tuple[int, ...] = ()
    strides: Any = None
    long_q_lengths: bool = False
    long_kv_lengths: bool = False

    @property
    def heads_total(self) -> int:
        """Number of (batch, query head) pairs."""
        return math.prod(self.batch) * self.h_q

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The canonical shape of every array of the call, broadcast axes written out."""
        heads = (*self.batch, self.h_q)
        return {
            "q": (*heads, self.n_q, self.d),
            "k": (*self.batch, self.h_kv, self.n_k, self.d),
            "v": (*self.batch, self.h_kv, self.n_k, self.d_v),
            "out": (*heads, self.n_q, self.d_v),
            "mask": (*heads, self.n_q, self.n_k),
            "bias": (*heads, self.n_q, self.n_k),
            "q_lengths": self.batch,
            "kv_lengths": self.batch,
        }

    def is_empty(self, want_lse: bool) -> bool:
        """Whether there is no result to compute."""
        return self.heads_total * self.n_q == 0 or (self.d_v == 0 and not want_lse)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a C-contiguous array."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def canonical(operand: Operand, layout: str) -> Operand:
    """q, k, v or out with axes (*batch, head, row, column)."""
    shape, strides = operand.shape, operand.strides
    if len(shape) < 2:
        raise ValueError(f"{operand.name} must have at least 2 axes (N, D), got shape {shape}")
    if len(shape) == 2:
        shape, strides = (1, *shape), (0, *strides)
    elif layout == "bnhd":
        shape = (*shape[:-3], shape[-2], shape[-3], shape[-1])
        strides = (*strides[:-3], strides[-2], strides[-3], strides[-1])
    return operand._replace(shape=shape, strides=strides)


def broadcast_strides(operand: Operand, target: tuple[int, ...], meaning: str) -> tuple[int, ...]:
    """Strides of `operand` broadcast to `target` (0 along broadcast axes and along axes of one element)."""
    shape, missing = operand.shape, len(target) - len(operand.shape)
    if missing < 0 or any(have not in (1, want) for have, want in zip(shape, target[missing:], strict=True)):
        raise ValueError(f"{operand.name} must broadcast to {meaning} = {target}, got shape {shape}")
    return (0,) * missing + tuple(0 if n == 1 else s for n, s in zip(shape, operand.strides, strict=True))


def broadcast_batch(operands: Sequence[Operand]) -> tuple[int, ...]:
    """The batch axes of canonical operands, broadcast as in `numpy.matmul`."""
    rank = max(len(operand.shape) for operand in operands) - 3
    batch = [1] * rank
    for axis in range(rank):
        for operand in operands:
            own = axis - (rank - (len(operand.shape) - 3))
            extent = operand.shape[own] if own >= 0 else 1
            if extent != 1 and batch[axis] not in (1, extent):
                shapes = ", ".join(f"{o.name} {o.shape[:-3]}" for o in operands)
                raise ValueError(f"batch axes must broadcast as in matmul, got {shapes}")
            if extent != 1:
                batch[axis] = extent
    return tuple(batch)


def as_float(number: numbers.Real) -> float:
    """The number as a float, infinite where it is beyond them."""
    try:
        return float(number)
    except OverflowError:
        return math.inf


def read_scale(scale: Any, d: int, accumulator: str) -> float:
    """`scale`, by default 1/sqrt(D)."""
    if scale is None:
        return 1.0 / math.sqrt(d)
    if isinstance(scale, bool) or not isinstance(scale, numbers.Real):
        raise TypeError(f"scale must be a real number or None, got {type(scale).__name__}")
    if not abs(as_float(scale)) <= LARGEST[accumulator]:
        raise ValueError(f"scale must be a finite {accumulator}, got {scale}")
    return as_float(scale)


def read_softcap(softcap: Any) -> float | None:
    """`softcap`, a positive number or None."""
    if softcap is None:
        return None
    if isinstance(softcap, bool) or not isinstance(softcap, numbers.Real):
        raise TypeError(f"softcap must be a positive number or None, got {type(softcap).__name__}")
    least, most = SOFTCAPS
    if not least <= as_float(softcap) <= most:
        raise ValueError(f"softcap must be positive, {least} to {most} (None turns it off), got {softcap}")
    return as_float(softcap)


def read_window(causal: Any, window: Any, n_q: int, n_k: int) -> tuple[int | None, int | None, bool]:
    """(left, right, bottom_right) of the two options that speak of the diagonal."""
    if not (isinstance(causal, (bool, np.bool_)) or (isinstance(causal, str) and causal in DIAGONALS)):
        raise ValueError(f"causal must be False, True, 'bottom-right' or 'top-left', got {causal!r}")
    left: int | None = None
    right: int | None = None
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise TypeError(f"window must be a pair (left, right) or None, got {window!r}")
        bounds: list[int | None] = []
        for side, bound in zip(("left", "right"), window, strict=True):
            if bound is None:
                bounds.append(None)
                continue
            if isinstance(bound, bool) or not isinstance(bound, numbers.Integral):
                raise TypeError(f"window {side} must be an integer or None, got {bound!r}")
            if bound < 0:
                raise ValueError(f"window {side} must be at least 0 (None is unbounded), got {bound}")
            bounds.append(min(int(bound), n_q + n_k))  # as good as unbounded, and safe in 32 bits
        left, right = bounds
    if causal:
        right = 0
    return left, right, not (isinstance(causal, str) and causal == "top-left")


def read_problem(
    q: Operand,
    k: Operand,
    v: Operand,
    *,
    scale: Any = None,
    causal: Any = False,
    window: Any = None,
    softcap: Any = None,
    mask: Operand | None = None,
    bias: Operand | None = None,
    q_lengths: Operand | None = None,
    kv_lengths: Operand | None = None,
    layout: Any = "bhnd",
    out: Operand | None = None,
) -> Problem:
    """Check one call and bring it into canonical form.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what is allowed.
    """
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    if q.dtype not in DTYPES:
        raise TypeError(f"q must have a dtype of {', '.join(DTYPES)}, got {q.dtype}")
    for operand in (k, v):
        if operand.dtype != q.dtype:
            raise TypeError(f"q, k and v must have one dtype, got q {q.dtype} and {operand.name} {operand.dtype}")
    rank = max(len(operand.shape) for operand in (q, k, v))
    q, k, v = (canonical(operand, layout) for operand in (q, k, v))

    h_q, n_q, d = q.shape[-3:]
    h_kv, n_k = k.shape[-3:-1]
    d_v = v.shape[-1]
    if k.shape[-1] != d:
        raise ValueError(f"q and k must have the same head dim, got {d} and {k.shape[-1]}")
    if v.shape[-2] != n_k:
        raise ValueError(f"k and v must have the same length N_k, got {n_k} and {v.shape[-2]}")
    if v.shape[-3] != h_kv:
        raise ValueError(f"k and v must have the same number of heads, got {h_kv} and {v.shape[-3]}")
    if not 1 <= d <= MAX_HEAD_DIM:
        raise ValueError(f"the head dim of q and k must be 1 to {MAX_HEAD_DIM}, got {d}")
    if d_v > MAX_HEAD_DIM:
        raise ValueError(f"the head dim of v must be at most {MAX_HEAD_DIM}, got {d_v}")
    if h_q and (not h_kv or h_q % h_kv):
        raise ValueError(f"`H_q` must be a multiple of `H_kv`, got {h_q} and {h_kv}")
    if max(n_q, n_k) >= MAX_SEQLEN:
        raise ValueError(f"sequence lengths must be below 2^29, got N_q = {n_q} and N_k = {n_k}")

    softcap = read_softcap(softcap)
    scale = read_scale(scale, d, "float64" if q.dtype == "float64" else "float32")
    if softcap is not None and not abs(scale / softcap) <= LARGEST["float32"]:
        raise ValueError(f"scale / softcap must be a finite float32, got {scale} and {softcap}")
    batch = broadcast_batch((q, k, v))
    scores = (*batch, h_q, n_q, n_k)
    left, right, bottom_right = read_window(causal, window, n_q, n_k)
    strides = {
        "q": broadcast_strides(q, (*batch, h_q, n_q, d), "(*batch, H_q, N_q, D)"),
        "k": broadcast_strides(k, (*batch, h_kv, n_k, d), "(*batch, H_kv, N_k, D)"),
        "v": broadcast_strides(v, (*batch, h_kv, n_k, d_v), "(*batch, H_kv, N_k, D_v)"),
    }
    if mask is not None:
        if mask.dtype != "bool":
            raise TypeError(
                f"mask must be of dtype bool (True: may attend), got {mask.dtype}; additive values go into bias"
            )
        strides["mask"] = broadcast_strides(mask, scores, "(*batch, H_q, N_q, N_k)")
    if bias is not None:
        if bias.dtype not in (q.dtype, "float32"):
            raise TypeError(f"bias must be of dtype {q.dtype} (as q) or float32, got {bias.dtype}")
        strides["bias"] = broadcast_strides(bias, scores, "(*batch, H_q, N_q, N_k)")
    for lengths in (q_lengths, kv_lengths):
        if lengths is not None:
            if lengths.dtype not in ("int32", "int64"):
                raise TypeError(f"{lengths.name} must be of dtype int32 or int64, got {lengths.dtype}")
            flat = lengths._replace(shape=(), strides=()) if not batch and lengths.shape == (1,) else lengths
            strides[lengths.name] = broadcast_strides(flat, batch, "the batch axes")

    natural = (*batch, h_q, n_q, d_v)
    if layout == "bnhd" and rank > 2:
        out_shape: tuple[int, ...] = (*batch, n_q, h_q, d_v)
    else:
        out_shape = natural if rank > 2 else natural[-2:]
    lse_shape = natural[:-1] if rank > 2 else natural[-2:-1]
    if out is None:
        out = Operand("out", out_shape, contiguous_strides(out_shape), q.dtype)
    elif out.shape != out_shape or out.dtype != q.dtype:
        raise ValueError(f"out must have shape {out_shape} and dtype {q.dtype}, got {out.shape} and {out.dtype}")
    elif repeats_elements(out):
        raise ValueError(f"out must not repeat elements, got strides {out.strides} for shape {out.shape}")
    target = canonical(out, layout)
    strides["out"] = broadcast_strides(target, natural, "(*batch, H_q, N_q, D_v)")

    operands = ((q, d), (k, d), (v, d_v), (target, d_v))
    return Problem(
        spec=Spec(
            dtype=q.dtype,
            d=round_up(d, 16),
            d_v=round_up(max(d_v, 1), 16),
            left=left is not None,
            right=right is not None,
            softcap=softcap is not None,
            mask=mask is not None,
            bias=None if bias is None else bias.dtype,
            bias_of_keys=bias is not None and strides["bias"][-2] == 0,
            q_lengths=q_lengths is not None,
            kv_lengths=kv_lengths is not None,
            aligned=all(is_aligned(operand, strides[operand.name], columns) for operand, columns in operands),
        ),
        batch=batch,
        h_q=h_q,
        h_kv=h_kv,
        n_q=n_q,
        n_k=n_k,
        d=d,
        d_v=d_v,
        scale=scale,
        left=left,
        right=right,
        bottom_right=bottom_right,
        softcap=softcap,
        out_shape=out_shape,
        lse_shape=lse_shape,
        strides=strides,
        long_q_lengths=q_lengths is not None and q_lengths.dtype == "int64",
        long_kv_lengths=kv_lengths is not None and kv_lengths.dtype == "int64",
    )


def repeats_elements(operand: Operand) -> bool:
    """Whether two indices may mean one element: some axis steps no further than the axes inside it reach."""
    reach = 0
    for step, extent in sorted((abs(s), n) for n, s in zip(operand.shape, operand.strides, strict=True) if n != 1):
        if step <= reach and 0 not in operand.shape:
            return True
        reach += (extent - 1) * step
    return False


def is_aligned(operand: Operand, strides: tuple[int, ...], columns: int) -> bool:
    """Whether every row starts at, and consists of, whole 16-byte vectors."""
    per_vector = VECTOR_BYTES // ITEM_BYTES[operand.dtype]
    rows = all(stride % per_vector == 0 for stride in strides[:-1])
    return operand.alignment >= VECTOR_BYTES and rows and columns % per_vector == 0


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
