"""The public functions: read the arguments, make a `Problem`, run its plan, hand the result back."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cuflash.backward import BackwardCall, differentiate, inspect_backward, make_wanted
from cuflash.backward_config import BackwardConfig
from cuflash.backward_plan import is_deterministic
from cuflash.call import Call, Options, attend, common_kind, make_options, plan_call, prepare_gpu
from cuflash.config import NumpyConfig, TileConfig
from cuflash.problem import Problem


@dataclass(frozen=True)
class Explanation:
    """How a call is computed.

    Attributes
    ----------
    family : str
        The kernel family: "wgmma", "mma", "simt" or "numpy".
    config : TileConfig or BackwardConfig
        Its tile configuration.
    source : {"the caller", "loaded", "tuned", "site", "shipped", "default"}
        Where the configuration came from: the argument `config`, `load_configs`, what this user tuned or imported, what
        is kept for the whole machine, what comes with cuflash, or the default of a call that is not tuned.
    device : str
    ruled_out : mapping of str to str
        Why the other families do not serve the call.
    problem : Problem
        The checked call, its compiled-in part in ``problem.spec``.
    stale : str or None
        Why a tuned configuration may no longer be the fastest: what differs from where it was measured.
    deterministic : bool
        Whether results have the same bits on every run.
    """

    family: str
    config: TileConfig | BackwardConfig
    source: str
    device: str
    ruled_out: Mapping[str, str]
    problem: Problem
    stale: str | None = None
    deterministic: bool = True

    def __str__(self) -> str:
        source = self.source if self.stale is None else f"{self.source}; it {self.stale}"
        lines = [f"{self.family} on {self.device}: {self.config} (from: {source})"]
        lines += [] if self.deterministic else ["  not deterministic: dq is summed in any order"]
        lines += [f"  not {family}: {reason}" for family, reason in self.ruled_out.items()]
        return "\n".join(lines)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    mask: Any = None,
    bias: Any = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    layout: str = "bhnd",
    return_lse: bool = False,
    out: Any = None,
    config: TileConfig | None = None,
) -> Any:
    """Exact scaled dot-product attention, ``softmax(scale * q @ k^T) @ v``, without a matrix of N_q x N_k in memory.

    Parameters
    ----------
    q : array, (..., H_q, N_q, D)
        Queries: NumPy, CuPy, PyTorch or JAX, float16, bfloat16, float32 or float64; 2-D (N_q, D) upwards.
    k, v : array, (..., H_kv, N_k, D) and (..., H_kv, N_k, D_v)
        Keys and values, of the kind, device and dtype of `q`; 1 <= D <= 256 and D_v <= 256. H_q is a multiple of H_kv:
        query head h reads head ``h // (H_q // H_kv)``. Batch axes broadcast as in `numpy.matmul`. Any strides; an
        innermost axis that is not contiguous is copied first.
    scale : float, optional
        Default ``1 / sqrt(D)``.
    causal : bool or {"bottom-right", "top-left"}
        Row i sees keys ``j <= i + delta``; delta is ``N_k - N_q`` (True, "bottom-right") or 0 ("top-left").
    window : (left, right), optional
        Row i sees keys ``i + delta - left <= j <= i + delta + right``; None on a side is unbounded. With `causal`,
        right is 0.
    softcap : float, optional
        Scores become ``softcap * tanh(score / softcap)``, after the scale and before the bias.
    mask : bool array, broadcast to (..., H_q, N_q, N_k), optional
        True where a row may attend to a key.
    bias : array, broadcast to (..., H_q, N_q, N_k), optional
        Added to the scores; of the dtype of `q` or float32.
    q_lengths, kv_lengths : int32 or int64 array, broadcast to the batch axes, optional
        Live rows and keys of each batch entry, clamped to [0, N]; they are the N_q and N_k of delta. What lies beyond
        is never used.
    layout : {"bhnd", "bnhd"}
        "bnhd": q, k, v and the result are (..., N, H, D). Mask, bias and LSE keep (..., H, N).
    return_lse : bool
        Also return the log of the sum of ``e^score`` over each row.
    out : array, optional
        Where to write the result, of its shape and dtype; it must not overlap an input.
    config : WgmmaConfig, MmaConfig, SimtConfig or NumpyConfig, optional
        Kernel family and tile sizes to use instead of the planner's.

    Returns
    -------
    array, (..., H_q, N_q, D_v)
        Of the kind, device and dtype of `q`. A row that sees no key is 0.
    lse : array, (..., H_q, N_q), only if `return_lse`
        Natural logarithm; float32 for 16-bit inputs, else float64 (of JAX only where it is enabled); -inf for a row
        that sees no key.

    Raises
    ------
    TypeError, ValueError
        Before anything is launched or written, naming the argument, what came and what is allowed.
    UntunedError
        When the call is not tuned and `require_tuned` asks for it.

    Notes
    -----
    FlashAttention (Dao et al. 2022), Algorithm 1, in the order of FlashAttention-2 (Dao 2023), Algorithm 1. GPU arrays
    are computed on the caller's current stream without host synchronisation.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.standard_normal((2, 8, 300, 64)) for _ in range(3))
    >>> out = cuflash.attention(q, k, v, causal=True)
    >>> bool(abs(out - cuflash.reference.standard_attention(q, k, v, causal=True)).max() < 1e-14)
    True
    """
    arrays = (q, k, v, out, mask, bias, q_lengths, kv_lengths)
    return attend(arrays, (scale, causal, window, softcap, layout), return_lse, config)


def attention_forward(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, Any]:
    """What a backward pass needs of the forward pass: the output and the log-sum-exp of each row.

    Takes the arguments of `attention`, and returns what it does with `return_lse`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.ones((2, 3, 8))
    >>> out, lse = cuflash.attention_forward(x, x, x)
    >>> out.shape, lse.shape
    ((2, 3, 8), (2, 3))
    """
    out, lse = attention(q, k, v, **{**options, "return_lse": True})
    return out, lse


def attention_backward(
    dout: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
    *,
    dlse: Any = None,
    scale: float | None = None,
    causal: bool | str = False,
    window: tuple[int | None, int | None] | None = None,
    softcap: float | None = None,
    mask: Any = None,
    bias: Any = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    layout: str = "bhnd",
    return_dbias: bool = False,
    deterministic: bool = True,
    config: BackwardConfig | NumpyConfig | None = None,
) -> tuple[Any, ...]:
    """Exact gradients of `attention`, without a matrix of N_q x N_k in memory; by default the same bits on every run.

    Parameters
    ----------
    dout : array
        The gradient of the output, of its shape and dtype, with any strides.
    q, k, v : array
        As they were given to `attention`.
    out, lse : array
        What `attention_forward` returned. LSE may be float32 or float64; for float32 inputs a float32 one costs
        precision where scores are large.
    dlse : array, optional
        The gradient of the log-sum-exp, of its shape, where that is used; float32 or float64.
    scale, causal, window, softcap, mask, bias, q_lengths, kv_lengths, layout
        As they were given to `attention`.
    return_dbias : bool
        Also return the gradient of `bias`.
    deterministic : bool
        False lets dq have other bits from run to run, as exact as before, for a little speed: on Hopper in 16 bits,
        from 2048 keys on and with tiles of 128 keys, as head dims up to 128 mostly have. Elsewhere it changes nothing,
        and dk, dv and dbias have the same bits always.
    config : BackwardWgmmaConfig, BackwardMmaConfig, BackwardSimtConfig or NumpyConfig, optional
        Kernel family and tile sizes to use instead of the planner's.

    Returns
    -------
    dq, dk, dv : array
        Of the shapes, kind and dtype of q, k and v: summed over the query heads that share a head of k and v, and over
        batch axes along which an input was broadcast.
    dbias : array, only if `return_dbias`
        Of the shape and dtype of `bias`, summed over the axes along which it was broadcast.

    Raises
    ------
    TypeError, ValueError
        Before anything is launched, naming the argument, what came and what is allowed.
    UntunedError
        When the call is not tuned and `require_tuned` asks for it.

    Notes
    -----
    The gradients of a row that sees no key are 0, and so are those of keys that no row sees and of what lies beyond the
    lengths. Where a NaN or an infinity stands in q, k, v or `dout`, the gradients that depend on it are not finite;
    others of its head may be NaN too, as 0 · NaN is.

    FlashAttention-2 (Dao 2023), Algorithm 2: the weights are computed again from q, k and the log-sum-exp.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> rng = np.random.default_rng(0)
    >>> q, k, v, dout = (rng.standard_normal((2, 50, 16)) for _ in range(4))
    >>> out, lse = cuflash.attention_forward(q, k, v, causal=True)
    >>> dq, dk, dv = cuflash.attention_backward(dout, q, k, v, out, lse, causal=True)
    >>> step = np.zeros_like(v)
    >>> step[1, 3, 5] = 1e-6
    >>> change = (dout * (cuflash.attention(q, k, v + step, causal=True) - out)).sum() / 1e-6
    >>> bool(abs(change - dv[1, 3, 5]) < 1e-6)
    True
    """
    arrays = (q, k, v, out, dout, lse, dlse, mask, bias, q_lengths, kv_lengths)
    wanted = make_wanted(return_dbias, deterministic)
    return differentiate(arrays, (scale, causal, window, softcap, layout), wanted, config)


def explain(q: Any, k: Any, v: Any, **options: Any) -> Explanation:
    """How `attention` would compute a call: family, tile configuration, where it came from, why not another.

    Takes the arguments of `attention`, checks them in the same way, and runs nothing.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.zeros((8, 128, 64), np.float32)
    >>> cuflash.explain(x, x, x).family
    'numpy'
    """
    return inspect_call(q, k, v, options, load=False)


def prepare(q: Any, k: Any, v: Any, **options: Any) -> Explanation:
    """Compile and load what `attention` needs for a call, without running it, and say what that is.

    Takes the arguments of `attention`. Afterwards the same call with other data compiles nothing (nor do other lengths
    or batch sizes of the same alignment, but for the exceptions in docs/contract.md), and can be captured in a CUDA
    graph (with `out` given, so that nothing is allocated).

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.zeros((8, 128, 64), np.float32)
    >>> cuflash.prepare(x, x, x, causal=True).family
    'numpy'
    """
    return inspect_call(q, k, v, options, load=True)


def inspect_call(q: Any, k: Any, v: Any, keywords: dict[str, Any], load: bool) -> Explanation:
    """Check and plan a call as `attention` does; with `load`, compile and load it too."""
    given = inspect.signature(attention).bind(q, k, v, **keywords)
    given.apply_defaults()
    take = given.arguments
    call = Call(*(take[name] for name in Call._fields))
    options = make_options(*(take[name] for name in Options._fields))
    kind = common_kind(call)
    with kind.current(q):
        views = call.viewed_by(kind)
        problem, choice, device = plan_call(views, options, take["config"])
        if load and device is not None:
            prepare_gpu(call, options, take["return_lse"], take["config"], kind)
    name = "the CPU" if device is None else device.name
    return Explanation(choice.family, choice.config, choice.source, name, choice.ruled_out, problem, choice.stale)


def explain_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **options: Any) -> Explanation:
    """How `attention_backward` would compute a call, as `explain` tells it of `attention`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.zeros((8, 128, 64), np.float32)
    >>> cuflash.explain_backward(x, x, x, x, x, np.zeros((8, 128))).family
    'numpy'
    """
    return inspect_backward_call((dout, q, k, v, out, lse), options, load=False)


def prepare_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, **options: Any) -> Explanation:
    """Compile and load what `attention_backward` needs for a call, without running it, and say what that is.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> x = np.zeros((8, 128, 64), np.float32)
    >>> cuflash.prepare_backward(x, x, x, x, x, np.zeros((8, 128)), causal=True).family
    'numpy'
    """
    return inspect_backward_call((dout, q, k, v, out, lse), options, load=True)


def inspect_backward_call(arrays: tuple[Any, ...], keywords: dict[str, Any], load: bool) -> Explanation:
    """Check and plan a call as `attention_backward` does; with `load`, compile and load it too."""
    given = inspect.signature(attention_backward).bind(*arrays, **keywords)
    given.apply_defaults()
    take = given.arguments
    call = BackwardCall(*(take[name] for name in BackwardCall._fields))
    options = make_options(*(take[name] for name in Options._fields))
    wanted = make_wanted(take["return_dbias"], take["deterministic"])
    problem, choice, device = inspect_backward(call, options, wanted, take["config"], load)
    name = "the CPU" if device is None else device.name
    return Explanation(
        *(choice.family, choice.config, choice.source, name, choice.ruled_out, problem.forward, choice.stale),
        deterministic=is_deterministic(problem, choice.config),
    )
