"""How the values, masks and biases of the cases are drawn, each kind by its name."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

Shape = tuple[int, ...]


def normal(rng: Any, name: str, shape: Shape, dtype: Any) -> Any:
    return rng.standard_normal(shape)


def exact_hot(rng: Any, name: str, shape: Shape, dtype: Any) -> Any:
    """Scores that are integers around 1e4 and −1e4, close to each other there, exact in every order of summation."""
    if name == "v":
        return rng.standard_normal(shape)
    values = rng.integers(-1, 2, shape) * (rng.random(shape) < 0.5).astype(float)
    values[..., 0] = 100 if name == "q" else 100 * rng.choice((-1, 1), shape[:-1])
    return values


def hot(rng: Any, name: str, shape: Shape, dtype: Any) -> Any:
    """Scores of about ±200."""
    return rng.standard_normal(shape) * (1 if name == "v" else 5)


def along(rng: Any, name: str, shape: Shape, score: Any) -> Any:
    """Queries and keys such that, at scale 1/√D, every row scores about `score[j]` with key j."""
    if name == "v":
        return rng.standard_normal(shape)
    noise = 0.1 * rng.standard_normal(shape)
    return noise + 4 if name == "q" else noise + score[:, None] / (4 * shape[-1] ** 0.5)


def ramp(rng: Any, name: str, shape: Shape, dtype: Any) -> Any:
    """Each key scores higher than those before it: every tile raises the maximum."""
    return along(rng, name, shape, np.linspace(-30, 30, shape[-2]))


def falling(rng: Any, name: str, shape: Shape, dtype: Any) -> Any:
    """Each key scores lower than those before it."""
    return along(rng, name, shape, np.linspace(30, -30, shape[-2]))


def stairs(rng: Any, name: str, shape: Shape, dtype: Any) -> Any:
    """Every 32 keys make all before them negligible."""
    return along(rng, name, shape, 700.0 * (np.arange(shape[-2]) // 32) - 1000)


def dominant(rng: Any, name: str, shape: Shape, dtype: Any) -> Any:
    """One key, two thirds of the way, takes nearly all the weight."""
    return along(rng, name, shape, np.where(np.arange(shape[-2]) == 2 * shape[-2] // 3, 200, 0))


def equal_keys(rng: Any, name: str, shape: Shape, dtype: Any) -> Any:
    values = rng.standard_normal(shape)
    if name == "k":
        values[...] = values[..., :1, :]
    return values


def zero_queries(rng: Any, name: str, shape: Shape, dtype: Any) -> Any:
    return np.zeros(shape) if name == "q" else rng.standard_normal(shape)


def denormal(rng: Any, name: str, shape: Shape, dtype: Any) -> Any:
    return rng.integers(-1000, 1001, shape) * float(ml_dtypes.finfo(dtype).smallest_subnormal)


def denormal_values(rng: Any, name: str, shape: Shape, dtype: Any) -> Any:
    return denormal(rng, name, shape, dtype) if name == "v" else rng.standard_normal(shape)


def large_products(rng: Any, name: str, shape: Shape, dtype: Any) -> Any:
    """Q Kᵀ is beyond the range of float16 before the scale brings it back."""
    return rng.standard_normal(shape) * (1 if name == "v" else 60)


def large_values(rng: Any, name: str, shape: Shape, dtype: Any) -> Any:
    """V close to the largest float16."""
    return rng.uniform(-65000, 65000, shape) if name == "v" else rng.standard_normal(shape)


def nan_query(rng: Any, name: str, shape: Shape, dtype: Any) -> Any:
    """One query row holds a NaN."""
    values = rng.standard_normal(shape)
    if name == "q":
        values[..., shape[-2] // 2, 0] = np.nan
    return values


def nan_key(rng: Any, name: str, shape: Shape, dtype: Any) -> Any:
    """One key holds a NaN: every row that sees it is NaN, and no other."""
    values = rng.standard_normal(shape)
    if name == "k":
        values[..., shape[-2] // 2, 0] = np.nan
    return values


def infinite_key(rng: Any, name: str, shape: Shape, dtype: Any) -> Any:
    """One key scores +inf with some rows, which become NaN, and −inf with the others, which do not see it."""
    values = rng.standard_normal(shape)
    if name == "k":
        values[..., shape[-2] // 2, 0] = np.inf
    return values


VALUES: dict[str, Callable[[Any, str, Shape, Any], Any]] = {
    "normal": normal,
    "exact-hot": exact_hot,
    "hot": hot,
    "ramp": ramp,
    "falling": falling,
    "stairs": stairs,
    "dominant": dominant,
    "equal-keys": equal_keys,
    "zero-queries": zero_queries,
    "denormal": denormal,
    "denormal-values": denormal_values,
    "large-products": large_products,
    "large-values": large_values,
    "nan-query": nan_query,
    "nan-key": nan_key,
    "infinite-key": infinite_key,
}


def random_mask(rng: Any, shape: Shape) -> Any:
    return rng.random(shape) < 0.6


def dead_rows(rng: Any, shape: Shape) -> Any:
    """Every third row sees nothing."""
    mask = random_mask(rng, shape)
    mask[..., ::3, :] = False
    return mask


def late_keys(rng: Any, shape: Shape) -> Any:
    """No row sees anything before the last third of the keys."""
    mask = np.zeros(shape, bool)
    mask[..., 2 * shape[-1] // 3 :] = True
    return mask


def early_keys(rng: Any, shape: Shape) -> Any:
    return ~late_keys(rng, shape)


def one_key(rng: Any, shape: Shape) -> Any:
    """Each row sees exactly one key."""
    return np.arange(shape[-1]) == rng.integers(shape[-1], size=shape[:-1])[..., None]


def nothing(rng: Any, shape: Shape) -> Any:
    return np.zeros(shape, bool)


def everything(rng: Any, shape: Shape) -> Any:
    return np.ones(shape, bool)


MASKS: dict[str, Callable[[Any, Shape], Any]] = {
    "random": random_mask,
    "dead-rows": dead_rows,
    "late-keys": late_keys,
    "early-keys": early_keys,
    "one-key": one_key,
    "nothing": nothing,
    "everything": everything,
}


def normal_bias(rng: Any, shape: Shape) -> Any:
    return rng.standard_normal(shape)


def large_bias(rng: Any, shape: Shape) -> Any:
    """Integers around 1500 and −1500, close to each other there; with zero queries they are the scores, exactly."""
    return 1500 * rng.choice((-1, 1), shape) + rng.integers(-3, 4, shape)


def dead_columns(rng: Any, shape: Shape) -> Any:
    bias = rng.standard_normal(shape)
    bias[..., ::3] = -np.inf
    return bias


def dead_bias_rows(rng: Any, shape: Shape) -> Any:
    bias = rng.standard_normal(shape)
    bias[..., ::3, :] = -np.inf
    return bias


def late_bias(rng: Any, shape: Shape) -> Any:
    """No row sees anything before the last third of the keys."""
    return np.where(late_keys(rng, shape), rng.standard_normal(shape), -np.inf)


def infinite_bias(rng: Any, shape: Shape) -> Any:
    """One row is NaN, because it has a score of +inf."""
    bias = rng.standard_normal(shape)
    bias[..., shape[-2] // 2, 0] = np.inf
    return bias


BIASES: dict[str, Callable[[Any, Shape], Any]] = {
    "normal": normal_bias,
    "large": large_bias,
    "dead-columns": dead_columns,
    "dead-rows": dead_bias_rows,
    "late-keys": late_bias,
    "infinite": infinite_bias,
}
