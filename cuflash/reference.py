"""Attention in NumPy: the plain formula, and the tiled algorithm that is the CPU path.

`standard_attention` evaluates softmax(scale · Q Kᵀ) V as it is written. It holds all N_q × N_k scores at once and is
what every other implementation is judged against (gold).

`tiled_attention` never holds more than a few tiles of B_r query rows by B_c keys. For each tile of rows it walks over
the tiles of keys that some row may see, and keeps for each row the running maximum m of the scores, the running sum ℓ
of exp(score − m) and the unnormalised output O. A tile that raises m rescales ℓ and O by exp(m_old − m_new):

    S = scale · Qᵢ Kⱼᵀ                      (then softcap, bias, masks)
    m_new = max(m, rowmax(S))
    P = exp(S − m_new),  α = exp(m − m_new)
    ℓ = α ℓ + rowsum(P)
    O = α O + P Vⱼ

and at the end O / ℓ is the output and m + log ℓ the log-sum-exp. The memory needed is linear in the sequence length.

References
----------
Dao, Fu, Ermon, Rudra, Ré: FlashAttention, 2022, Algorithm 1 (tiling).
Dao: FlashAttention-2, 2023, Algorithm 1 (rows in the outer loop, one division at the end).
Milakov, Gimelshein: Online normalizer calculation for softmax, 2018 (m and ℓ in one pass).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike, NDArray

    from cuflash.config import NumpyConfig
    from cuflash.problem import Problem

# How many bytes the tiles of the heads that are worked on together may take. Small problems are taken by the thousand,
# so that Python's cost per step is shared; more than a second-level cache holds would only slow large ones down.
CHUNK_BYTES = 2 << 20


def standard_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    mask: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    q_lengths: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    layout: str = "bhnd",
    return_lse: bool = False,
    dtype: DTypeLike = np.float64,
) -> Any:
    """Attention by the plain formula, in one precision throughout.

    Parameters
    ----------
    q, k, v : array_like
        Queries ``(..., H_q, N_q, D)``, keys ``(..., H_kv, N_k, D)``, values ``(..., H_kv, N_k, D_v)``, or 2-D without
        the head axis. Leading batch axes broadcast.
    scale : float, optional
        Factor of the scores, ``1 / sqrt(D)`` unless given.
    causal : {False, True, "bottom-right", "top-left"}
        Row i sees keys j <= i + delta; delta is ``N_k - N_q`` (of the lengths, where given) or 0 for ``"top-left"``.
    window : (left, right), optional
        Row i sees keys i + delta - left <= j <= i + delta + right; None stands for no bound.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``.
    mask : array_like of bool, optional
        True where a row may see a key; broadcasts to ``(..., H_q, N_q, N_k)``.
    bias : array_like, optional
        Added to the scores after the softcap; broadcasts to ``(..., H_q, N_q, N_k)``.
    q_lengths, kv_lengths : array_like of int, optional
        For each batch entry, how many rows or keys are real. The rest never reaches a result.
    layout : {"bhnd", "bnhd"}
        ``"bnhd"`` for ``(..., N, H, D)`` inputs and output.
    return_lse : bool
        Also return the log-sum-exp of each row's scores, ``(..., H_q, N_q)``.
    dtype : dtype
        The type that everything is computed and returned in.

    Returns
    -------
    out : ndarray of `dtype`
        ``(..., H_q, N_q, D_v)`` in the given layout. A row that sees no key is zero.
    lse : ndarray of `dtype`
        Only with `return_lse`. A row that sees no key has -inf.

    Raises
    ------
    ValueError
        If the numbers of heads do not fit, or `causal`, `layout` or `softcap` is none of the allowed values.

    Examples
    --------
    Two equal keys share their weight; under a causal mask the first row sees only the first key.

    >>> from cuflash.reference import standard_attention
    >>> q, k, v = [[0.0], [0.0]], [[1.0], [1.0]], [[2.0], [4.0]]
    >>> standard_attention(q, k, v).tolist()
    [[3.0], [3.0]]
    >>> standard_attention(q, k, v, causal=True).tolist()
    [[2.0], [3.0]]
    """
    if layout not in ("bhnd", "bnhd"):
        raise ValueError(f"`layout` must be 'bhnd' or 'bnhd', got {layout!r}")
    if causal not in (False, True, "bottom-right", "top-left"):
        raise ValueError(f"`causal` must be False, True, 'bottom-right' or 'top-left', got {causal!r}")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"`softcap` must be positive, got {softcap!r}")
    arrays = [np.asarray(x).astype(dtype) for x in (q, k, v)]
    no_heads = max(x.ndim for x in arrays) == 2
    q_, k_, v_ = (x[None] if x.ndim == 2 else x.swapaxes(-3, -2) if layout == "bnhd" else x for x in arrays)
    h_q, n_q, d = q_.shape[-3:]
    h_kv, n_k = k_.shape[-3:-1]
    if h_q != h_kv and (h_kv == 0 or h_q % h_kv):
        raise ValueError(f"`H_q` must be a multiple of `H_kv`, got {h_q} and {h_kv}")
    k_, v_ = (x.repeat(h_q // max(h_kv, 1), axis=-3) for x in (k_, v_))
    batch = np.broadcast_shapes(q_.shape[:-3], k_.shape[:-3], v_.shape[:-3])

    def clamped(lengths: ArrayLike | None, n: int) -> NDArray[Any]:
        # (*batch, 1, 1, 1), which broadcasts against (*batch, H_q, N_q, N_k).
        values = np.clip(np.asarray(n if lengths is None else lengths), 0, n)
        return np.broadcast_to(values if batch else values.reshape(()), batch)[..., None, None, None]

    q_length, kv_length = clamped(q_lengths, n_q), clamped(kv_lengths, n_k)
    i, j = np.arange(n_q)[:, None], np.arange(n_k)
    diagonal = i if causal == "top-left" else i + kv_length - q_length
    left, right = window if window is not None else (None, None)
    sees = (i < q_length) & (j < kv_length)
    if left is not None:
        sees = sees & (j >= diagonal - left)
    if right is not None:
        sees = sees & (j <= diagonal + right)
    if causal:
        sees = sees & (j <= diagonal)
    if mask is not None:
        sees = sees & np.asarray(mask)

    with np.errstate(all="ignore"):
        s = np.matmul(q_, k_.swapaxes(-1, -2)) * np.asarray(1 / math.sqrt(d) if scale is None else scale, dtype)
        if softcap is not None:
            cap = np.asarray(softcap, dtype)
            s = cap * np.tanh(s / cap)
        if bias is not None:
            s = s + np.asarray(bias).astype(dtype)
        s = np.where(sees, s, -np.inf)
        m = s.max(axis=-1, keepdims=True, initial=-np.inf)
        p = np.exp(s - np.where(m == -np.inf, 0, m))
        row_sum = p.sum(axis=-1, keepdims=True)
        live = j[:, None] < kv_length
        out = np.where(row_sum == 0, 0, np.matmul(p, np.where(live, v_, 0)) / row_sum)
        lse = (m + np.log(row_sum))[..., 0]
    if no_heads:
        out, lse = out[0], lse[0]
    elif layout == "bnhd":
        out = out.swapaxes(-3, -2)
    return (out, lse) if return_lse else out


def tiled_attention(
    problem: Problem,
    config: NumpyConfig,
    q: NDArray[Any],
    k: NDArray[Any],
    v: NDArray[Any],
    mask: NDArray[Any] | None,
    bias: NDArray[Any] | None,
    q_lengths: NDArray[Any] | None,
    kv_lengths: NDArray[Any] | None,
    out: NDArray[Any],
    lse: NDArray[Any] | None,
) -> None:
    """Attention tile by tile with the online softmax, written into `out` and `lse`.

    Scores, m, P and O are float32 (float64 for float64 inputs), ℓ is float64; P is not rounded to the input type. Tiles
    of keys that no row may see are skipped, tiles that every row sees whole are not masked. The bits of a batch entry
    do not depend on the other entries; those of a row may depend on how many rows there are, as BLAS has it.

    Parameters
    ----------
    problem : Problem
        Sizes, scale, window and softcap.
    config : NumpyConfig
        The tile: `b_r` query rows (of each head of a GQA group) by `b_c` keys.
    q, k, v : ndarray
        ``(*batch, H_q, N_q, D)``, ``(*batch, H_kv, N_k, D)``, ``(*batch, H_kv, N_k, D_v)`` with any strides.
    mask, bias : ndarray or None
        ``(*batch, H_q, N_q, N_k)``, bool and floating point.
    q_lengths, kv_lengths : ndarray of int or None
        Of shape ``batch`` or broadcasting to it.
    out : ndarray
        ``(*batch, H_q, N_q, D_v)``, every element of which is written.
    lse : ndarray or None
        ``(*batch, H_q, N_q)``, every element of which is written.
    """
    if 0 in (*problem.batch, problem.h_q, problem.n_q):
        return
    work = np.dtype(np.float64 if q.dtype == np.float64 else np.float32)
    heads, group = (*problem.batch, problem.h_kv), problem.h_q // problem.h_kv

    def split_heads(x: NDArray[Any] | None) -> NDArray[Any] | None:
        # (*batch, H_q, ...) -> (*batch, H_kv, group, ...): a view, whatever the strides.
        return None if x is None else x.reshape(*heads, group, *x.shape[len(heads) :])

    operands = _Operands(
        *(split_heads(q), k, v, split_heads(mask), split_heads(bias), split_heads(out), split_heads(lse)),
        q_length=clamped_lengths(q_lengths, problem.n_q, heads),
        kv_length=clamped_lengths(kv_lengths, problem.n_k, heads),
    )
    b_r, b_c = min(config.b_r, problem.n_q), min(config.b_c, max(problem.n_k, 1))
    elements = b_r * b_c + b_c * (problem.d + problem.d_v) + b_r * (problem.d + 2 * problem.d_v)
    at_once = max(1, CHUNK_BYTES // (elements * work.itemsize))
    scores = np.empty(min(at_once, math.prod(heads) * group) * b_r * b_c, work)
    with np.errstate(all="ignore"):
        for chunk in chunks((*heads, group), at_once):
            for start in range(0, problem.n_q, b_r):
                rows = slice(start, min(start + b_r, problem.n_q))
                _attend_rows(problem, operands.at(chunk, rows), rows, b_c, scores)


@dataclass(frozen=True)
class _Operands:
    """The arrays of a call, or a part of each.

    q, mask, bias, out and lse are (*heads, group, rows, ...), k and v (*heads, N_k, ...), where `heads` are the batch
    axes and the key heads. A length is N, or an array (*heads, 1, 1), which broadcasts against (*heads, group, rows).
    """

    q: Any
    k: Any
    v: Any
    mask: Any
    bias: Any
    out: Any
    lse: Any
    q_length: Any
    kv_length: Any

    def at(self, chunk: tuple[slice, ...], rows: slice) -> _Operands:
        """The part of some heads and rows, as views."""

        def take(x: Any, *index: slice) -> Any:
            return x if x is None or isinstance(x, int) else x[index]

        by_rows = {name: take(getattr(self, name), *chunk, rows) for name in ("q", "mask", "bias", "out", "lse")}
        by_heads = {name: take(getattr(self, name), *chunk[:-1]) for name in ("k", "v", "q_length", "kv_length")}
        return _Operands(**by_rows, **by_heads)


def _attend_rows(problem: Problem, part: _Operands, rows: slice, b_c: int, scratch: NDArray[Any]) -> None:
    """One tile of rows of each of a few heads against the keys it may see, tile by tile; `scratch` takes the scores.

    What is computed has an axis of heads and one of the rows of all query heads that share keys: (heads, group · rows).
    """
    work = scratch.dtype.type
    shape = part.q.shape[:-1]  # (*heads, group, rows)
    heads, m_rows = math.prod(shape[:-2]), shape[-2] * shape[-1]
    q = part.q.astype(work, order="C").reshape(heads, m_rows, problem.d)
    # A power of two is exact wherever it is applied, and cheaper on q than on the scores.
    scale_q = abs(problem.scale) <= 1 and abs(math.frexp(problem.scale)[0]) == 0.5
    if scale_q:
        q *= work(problem.scale)
    m = np.full((heads, m_rows, 1), -np.inf, work)
    row_sum = np.zeros((heads, m_rows, 1), np.float64)
    acc = np.zeros((heads, m_rows, problem.d_v), work)

    first, end = visible_keys(problem, rows, part.q_length, part.kv_length)
    nonempty = first < end
    begin = int(first.min(where=nonempty, initial=problem.n_k)) // b_c * b_c
    stop = int(end.max(where=nonempty, initial=0))
    for key in range(begin, stop, b_c):
        last = min(key + b_c, problem.n_k)  # not `stop`: the shape of a product must not depend on the other heads
        k, v = part.k[..., key:last, :], part.v[..., key:last, :]
        if not isinstance(part.kv_length, int) and part.kv_length.min() < last:
            # 0 · NaN is NaN: what stands beyond the length must not meet even a weight of 0.
            v = np.where(np.arange(key, last)[:, None] < part.kv_length, v, v.dtype.type(0))
        k = np.ascontiguousarray(k, work).reshape(heads, last - key, problem.d)
        v = np.ascontiguousarray(v, work).reshape(heads, last - key, problem.d_v)

        s = scratch[: heads * m_rows * (last - key)].reshape(heads, m_rows, last - key)
        np.matmul(q, k.swapaxes(-1, -2), out=s)
        if not scale_q:
            s *= work(problem.scale)
        if problem.softcap is not None:
            s /= work(problem.softcap)
            np.tanh(s, out=s)
            s *= work(problem.softcap)
        scores = s.reshape(*shape, last - key)
        if part.bias is not None:
            scores += part.bias[..., key:last]
        if part.mask is not None:
            np.copyto(scores, -np.inf, where=~part.mask[..., key:last])
        if first.max() > key or end.min() < last:
            keys = np.arange(key, last)
            np.copyto(scores, -np.inf, where=(keys < first[..., None]) | (keys >= end[..., None]))

        m_new = np.maximum(m, s.max(axis=-1, keepdims=True))
        m_finite = np.where(m_new == -np.inf, work(0), m_new)  # exp(−inf − 0) is 0, exp(−inf − (−inf)) would be NaN
        np.exp(np.subtract(s, m_finite, out=s), out=s)
        alpha = np.exp(m - m_finite)
        row_sum *= alpha
        row_sum += s.sum(axis=-1, keepdims=True)
        acc *= alpha
        acc += np.matmul(s, v)
        m = m_new

    acc /= row_sum.astype(work)
    np.copyto(acc, 0, where=row_sum == 0)
    part.out[...] = acc.reshape(part.out.shape)
    if part.lse is not None:
        part.lse[...] = (m + np.log(row_sum)).reshape(shape)


def clamped_lengths(lengths: NDArray[Any] | None, n: int, heads: tuple[int, ...]) -> int | NDArray[Any]:
    """The lengths clamped to [0, n], as (*heads, 1, 1), or `n` for None."""
    if lengths is None:
        return n
    clamped = np.clip(lengths.astype(np.int64), 0, n).reshape(lengths.shape if len(heads) > 1 else ())
    return np.broadcast_to(clamped[..., None, None, None], (*heads, 1, 1))


def visible_keys(problem: Problem, rows: slice, q_length: Any, kv_length: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """The keys that each row may see, first <= j < end, as arrays that broadcast against (*heads, group, rows)."""
    i = np.arange(rows.start, rows.stop)
    diagonal = i + (kv_length - q_length) if problem.bottom_right else i
    first = np.zeros_like(i) if problem.left is None else np.maximum(diagonal - problem.left, 0)
    end = kv_length if problem.right is None else np.minimum(diagonal + problem.right + 1, kv_length)
    first, end = np.broadcast_arrays(first, np.where(i < q_length, end, 0))
    return first, end


def chunks(shape: tuple[int, ...], at_once: int) -> Iterator[tuple[slice, ...]]:
    """Cut `shape` into boxes of at most `at_once` entries: trailing axes whole, a run of one, leading ones single."""
    whole = len(shape)
    while whole > 0 and math.prod(shape[whole - 1 :]) <= at_once:
        whole -= 1
    if whole == 0:
        yield tuple(slice(0, n) for n in shape)
        return
    step = at_once // math.prod(shape[whole:])
    for outer in np.ndindex(*shape[: whole - 1]):
        for start in range(0, shape[whole - 1], step):
            run = slice(start, min(start + step, shape[whole - 1]))
            yield (*(slice(i, i + 1) for i in outer), run, *(slice(0, n) for n in shape[whole:]))
