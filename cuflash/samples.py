"""Attention in float64 at a sample of a case's rows or heads, which results of any library are held against."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuflash.peers import Arrays, Case
from cuflash.reference import standard_attention

# What a result may be off by, relative to float64 over the sampled rows. A peer may round where cuflash does not, its
# probabilities in bfloat16 say; a wrong mask or a missing block is off by far more.
LARGEST_ERROR = {"float16": 6e-4, "bfloat16": 4e-3, "float32": 2e-6, "float64": 1e-14}
LARGEST_GRADIENT_ERROR = {"float16": 1e-3, "bfloat16": 6e-3, "float32": 5e-6, "float64": 1e-13}
PEERS_MAY = 16
SAMPLED_HEADS, SAMPLED_ROWS = 4, 64
SAMPLED_KV_HEADS, ROWS_AT_ONCE = 2, 2048  # of the gradients: whole heads, so many rows of the scores at a time


def judge_of(case: Case, arrays: Arrays) -> Samples | GradientSamples:
    """What judges the results of a case."""
    return GradientSamples(case, arrays.host, arrays.put) if case.backward else Samples(case, arrays.host)


def largest_error(case: Case) -> float:
    """What cuflash may be off by."""
    return (LARGEST_GRADIENT_ERROR if case.backward else LARGEST_ERROR)[case.dtype]


class Samples:
    """Rows of some heads, and what attention gives there in float64."""

    def __init__(self, case: Case, host: Sequence[NDArray[Any]]) -> None:
        random = np.random.default_rng(1)
        pairs = case.batch * case.heads
        chosen = random.choice(pairs, min(SAMPLED_HEADS, pairs), replace=False)
        rows = random.choice(case.n, min(SAMPLED_ROWS, case.n), replace=False)
        self.heads = [(int(pair) // case.heads, int(pair) % case.heads) for pair in chosen]
        self.rows = np.unique(np.append(rows, [0, case.n - 1]))
        mask = case.visible(self.rows)
        gold = []
        for batch, head in self.heads:
            of_keys = head // (case.heads // case.kv_heads)
            q, k, v = (
                _head(x, case.layout, batch, h).astype(np.float64)
                for x, h in zip(host, (head, of_keys, of_keys), strict=True)
            )
            bias = None
            if case.alibi:
                bias = case.slopes()[head] * (np.arange(case.n) - self.rows[:, None])
            gold.append(standard_attention(q[self.rows], k, v, mask=mask, softcap=case.softcap, bias=bias))
        self.gold = np.stack(gold)

    def error(self, result: Any, layout: str) -> float:
        """The relative L2 error of `result`; infinite where there is a NaN."""
        got = np.stack([_to_float64(_head(result, layout, *pair))[self.rows] for pair in self.heads])
        error = float(np.linalg.norm(got - self.gold) / np.linalg.norm(self.gold))
        return math.inf if math.isnan(error) else error


class GradientSamples:
    """Some heads of keys and values with the heads of queries that read them, and their gradients in float64."""

    def __init__(self, case: Case, host: Sequence[NDArray[Any]], put: Callable[[NDArray[Any]], Any]) -> None:
        random = np.random.default_rng(1)
        group, pairs = case.heads // case.kv_heads, case.batch * case.kv_heads
        chosen = random.choice(pairs, min(SAMPLED_KV_HEADS, pairs), replace=False)
        kv_heads = [(int(pair) // case.kv_heads, int(pair) % case.kv_heads) for pair in chosen]
        heads = [(batch, of_keys * group + i) for batch, of_keys in kv_heads for i in range(group)]

        def wide(place: int, batch: int, head: int) -> Any:
            return put(_head(host[place], case.layout, batch, head).astype(np.float64))

        dq, dk, dv = [], [], []
        for batch, of_keys in kv_heads:
            k, v = wide(1, batch, of_keys), wide(2, batch, of_keys)
            for head in range(of_keys * group, (of_keys + 1) * group):
                of_q, of_k, of_v = head_gradients(case, wide(0, batch, head), k, v, wide(3, batch, head), head, put)
                dq.append(_to_float64(of_q))
                dk.append(_to_float64(of_k))
                dv.append(_to_float64(of_v))
        summed = (np.stack(own).reshape(len(kv_heads), group, case.n, case.d).sum(axis=1) for own in (dk, dv))
        self.gold = [np.stack(dq), *summed]
        self.heads = [heads, kv_heads, kv_heads]

    def error(self, result: Any, layout: str) -> float:
        """The largest relative L2 error of dQ, dK and dV in `result`; infinite where there is a NaN."""
        errors = []
        for array, gold, heads in zip(result, self.gold, self.heads, strict=True):
            got = np.stack([_to_float64(_head(array, layout, *pair)) for pair in heads])
            errors.append(float(np.linalg.norm(got - gold) / np.linalg.norm(gold)))
        return math.inf if any(map(math.isnan, errors)) else max(errors)


def head_gradients(
    case: Case, q: Any, k: Any, v: Any, dout: Any, head: int, put: Callable[[NDArray[Any]], Any]
) -> tuple[Any, Any, Any]:
    """The gradients of one head by the formula, NumPy or CuPy arrays, a few rows at a time."""
    scale, (left, right) = case.d**-0.5, case.reach()
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    numbers = put(np.arange(case.n))
    for first in range(0, case.n, ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        distance = numbers - numbers[rows, None]
        s, slope = scale * q[rows] @ k.T, scale
        if case.softcap:
            t = np.tanh(s / case.softcap)
            s, slope = case.softcap * t, scale * (1 - t**2)
        if case.alibi:
            s += float(case.slopes()[head]) * distance
        s = np.where((distance >= -left) & (distance <= right), s, -np.inf)
        p = np.exp(s - s.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        dp = dout[rows] @ v.T
        ds = p * (dp - (p * dp).sum(axis=1, keepdims=True)) * slope
        dq[rows] = ds @ k
        dk += ds.T @ q[rows]
        dv += p.T @ dout[rows]
    return dq, dk, dv


def _head(array: Any, layout: str, batch: int, head: int) -> Any:
    return array[batch, :, head] if layout == "bnhd" else array[batch, head]


def _to_float64(array: Any) -> NDArray[Any]:
    """An array of any library, on the host."""
    if hasattr(array, "detach"):  # PyTorch, whose bfloat16 NumPy does not know
        return np.asarray(array.double().cpu())
    return np.asarray(array.get() if hasattr(array, "get") else array).astype(np.float64)
