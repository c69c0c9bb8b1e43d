"""The backward pass in NumPy, tile by tile: the CPU path.

With the log-sum-exp of each row at hand, the weights P of any tile can be computed again, so that nothing of the size
N_q x N_k is kept between the forward and the backward pass (FlashAttention, Dao et al. 2022, Algorithm 4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cuflash.reference import CHUNK_BYTES, chunks, clamped_lengths, visible_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from cuflash.backward_problem import BackwardProblem
    from cuflash.config import NumpyConfig


def tiled_gradients(problem: BackwardProblem, config: NumpyConfig, arrays: Mapping[str, NDArray[Any]]) -> None:
    """The gradients of attention, written into dq, dk, dv and, where it is there, dbias.

    Scores, P, dS and the sums are float32 (float64 for float64 inputs); P and dS are not rounded to the input type.

    Parameters
    ----------
    problem : BackwardProblem
    config : NumpyConfig
        The tile: `b_r` query rows (of each head of a GQA group) by `b_c` keys.
    arrays : mapping of str to ndarray
        q, k, v, out, dout, lse, and where they are there dlse, mask, bias, q_lengths, kv_lengths, all of canonical
        shape ``(*batch, head, row, ...)`` with any strides; dq, dk, dv of the shapes of q, k, v, of which every element
        is written; dbias of the bias' own shape, 1 along axes over which it is summed.
    """
    forward = problem.forward
    heads, group = (*forward.batch, forward.h_kv), forward.h_q // max(forward.h_kv, 1)
    work = np.dtype(problem.spec.accumulator)

    def split_heads(name: str) -> NDArray[Any] | None:
        # (*batch, H_q, ...) -> (*batch, H_kv, group, ...): a view, whatever the strides.
        x = arrays.get(name)
        return None if x is None else x.reshape(*heads, group, *x.shape[len(heads) :])

    rows_of = ("q", "out", "dout", "lse", "dlse", "mask", "bias", "dq")
    of_rows: dict[str, Any] = {name: split_heads(name) for name in rows_of}
    of_keys: dict[str, Any] = {name: arrays[name] for name in ("k", "v", "dk", "dv")}
    of_keys["q_length"] = clamped_lengths(arrays.get("q_lengths"), forward.n_q, heads)
    of_keys["kv_length"] = clamped_lengths(arrays.get("kv_lengths"), forward.n_k, heads)
    dbias = arrays.get("dbias")
    bias_sums = None if dbias is None else np.zeros((1,) * (len(heads) + 2 - dbias.ndim) + dbias.shape, np.float64)

    b_r, b_c = min(config.b_r, max(forward.n_q, 1)), min(config.b_c, max(forward.n_k, 1))
    elements = group * b_r * (b_c + forward.d + forward.d_v) + forward.n_k * (forward.d + forward.d_v)
    at_once = max(1, CHUNK_BYTES // max(elements * work.itemsize, 1))
    with np.errstate(all="ignore"):
        for chunk in chunks(heads, at_once) if 0 not in heads else ():
            part = {name: None if x is None else x[chunk] for name, x in of_rows.items()}
            part |= {name: x if isinstance(x, int) else x[chunk] for name, x in of_keys.items()}
            sums = None if bias_sums is None else BiasSums(bias_sums, chunk, group)
            _HeadGradients(problem, part, work, sums).compute(b_r, b_c)
    if dbias is not None and bias_sums is not None:
        dbias[...] = bias_sums.reshape(dbias.shape)


@dataclass(frozen=True)
class BiasSums:
    """The bias gradient of some heads, as far as it is summed up.

    `sums` has axes (*batch, H_q, N_q, N_k), 1 where the bias is broadcast; `chunk` tells which of (*batch, H_kv).
    """

    sums: NDArray[Any]
    chunk: tuple[slice, ...]
    group: int

    def add(self, dz: NDArray[Any], rows: slice, keys: slice) -> None:
        """Add the gradients (*heads, group, rows, keys) of a tile."""
        *batch, kv_heads = self.chunk
        where = (*batch, slice(kv_heads.start * self.group, kv_heads.stop * self.group), rows, keys)
        dz = dz.reshape(*dz.shape[: len(batch)], -1, *dz.shape[-2:])
        broadcast = tuple(axis for axis, n in enumerate(self.sums.shape) if n == 1)
        target = tuple(slice(None) if axis in broadcast else one for axis, one in enumerate(where))
        self.sums[target] += dz.sum(axis=broadcast, keepdims=True, dtype=self.sums.dtype)


@dataclass(frozen=True)
class _HeadGradients:
    """The gradients of a few heads.

    The arrays of `part` have axes (*heads, group, row, ...) or (*heads, key, ...); a length is N, or an array
    (*heads, 1, 1). What is computed has one axis of heads and one of the rows of all query heads that share keys.
    """

    problem: BackwardProblem
    part: dict[str, Any]
    work: np.dtype[Any]
    bias_sums: BiasSums | None

    def compute(self, b_r: int, b_c: int) -> None:
        """Write dq, dk and dv of the heads, and add to the bias gradient."""
        part, forward = self.part, self.problem.forward
        heads = math.prod(part["k"].shape[:-2])
        dk = np.zeros((heads, forward.n_k, forward.d), self.work)
        dv = np.zeros((heads, forward.n_k, forward.d_v), self.work)
        for start in range(0, forward.n_q, b_r):
            self._add_rows(slice(start, min(start + b_r, forward.n_q)), b_c, dk, dv)
        dk *= self.work.type(forward.scale)
        part["dk"][...] = dk.reshape(part["dk"].shape)
        part["dv"][...] = dv.reshape(part["dv"].shape)

    def _add_rows(self, rows: slice, b_c: int, dk: NDArray[Any], dv: NDArray[Any]) -> None:
        part, forward, work = self.part, self.problem.forward, self.work
        q, out, dout, lse = (part[name][..., rows, :] if name != "lse" else part[name][..., rows] for name in
                             ("q", "out", "dout", "lse"))  # fmt: skip
        live = np.arange(rows.start, rows.stop) < part["q_length"]  # broadcasts against (*heads, group, rows)
        live = live & (lse != -np.inf)
        shape = lse.shape

        def flat(x: NDArray[Any], columns: int) -> NDArray[Any]:
            if not live.all():  # 0 · NaN is NaN: what stands beyond the length must not meet even a weight of 0
                x = np.where(live[..., None], x, x.dtype.type(0))
            return np.ascontiguousarray(x, work).reshape(len(dk), math.prod(shape[-2:]), columns)

        q, out, dout = flat(q, forward.d), flat(out, forward.d_v), flat(dout, forward.d_v)
        delta = (dout * out).sum(axis=-1, keepdims=True)
        if part["dlse"] is not None:
            delta -= np.where(live, part["dlse"][..., rows], 0).astype(work).reshape(delta.shape)
        # Split in two, so that float32 scores lose nothing when a float64 log-sum-exp is subtracted.
        whole = np.where(live, lse, np.inf)
        high = whole.astype(work)
        low = np.where(live, whole - high, 0).astype(work)
        high, low = high.reshape(delta.shape), low.reshape(delta.shape)

        dq = np.zeros((len(dk), q.shape[1], forward.d), work)
        first, end = visible_keys(forward, rows, part["q_length"], part["kv_length"])
        nonempty = first < end
        begin = int(first.min(where=nonempty, initial=forward.n_k)) // b_c * b_c
        stop = int(end.max(where=nonempty, initial=0))
        for key in range(begin, stop, b_c):
            keys = slice(key, min(key + b_c, forward.n_k))
            k, v = self._live_keys("k", keys), self._live_keys("v", keys)
            s = np.matmul(q, k.swapaxes(-1, -2))
            s *= work.type(forward.scale)
            slope = None
            if forward.softcap is not None:
                s /= work.type(forward.softcap)
                small = np.exp(-2 * np.abs(s))
                slope = 4 * small / (1 + small) ** 2  # 1 − tanh² would be nothing but rounding where tanh is almost 1
                s = np.tanh(s) * work.type(forward.softcap)
            pairs = s.reshape(*shape, keys.stop - keys.start)
            if part["bias"] is not None:
                pairs += part["bias"][..., rows, keys]
            unseen: Any = None if part["mask"] is None else ~part["mask"][..., rows, keys]
            if first.max() > keys.start or end.min() < keys.stop:
                index = np.arange(keys.start, keys.stop)
                outside = (index < first[..., None]) | (index >= end[..., None])
                unseen = outside if unseen is None else unseen | outside

            s -= high
            s -= low
            p = np.exp(s, out=s)
            if unseen is not None:
                np.copyto(pairs, 0, where=unseen)
            dz = np.matmul(dout, v.swapaxes(-1, -2))
            dz -= delta
            dz *= p
            np.copyto(dz, 0, where=p == 0)
            if self.bias_sums is not None:
                self.bias_sums.add(dz.reshape(pairs.shape), rows, keys)
            dv[:, keys] += np.matmul(p.swapaxes(-1, -2), dout)
            if slope is not None:
                dz *= slope
                np.copyto(dz, 0, where=p == 0)
            dk[:, keys] += np.matmul(dz.swapaxes(-1, -2), q)
            dq += np.matmul(dz, k)
        dq *= work.type(forward.scale)
        part["dq"][..., rows, :] = dq.reshape(*shape, forward.d)

    def _live_keys(self, name: str, keys: slice) -> NDArray[Any]:
        """Rows of k or v, zeros beyond the length."""
        x, length = self.part[name][..., keys, :], self.part["kv_length"]
        if not isinstance(length, int) and length.min() < keys.stop:
            x = np.where(np.arange(keys.start, keys.stop)[:, None] < length, x, x.dtype.type(0))
        flat: NDArray[Any] = np.ascontiguousarray(x, self.work).reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
        return flat
