"""How exact gradients must be: gold, the yardstick, and the rule that compares a result with both.

Gold is the derivative of the plain formula in float64 (extended precision for float64 inputs). The yardstick is what an
ideal fused kernel in the input dtype returns: sums in float32, P and dS rounded to the input dtype before they are
multiplied, O and the gradients rounded, the log-sum-exp as the forward pass stores it. In each block of 32 query rows
of dQ, or keys of dK and dV, of each head, the error must be at most twice the yardstick's, three times for gradients
through a softcap or a bias.

dP − delta may cancel to nothing: a row that sees one key has no gradient at all, and what a right kernel returns is
rounding. So the slack is relative to the larger of gold and of the magnitude that the block would have if its terms had
random signs, dP and delta taken apart. O and the log-sum-exp of a row, rounded, enter everything that it gives: one
random number each, so that in blocks of fewer than 8 rows chance decides, in every dtype.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from gold import (
    BLOCK_ROWS,
    EPSILON,
    FEW_ELEMENTS,
    FEW_ROWS,
    HOT,
    LARGEST_YARDSTICK,
    SLACK,
    SLACK_OF_FEW,
    Canonical,
    by_block,
    canonical,
    finite_difference,
    finite_part,
    lse_dtype,
    norm,
    products,
    require,
)

FACTOR = 2
FACTOR_OF_SCORE_CHANGES = 3  # a softcap or a bias
CAPS = {"float16": 1e-3, "bfloat16": 6e-3, "float32": 5e-6, "float64": 1e-13}
# Blocks that are so small beside the largest of their tensor, or too small for the dtype, need not decide anything: the
# weights of a key may all be below what the dtype holds.
NEGLIGIBLE = 1e-3
NAMES = ("dq", "dk", "dv", "dbias")

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Formula:
    """The arguments of a call with axes (*batch, head, row, column), keys and values repeated for the query heads.

    What the lengths exclude is zero. `shapes` are those of the arguments themselves, in canonical order.
    """

    problem: Canonical
    dout: Any
    dlse: Any
    group: int
    shapes: Mapping[str, tuple[int, ...]]

    @staticmethod
    def read(dout: Any, q: Any, k: Any, v: Any, *, dlse: Any = None, **options: Any) -> "Formula":
        layout = options.get("layout", "bhnd")
        problem = Canonical.read(q, k, v, **options)
        batch = problem.sees.shape[:-3]
        heads, n_q, n_k = problem.q.shape[-3], problem.q.shape[-2], problem.k.shape[-2]

        def live(lengths: Any, n: int) -> Any:
            clipped = np.clip(n if lengths is None else lengths, 0, n)
            clipped = np.broadcast_to(clipped if batch else np.reshape(clipped, ()), batch)
            return np.arange(n)[:, None] < clipped[..., None, None, None]

        rows, keys = live(options.get("q_lengths"), n_q), live(options.get("kv_lengths"), n_k)

        def zeroed(x: Any, live: Any) -> Any:
            return np.where(live, x, x.dtype.type(0))

        problem = Canonical(
            zeroed(problem.q, rows), zeroed(problem.k, keys), zeroed(problem.v, keys),
            *(problem.scale, problem.softcap, problem.bias),
            np.broadcast_to(problem.sees, (*batch, heads, n_q, n_k)),
        )  # fmt: skip
        dout = zeroed(canonical(dout, layout), rows)
        dlse = np.zeros((1, 1)) if dlse is None else zeroed(dlse[..., None], rows)
        shapes = {f"d{name}": canonical(x, layout).shape for name, x in (("q", q), ("k", k), ("v", v))}
        if options.get("bias") is not None:
            shapes["dbias"] = np.atleast_2d(options["bias"]).shape
        return Formula(problem, dout, dlse, heads // max(canonical(k, layout).shape[-3], 1), shapes)

    def to_own(self, name: str, full: Any) -> Any:
        """A gradient for every query head of every batch entry, summed to the shape of the argument."""
        shape = self.shapes[name]
        if name in ("dk", "dv"):
            heads = shape[-3]
            full = full.reshape(*full.shape[:-3], heads, self.group if heads else 1, *full.shape[-2:]).sum(axis=-3)
        full = full.sum(axis=tuple(range(full.ndim - len(shape))))
        axes = tuple(axis for axis, n in enumerate(shape) if n == 1 and full.shape[axis] != 1)
        return full.sum(axis=axes, keepdims=True)


def scores(formula: Formula, product: Any, work: Any) -> tuple[Any, Any]:
    """Scores, −inf where nothing is seen, and the derivative of each by the scaled product."""
    problem = formula.problem
    s = work(problem.scale) * product
    slope = work(1)
    if problem.softcap is not None:
        capped = s / work(problem.softcap)
        small = np.exp(-2 * np.abs(capped))
        slope = 4 * small / (1 + small) ** 2  # 1 − tanh² would be nothing but rounding where tanh is almost 1
        s = work(problem.softcap) * np.tanh(capped)
    if problem.bias is not None:
        s = s + problem.bias.astype(work)
    return np.where(problem.sees, s, work(-np.inf)), slope


def softmax(formula: Formula, s: Any) -> tuple[Any, Any, Any]:
    """The maximum and the sum of the weights of each row, and the weights over it."""
    m = s.max(axis=-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(m == -np.inf, 0, m).astype(s.dtype))
    row_sum = p.sum(axis=-1, keepdims=True)
    weights = np.where(formula.problem.sees & (row_sum != 0), p / np.where(row_sum == 0, 1, row_sum), 0)
    return m, row_sum, weights.astype(s.dtype)


@dataclass(frozen=True)
class Gold:
    """The gradients of the plain formula, their shapes those of the arguments in canonical order.

    `finite` tells where the formula, restricted to pairs that have a weight, is finite; `product_finite` where it is
    with 0 · NaN = NaN for all others. `weighted` tells where any pair has a weight, `magnitude` is that of the terms.
    """

    gradients: Arrays
    finite: Arrays
    product_finite: Arrays
    weighted: Arrays
    magnitude: Arrays
    lse: Any


def gold(formula: Formula) -> Gold:
    problem = formula.problem
    work = np.longdouble if problem.q.dtype == np.float64 else np.float64
    q, k, v, dout, dlse = (x.astype(work) for x in (problem.q, problem.k, problem.v, formula.dout, formula.dlse))
    with np.errstate(all="ignore"):
        s, slope = scores(formula, np.matmul(q, k.swapaxes(-1, -2)), work)
        m, row_sum, p = softmax(formula, s)
        out = np.matmul(p, v)
        delta = (dout * out).sum(axis=-1, keepdims=True) - dlse
        dz = np.where(p == 0, 0, p * (np.matmul(dout, v.swapaxes(-1, -2)) - delta))
        ds = np.where(p == 0, 0, dz * slope)
        scale = work(problem.scale)
        across = p.swapaxes(-1, -2), ds.swapaxes(-1, -2)
        full = {"dq": scale * np.matmul(ds, k), "dk": scale * np.matmul(across[1], q), "dv": np.matmul(across[0], dout)}
        full["dbias"] = dz

        def contaminated(weights: Any, x: Any) -> Any:
            return np.matmul((weights != 0).astype(np.float32), (~np.isfinite(x)).astype(np.float32)) > 0

        bad = {
            "dq": contaminated(ds, k) | ~np.isfinite(ds).all(axis=-1, keepdims=True),
            "dk": contaminated(across[1], q) | ~np.isfinite(across[1]).all(axis=-1, keepdims=True),
            "dv": contaminated(across[0], dout) | ~np.isfinite(across[0]).all(axis=-1, keepdims=True),
            "dbias": ~np.isfinite(dz),
        }
        q2, k2, v2, dout2, out2, p2 = (finite_part(x).astype(np.float64) ** 2 for x in (q, k, v, dout, out, p))
        terms = p2 * (
            np.matmul(dout2, v2.swapaxes(-1, -2))
            + (dout2 * out2).sum(axis=-1, keepdims=True)
            + finite_part(dlse).astype(np.float64) ** 2
        )
        sloped = terms * finite_part(slope).astype(np.float64) ** 2
        square = {
            "dq": problem.scale**2 * np.matmul(sloped, k2),
            "dk": problem.scale**2 * np.matmul(sloped.swapaxes(-1, -2), q2),
            "dv": np.matmul(p2.swapaxes(-1, -2), dout2),
            "dbias": terms,
        }
        lse = (m + np.log(row_sum))[..., 0]
        some = (p != 0).astype(int)
        of_keys = some.any(axis=-2)[..., None].astype(int)
        weighted = {"dq": some.any(axis=-1)[..., None].astype(int), "dk": of_keys, "dv": of_keys, "dbias": some}
    own = formula.to_own
    return Gold(
        {name: own(name, full[name]) for name in formula.shapes},
        {name: own(name, bad[name].astype(int)) == 0 for name in formula.shapes},
        {name: np.isfinite(own(name, full[name])) for name in formula.shapes},
        {name: own(name, weighted[name]) != 0 for name in formula.shapes},
        {name: np.sqrt(own(name, square[name])) for name in formula.shapes},
        lse,
    )


def yardstick(formula: Formula, hot: bool, dtypes: Mapping[str, Any]) -> Iterator[Arrays]:
    """What an ideal fused kernel gives.

    The two passes are different kernels, and sum over D in orders of their own: O and the log-sum-exp come from another
    order than P does, where that is more than the rounding to the input dtype hides. For `hot` scores there are many.
    The forward pass rounds P before it divides by the sum, or after; the rounding of O then differs.
    """
    problem = formula.problem
    dtype = problem.q.dtype
    work = np.float64 if dtype == np.float64 else np.float32
    q, k, v, dout = (x.astype(work) for x in (problem.q, problem.k, problem.v, formula.dout))

    def rounded(x: Any) -> Any:
        return x.astype(dtype).astype(work)

    with np.errstate(all="ignore"):
        dp = np.matmul(dout, v.swapaxes(-1, -2))
        draws = list(products(q, k, hot))
        if not hot:
            draws.append(one_after_another(q, k) if dtype.itemsize > 2 else draws[0])
        for number, (product, of_forward) in enumerate(zip(draws, (*draws[1:], draws[0]), strict=True)):
            s, slope = scores(formula, product, work)
            m, row_sum, weights = softmax(formula, scores(formula, of_forward, work)[0])
            lse = (m.astype(np.float64) + np.log(row_sum.astype(np.float64))).astype(lse_dtype(dtype))
            sums = np.where(row_sum == 0, 1, row_sum) if number % 2 else work(1)
            out = rounded(np.matmul(rounded(weights * sums), v) / sums)
            delta = (dout * out).sum(axis=-1, keepdims=True) - formula.dlse.astype(work)
            seen = problem.sees & (lse != -np.inf)
            p = np.where(seen, np.exp((s.astype(lse.dtype) - lse).astype(work)), work(0))
            dz = np.where(p == 0, work(0), p * (dp - delta))
            ds = rounded(np.where(p == 0, work(0), dz * slope))
            full = {
                "dq": work(problem.scale) * np.matmul(ds, k),
                "dk": work(problem.scale) * np.matmul(ds.swapaxes(-1, -2), q),
                "dv": np.matmul(rounded(p).swapaxes(-1, -2), dout),
                "dbias": dz,
            }
            yield {name: formula.to_own(name, full[name]).astype(dtypes[name]) for name in formula.shapes}


def one_after_another(q: Any, k: Any) -> Any:
    """Q Kᵀ, feature after feature."""
    total = np.zeros((*np.broadcast_shapes(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2]), q.dtype)
    for feature in range(q.shape[-1]):
        total += q[..., feature, None] * k[..., None, :, feature]
    return total


@dataclass(frozen=True)
class Expected:
    """What the backward pass must return, and by how much each block of 32 rows of a gradient may be wrong."""

    gold: Gold
    dtypes: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]  # in the caller's layout
    layout: str
    limit: Arrays
    yardstick: Arrays

    def check(self, *gradients: Any) -> None:
        """Raise AssertionError with the first block that is wrong of (dq, dk, dv), or (dq, dk, dv, dbias)."""
        for name, result in zip(NAMES[: len(gradients)], gradients, strict=True):
            self.check_one(name, result)

    def check_one(self, name: str, result: Any) -> None:
        """Raise AssertionError with the first block of one gradient that is wrong."""
        assert result.dtype == self.dtypes[name], f"{name} is {result.dtype}, not {self.dtypes[name]}"
        assert result.shape == self.shapes[name], f"{name} has shape {result.shape}, not {self.shapes[name]}"
        expected = self.gold.gradients[name]
        result = np.atleast_2d(result) if name == "dbias" else canonical(result, self.layout)
        result = result.astype(expected.dtype)
        finite = np.isfinite(result)
        require(f"{name} is finite where the formula is not", self.gold.finite[name] | ~finite)
        require(f"{name} is not finite where the formula is", ~self.gold.product_finite[name] | finite)
        require(f"{name} is not zero where nothing has a weight", self.gold.weighted[name] | (result == 0) | ~finite)
        compared = finite & np.isfinite(expected)
        error = block_norm(np.where(compared, finite_difference(result, expected), 0))
        size = block_norm(self.gold.magnitude[name])
        require(
            f"{name} is wrong in a block of 32 rows: error, yardstick, limit, magnitude",
            *(error <= self.limit[name], error, self.yardstick[name], self.limit[name], size),
        )

    def check_caps(self, *gradients: Any) -> None:
        """Raise AssertionError if the error of a whole tensor exceeds the cap for standard normal inputs."""
        for name, result in zip(NAMES[: len(gradients)], gradients, strict=True):
            expected = self.gold.gradients[name]
            result = canonical(result, self.layout).astype(expected.dtype)
            error = float(norm(result - expected) / norm(expected))
            cap = CAPS[self.dtypes["dq"].name]
            assert error <= cap, f"{name} is wrong as a whole: relative error {error:.2e}, cap {cap:.2e}"


def expect(dout: Any, q: Any, k: Any, v: Any, *, out: Any = None, lse: Any = None, **options: Any) -> Expected:
    """What `attention_backward(dout, q, k, v, out, lse, **options)` must return, whatever O and LSE it is given.

    Raises
    ------
    AssertionError
        If the yardstick itself is so far from gold that it would excuse anything.
    """
    formula = Formula.read(dout, q, k, v, **options)
    bias = options.get("bias")
    dtypes = dict.fromkeys(NAMES[:3], q.dtype) | ({} if bias is None else {"dbias": bias.dtype})
    shapes = {"dq": q.shape, "dk": k.shape, "dv": v.shape} | ({} if bias is None else {"dbias": bias.shape})
    exact = gold(formula)
    n_k = formula.problem.k.shape[-2]
    hot = bool(np.any(np.abs(finite_part(exact.lse)) > HOT + np.log(max(n_k, 1))))
    square = {name: np.zeros(x.shape[:-1], x.dtype) for name, x in exact.gradients.items()}
    for fused in yardstick(formula, hot, dtypes):
        for name, expected in exact.gradients.items():
            # The yardstick is finite where gold is: an overflow that only the input dtype has is not an excuse.
            result = fused[name].astype(expected.dtype)
            with np.errstate(all="ignore"):
                result = np.where(np.isfinite(result), result, expected.astype(dtypes[name]).astype(expected.dtype))
            error = norm(finite_difference(result, expected), axis=-1) ** 2
            np.maximum(square[name], error, out=square[name])

    factor = FACTOR if bias is None and formula.problem.softcap is None else FACTOR_OF_SCORE_CHANGES
    few_rows = few_sources(formula)
    limit, yard = {}, {}
    for name, expected in exact.gradients.items():
        yard[name] = np.sqrt(by_block(square[name], np.add))
        size = np.maximum(block_norm(exact.magnitude[name]), block_norm(finite_part(expected)))
        smallest = float(ml_dtypes.finfo(dtypes[name]).smallest_normal) * np.sqrt(BLOCK_ROWS * expected.shape[-1])
        decisive = size > max(smallest, NEGLIGIBLE * float(size.max(initial=0)))
        worst = float((yard[name] / np.where(decisive, size, np.inf)).max(initial=0))
        assert worst <= LARGEST_YARDSTICK, f"the yardstick of {name} is at {worst:.2e}: the case decides nothing"
        height = by_block((exact.magnitude[name] != 0).any(axis=-1).astype(float), np.add)
        few = (height * expected.shape[-1] < FEW_ELEMENTS) | (height < FEW_ROWS) | few_rows
        slack = np.where(few, SLACK_OF_FEW[q.dtype.name], SLACK[q.dtype.name]) * EPSILON[q.dtype.name]
        limit[name] = factor * yard[name] + slack * size
    return Expected(exact, dtypes, shapes, options.get("layout", "bhnd"), limit, yard)


def few_sources(formula: Formula) -> bool:
    """Whether so few rows see keys that the rounding of a few numbers, of O and LSE, is the error of all of dK."""
    rows = formula.problem.sees.any(axis=-1).sum(axis=-1)
    return bool(rows.max(initial=0) * formula.group < FEW_ROWS)


def block_norm(x: Any) -> Any:
    """The L2 norm of each block of 32 rows."""
    return np.sqrt(by_block(norm(x, axis=-1) ** 2, np.add))
