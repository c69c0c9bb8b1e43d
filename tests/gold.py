"""How exact a result must be: gold, the yardstick, and the rule that compares a result with both.

Gold is the plain formula in float64 (extended precision for float64 inputs). The yardstick is what an ideal fused
kernel in the input dtype returns: products summed in float32, softmax in float32, P rounded to the input dtype, O
rounded. A result is right where its error is at most twice the yardstick's, in each block of 32 query rows of each
head, so that no part of a tensor hides behind another. A maximum over the whole tensor would not do: the first rows of
a causal problem set it, and most others could be zero unnoticed.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cuflash.reference import standard_attention

BLOCK_ROWS = 32
FACTOR = 2
EPSILON = {name: float(ml_dtypes.finfo(name).eps) for name in ("float16", "bfloat16", "float32", "float64")}
SLACK = {"float16": 1 / 16, "bfloat16": 1 / 16, "float32": 2, "float64": 4}  # in units of EPSILON
# In a block of so few elements, and for float32 and float64 also of so few rows, chance decides.
FEW_ELEMENTS, FEW_ROWS = 64, 8
SLACK_OF_FEW = {"float16": 1, "bfloat16": 1, "float32": 8, "float64": 16}
LSE_SLACK = 4
CAPS = {"float16": 6e-4, "bfloat16": 4e-3, "float32": 2e-6, "float64": 1e-14}

# The sum over D has no prescribed order. Where scores are large, its rounding decides between keys of almost equal
# score, and is the whole error of a row, which one order may have and another not. So once the log-sum-exp exceeds
# log N_k by HOT, the yardstick of a row is the worst of several draws, in which each key is summed in one of as many
# orders.
HOT = 8
HOT_ORDERS = 16

# A yardstick beyond this would excuse anything; it means that the case, or the yardstick itself, is at fault.
LARGEST_YARDSTICK = 0.1


def gold(q: Any, k: Any, v: Any, *, rows: Any = None, **options: Any) -> tuple[Any, Any]:
    """The output (..., H_q, N_q, D_v) and log-sum-exp of the plain formula, of the query rows `rows` if given."""
    dtype = np.longdouble if q.dtype == np.float64 else np.float64
    if rows is None:
        out, lse = standard_attention(q, k, v, return_lse=True, dtype=dtype, **options)
        return canonical(out, options.get("layout", "bhnd")), lse[None] if out.ndim == 2 else lse
    problem = Canonical.read(q, k, v, rows=rows, **options)
    return standard_attention(
        *(problem.q, problem.k, problem.v),
        **{"scale": problem.scale, "softcap": problem.softcap, "mask": problem.sees, "bias": problem.bias},
        **{"return_lse": True, "dtype": dtype},
    )


def yardstick(q: Any, k: Any, v: Any, *, rows: Any = None, hot: bool = False, **options: Any) -> list[tuple[Any, Any]]:
    """What an ideal fused kernel gives, for `hot` scores with the sum over D in several orders; shapes as of `gold`."""
    problem = Canonical.read(q, k, v, rows=rows, **options)
    work = np.float64 if q.dtype == np.float64 else np.float32
    bias = None if problem.bias is None else problem.bias.astype(work)
    results = []
    with np.errstate(all="ignore"):
        for product in products(problem.q.astype(work), problem.k.astype(work), hot):
            s = work(problem.scale) * product
            if problem.softcap is not None:
                s = work(problem.softcap) * np.tanh(s / work(problem.softcap))
            if bias is not None:
                s = s + bias
            s = np.where(problem.sees, s, work(-np.inf))
            m = s.max(axis=-1, keepdims=True, initial=-np.inf)
            p = np.exp(s - np.where(m == -np.inf, work(0), m))
            row_sum = p.sum(axis=-1, keepdims=True)
            acc = np.matmul(p.astype(q.dtype).astype(work), problem.v.astype(work))
            out = np.where(row_sum == 0, work(0), acc / row_sum).astype(q.dtype)
            lse = (m.astype(np.float64) + np.log(row_sum.astype(np.float64)))[..., 0].astype(lse_dtype(q.dtype))
            results.append((out, lse))
    return results


def products(q: Any, k: Any, hot: bool) -> Iterator[Any]:
    """Q Kᵀ, once as BLAS sums it, or if `hot` several times, feature after feature, each key in an order of its own."""
    if not hot:
        yield np.matmul(q, k.swapaxes(-1, -2))
        return
    rng = np.random.default_rng(0)
    q_features, k_features = (np.ascontiguousarray(np.moveaxis(x, -1, 0)) for x in (q, k))
    batch = np.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    in_order = np.zeros((HOT_ORDERS, *batch, q.shape[-2], k.shape[-2]), q.dtype)
    term = np.empty_like(in_order[0])
    for total in in_order:
        for feature in rng.permutation(q.shape[-1]):
            total += np.multiply(q_features[feature][..., None], k_features[feature][..., None, :], out=term)
    for _ in range(HOT_ORDERS):
        yield np.choose(rng.integers(HOT_ORDERS, size=k.shape[-2]), in_order)


@dataclass(frozen=True)
class Canonical:
    """The arguments of a call with axes (*batch, head, row, column), keys and values repeated for the query heads."""

    q: Any
    k: Any
    v: Any
    scale: float
    softcap: float | None
    bias: Any
    sees: Any

    @staticmethod
    def read(
        q: Any,
        k: Any,
        v: Any,
        *,
        rows: Any = None,
        scale: float | None = None,
        causal: Any = False,
        window: Any = None,
        softcap: float | None = None,
        mask: Any = None,
        bias: Any = None,
        q_lengths: Any = None,
        kv_lengths: Any = None,
        layout: str = "bhnd",
    ) -> "Canonical":
        q, k, v = (canonical(x, layout) for x in (q, k, v))
        group = q.shape[-3] // max(k.shape[-3], 1)
        k, v = (x.repeat(group, axis=-3) for x in (k, v))
        n_q, n_k = q.shape[-2], k.shape[-2]
        batch = np.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
        rows = np.arange(n_q) if rows is None else np.asarray(rows)
        if bias is not None and bias.shape[-2:-1] == (n_q,):
            bias = bias[..., rows, :]
        if mask is not None and mask.shape[-2:-1] == (n_q,):
            mask = mask[..., rows, :]

        def lengths_of(given: Any, n: int) -> Any:
            return np.broadcast_to(
                n if given is None else np.clip(given, 0, n).reshape(np.shape(given) if batch else ()), batch
            )

        q_length, kv_length = lengths_of(q_lengths, n_q), lengths_of(kv_lengths, n_k)
        sees = np.empty((*batch, 1, len(rows), n_k), bool)
        for entry in np.ndindex(*batch):
            # The distance of a key from the diagonal: 0 on it, positive to its right.
            delta = 0 if causal == "top-left" else kv_length[entry] - q_length[entry]
            offset = np.arange(n_k) - rows[:, None] - delta
            left, right = window or (None, None)
            allowed = (rows[:, None] < q_length[entry]) & (np.arange(n_k) < kv_length[entry])
            allowed &= offset >= (-math.inf if left is None else -left)
            allowed &= offset <= min(math.inf if right is None else right, 0 if causal else math.inf)
            sees[entry] = allowed
        if mask is not None:
            sees = sees & mask
        v = np.where(np.arange(n_k)[:, None] < kv_length[..., None, None, None], v, v.dtype.type(0))
        return Canonical(q[..., rows, :], k, v, q.shape[-1] ** -0.5 if scale is None else scale, softcap, bias, sees)


@dataclass(frozen=True)
class Expected:
    """What a call must return. Blocks are indexed (*batch, head, block of 32 rows)."""

    dtype: np.dtype[Any]
    out: Any
    lse: Any
    layout: str
    out_shape: tuple[int, ...]
    limit: Any  # of the relative L2 error, by block
    yardstick: Any
    lse_limit: Any  # of the absolute error, by row
    lse_yardstick: Any

    def check(self, out: Any, lse: Any = None) -> None:
        """Raise AssertionError with the first block, or row, that is wrong."""
        assert out.dtype == self.dtype, f"O is {out.dtype}, not {self.dtype}"
        assert out.shape == self.out_shape, f"O has shape {out.shape}, not {self.out_shape}"
        result = canonical(out, self.layout).astype(self.out.dtype)
        require("O is NaN or infinite where gold is not, or the other way round", same_special(result, self.out))
        require("O is not zero in a row that sees no key", (self.lse != -np.inf)[..., None] | (result == 0))
        error = relative_errors(result, self.out)
        require(
            "O is wrong in a block of 32 rows: relative error, yardstick, limit",
            *(error <= self.limit, error, self.yardstick, self.limit),
        )
        if lse is not None:
            self.check_lse(lse)

    def check_lse(self, lse: Any) -> None:
        """Raise AssertionError with the first row whose log-sum-exp is wrong."""
        assert lse.dtype == lse_dtype(self.dtype), f"LSE is {lse.dtype}, not {lse_dtype(self.dtype)}"
        shape = self.lse.shape if len(self.out_shape) > 2 else self.lse.shape[1:]
        assert lse.shape == shape, f"LSE has shape {lse.shape}, not {shape}"
        result = lse.reshape(self.lse.shape).astype(self.lse.dtype)
        require("LSE is NaN or infinite where gold is not, or the other way round", same_special(result, self.lse))
        error = finite_difference(result, self.lse)
        require(
            "LSE is wrong in a row: error, yardstick of its block, limit",
            *(error <= self.lse_limit, error, self.lse_yardstick, self.lse_limit),
        )

    def check_caps(self, out: Any) -> None:
        """Raise AssertionError if the error of the whole tensor exceeds the cap for standard normal inputs."""
        result = canonical(out, self.layout).astype(self.out.dtype)
        error = float(norm(result - self.out) / norm(self.out))
        cap = CAPS[self.dtype.name]
        assert error <= cap, f"O is wrong as a whole: relative error {error:.2e}, cap {cap:.2e}"


def expect(q: Any, k: Any, v: Any, *, rows: Any = None, **options: Any) -> Expected:
    """What `attention(q, k, v, **options)` must return; with `rows`, these rows of it.

    Raises
    ------
    AssertionError
        If the yardstick itself is so far from gold that it would excuse anything.
    """
    layout = options.get("layout", "bhnd")
    out, lse = gold(q, k, v, rows=rows, **options)
    n_k = canonical(k, layout).shape[-2]
    hot = bool(np.any(np.abs(finite_part(lse)) > HOT + math.log(max(n_k, 1))))
    square = np.zeros(out.shape[:-1], out.dtype)
    lse_error = np.zeros(lse.shape, lse.dtype)
    for fused_out, fused_lse in yardstick(q, k, v, rows=rows, hot=hot, **options):
        # The yardstick is finite where gold is: an overflow that only the input dtype has is not an excuse.
        fused_out = np.where(np.isfinite(fused_out.astype(out.dtype)), fused_out, out.astype(q.dtype)).astype(out.dtype)
        fused_lse = np.where(np.isfinite(fused_lse), fused_lse, lse)
        np.maximum(square, norm(finite_difference(fused_out, out), axis=-1) ** 2, out=square)
        np.maximum(lse_error, finite_difference(fused_lse, lse), out=lse_error)

    yard = relative(np.sqrt(by_block(square, np.add)), np.sqrt(by_block(norm(finite_part(out), axis=-1) ** 2, np.add)))
    worst = float(yard.max(initial=0))
    assert worst <= LARGEST_YARDSTICK, f"the yardstick is at {worst:.2e} of gold: the case decides nothing"
    name = q.dtype.name
    height = by_block((lse != -np.inf).astype(float), np.add)
    few = (height * out.shape[-1] < FEW_ELEMENTS) | ((height < FEW_ROWS) & (q.dtype.itemsize > 2))
    limit = FACTOR * yard + np.where(few, SLACK_OF_FEW[name], SLACK[name]) * EPSILON[name]

    lse_yard = np.repeat(by_block(lse_error, np.maximum), BLOCK_ROWS, axis=-1)[..., : lse.shape[-1]]
    lse_epsilon = EPSILON["float64" if q.dtype == np.float64 else "float32"]
    magnitude = np.maximum(1, np.abs(finite_part(lse)))
    lse_limit = FACTOR * lse_yard + LSE_SLACK * lse_epsilon * magnitude

    shape = out.swapaxes(-3, -2).shape if layout == "bnhd" else out.shape
    if max(q.ndim, k.ndim, v.ndim) == 2:
        shape = out.shape[1:]
    return Expected(q.dtype, out, lse, layout, shape, limit, yard, lse_limit, lse_yard)


def check(out: Any, lse: Any, q: Any, k: Any, v: Any, **options: Any) -> None:
    """Raise AssertionError unless `out`, and `lse` if not None, is what `attention(q, k, v, **options)` must return."""
    expect(q, k, v, **options).check(out, lse)


def canonical(x: Any, layout: str) -> Any:
    """q, k, v or O with axes (..., head, row, column)."""
    return x[None] if x.ndim == 2 else x.swapaxes(-3, -2) if layout == "bnhd" else x


def lse_dtype(dtype: Any) -> np.dtype[Any]:
    return np.dtype(np.float32 if np.dtype(dtype).itemsize == 2 else np.float64)


def by_block(rows: Any, combine: np.ufunc) -> Any:
    """Combine the last axis in runs of 32."""
    if not rows.shape[-1]:
        return rows
    return combine.reduceat(rows, np.arange(0, rows.shape[-1], BLOCK_ROWS), axis=-1)


def norm(x: Any, axis: int | None = None) -> Any:
    """The L2 norm, scaled so that the square of no denormal underflows."""
    largest = np.abs(x).max(axis=axis, keepdims=True, initial=0)
    unit = np.where(largest == 0, 1, largest)
    return np.sqrt(np.square(x / unit).sum(axis=axis)) * unit.reshape(np.shape(x.sum(axis=axis)))


def relative(error: Any, magnitude: Any) -> Any:
    """error / magnitude; 0 where nothing is wrong, infinite where something is and should be zero."""
    with np.errstate(all="ignore"):
        return np.where(error == 0, 0, error / magnitude)


def relative_errors(result: Any, expected: Any) -> Any:
    """The relative L2 error of each block of 32 rows."""
    error, magnitude = (norm(x, axis=-1) for x in (finite_difference(result, expected), finite_part(expected)))
    return relative(*(np.sqrt(by_block(x**2, np.add)) for x in (error, magnitude)))


def finite_part(x: Any) -> Any:
    return np.where(np.isfinite(x), x, 0)


def finite_difference(result: Any, expected: Any) -> Any:
    """|result − expected|, 0 where that is not finite."""
    with np.errstate(all="ignore"):
        return finite_part(np.abs(result - expected))


def same_special(result: Any, expected: Any) -> Any:
    """Where NaN stands for NaN, an infinity for the same infinity and a number for a number."""
    number = np.isfinite(result) & np.isfinite(expected)
    return number | (np.isnan(result) & np.isnan(expected)) | (result == expected)


def require(rule: str, holds: Any, *figures: Any) -> None:
    """Raise AssertionError with the first index at which `holds` is false, and the figures there."""
    if not np.all(holds):
        wrong = np.argwhere(~holds)
        first = tuple(int(i) for i in wrong[0])
        values = ", ".join(f"{float(figure[first]):.3e}" for figure in figures)
        raise AssertionError(f"{rule}: {values} at {first}, one of {len(wrong)} of {holds.size}")
