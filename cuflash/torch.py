"""`attention` for PyTorch, with gradients: a custom operator that autograd and ``torch.compile`` know.

Imported only when asked for; needs PyTorch (``pip install 'cuflash[torch]'``).
"""

from __future__ import annotations

from typing import Any

try:
    import torch
except ModuleNotFoundError as missing:
    raise ImportError("cuflash.torch needs PyTorch: pip install 'cuflash[torch]'") from missing

from cuflash.api import attention_backward, attention_forward
from cuflash.backward import make_wanted
from cuflash.problem import LAYOUTS, read_scale, read_softcap, read_window

FAR = 2**31  # a window that wide is unbounded: no sequence is as long
FULL = ""  # the operator's `causal` where there is no causal mask
OPTIONS = (
    "Tensor? mask, Tensor? bias, Tensor? q_lengths, Tensor? kv_lengths, float? scale, str causal, int? left, "
    "int? right, float? softcap, str layout, bool deterministic"
)


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
    deterministic: bool = True,
) -> Any:
    """Exact attention of PyTorch tensors, on a GPU or the CPU, with gradients for q, k, v and bias.

    Parameters
    ----------
    q, k, v : Tensor
        Of one dtype and device, as `cuflash.attention` takes them.
    scale, causal, window, softcap, mask, bias, q_lengths, kv_lengths, layout
        As of `cuflash.attention`.
    return_lse : bool
        Also return the log-sum-exp of each row, through which gradients flow too.
    deterministic : bool
        As of `cuflash.attention_backward`: False lets the gradient of q have other bits from run to run, where that is
        faster.

    Returns
    -------
    Tensor, or (Tensor, Tensor) with `return_lse`
        As of `cuflash.attention`.

    Raises
    ------
    TypeError, ValueError
        As of `cuflash.attention`.

    Notes
    -----
    The operator is ``torch.ops.cuflash.attention``. It saves q, k, v, the output and the
    log-sum-exp for the backward pass, nothing of the size N_q x N_k. Second derivatives are not there.

    Examples
    --------
    >>> import torch, cuflash.torch
    >>> q, k, v = (torch.ones(2, 3, 8, requires_grad=True) for _ in range(3))
    >>> cuflash.torch.attention(q, k, v, causal=True).sum().backward()
    >>> v.grad[0, :, 0].mul(6).round().int().tolist()
    [11, 5, 2]
    """
    if not torch.compiler.is_compiling():  # then the operator checks when it runs
        tensors = {"mask": mask, "bias": bias, "q_lengths": q_lengths, "kv_lengths": kv_lengths}
        check_tensors({"q": q, "k": k, "v": v} | {name: x for name, x in tensors.items() if x is not None})
        check_options(q, scale, causal, window, softcap, layout)
    make_wanted(False, deterministic)  # always: the schema of the operator takes None for False
    left, right = (None if bound is None else min(bound, FAR) for bound in window or (None, None))
    where = causal if isinstance(causal, str) else "bottom-right" if causal else FULL
    options = (scale, where, left, right, softcap, layout, deterministic)
    out, lse = operator(q, k, v, mask, bias, q_lengths, kv_lengths, *options)
    return (out, lse) if return_lse else out


def check_tensors(tensors: dict[str, Any]) -> None:
    """Refuse what the operator's dispatch would not: arrays of other kinds, two devices, forward-mode derivatives."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} must be a Tensor, got {type(x).__name__}")
        if x.device != tensors["q"].device:
            both = f"q on {tensors['q'].device} and {name} on {x.device}"
            raise ValueError(f"all arrays of a call must be on one device, got {both}")
    functorch = torch._C._functorch
    transforms = functorch.get_interpreter_stack() or ()
    if any(transform.key() == functorch.TransformType.Jvp for transform in transforms):
        raise TypeError("cuflash.torch.attention has no forward-mode derivative: the tangent would be lost")


def check_options(q: Any, scale: Any, causal: Any, window: Any, softcap: Any, layout: Any) -> None:
    """Refuse options as `cuflash.attention` does, before the operator's schema says it in its own words."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    if q.dim() > 0:
        read_scale(scale, max(int(q.shape[-1]), 1), "float64" if q.dtype == torch.float64 else "float32")
    read_softcap(softcap)
    read_window(causal, window, 1, 1)


def keywords(
    mask: Any,
    bias: Any,
    q_lengths: Any,
    kv_lengths: Any,
    scale: Any,
    causal: str,
    left: int | None,
    right: int | None,
    softcap: Any,
    layout: str,
) -> dict[str, Any]:
    """The operators' options as the arguments of `cuflash.attention`, but for the last one, `deterministic`."""
    return {
        "mask": mask,
        "bias": bias,
        "q_lengths": q_lengths,
        "kv_lengths": kv_lengths,
        "scale": scale,
        "causal": causal or False,
        "window": None if left is None and right is None else (left, right),
        "softcap": softcap,
        "layout": layout,
    }


def forward(q: Any, k: Any, v: Any, *options: Any) -> tuple[Any, Any]:
    """Output and log-sum-exp."""
    with torch.no_grad():
        return attention_forward(q, k, v, **keywords(*options[:-1]))


def fake_forward(q: Any, k: Any, v: Any, *options: Any) -> tuple[Any, Any]:
    """What shapes and dtypes `forward` returns."""
    bnhd = options[-2] == "bnhd"
    matrix = q.dim() == k.dim() == v.dim() == 2
    q_, k_, v_ = (x[None] if x.dim() == 2 else x.transpose(-3, -2) if bnhd else x for x in (q, k, v))
    batch = torch.broadcast_shapes(q_.shape[:-3], k_.shape[:-3], v_.shape[:-3])
    heads, rows, columns = q_.shape[-3], q_.shape[-2], v_.shape[-1]
    lse_dtype = torch.float64 if q.dtype in (torch.float32, torch.float64) else torch.float32
    if matrix:
        shape, lse_shape = (rows, columns), (rows,)
    else:
        shape = (*batch, rows, heads, columns) if bnhd else (*batch, heads, rows, columns)
        lse_shape = (*batch, heads, rows)
    return q.new_empty(shape), q.new_empty(lse_shape, dtype=lse_dtype)


def backward(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, want_dbias: bool, *options: Any
) -> tuple[Any, ...]:
    """The gradients of q, k, v and bias, the last one empty where it is not wanted."""
    with torch.no_grad():
        wanted = {"return_dbias": want_dbias, "deterministic": options[-1]}
        gradients = attention_backward(dout, q, k, v, out, lse, dlse=dlse, **keywords(*options[:-1]), **wanted)
        return gradients if want_dbias else (*gradients, q.new_empty(0))


def fake_backward(
    dout: Any, dlse: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, want_dbias: bool, mask: Any, bias: Any, *rest: Any
) -> tuple[Any, Any, Any, Any]:
    """What shapes and dtypes `backward` returns."""
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    return dq, dk, dv, bias.new_empty(bias.shape) if want_dbias else q.new_empty(0)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, Any]) -> None:
    """Keep what the backward pass needs."""
    q, k, v, mask, bias, q_lengths, kv_lengths, *ctx.options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, *output, mask, bias, q_lengths, kv_lengths)


def differentiate(ctx: Any, dout: Any, dlse: Any) -> tuple[Any, ...]:
    """The gradients of the operator's inputs."""
    if dout is None and dlse is None:
        return (None,) * 14
    q, k, v, out, lse, mask, bias, q_lengths, kv_lengths = ctx.saved_tensors
    want_dbias = bias is not None and ctx.needs_input_grad[4]
    dout = torch.zeros_like(out) if dout is None else dout
    given = (mask, bias, q_lengths, kv_lengths, *ctx.options)
    dq, dk, dv, dbias = backward_operator(dout, dlse, q, k, v, out, lse, want_dbias, *given)
    return dq, dk, dv, None, dbias if want_dbias else None, *(None,) * 9


operator = torch.library.custom_op(
    "cuflash::attention",
    forward,
    mutates_args=(),
    schema=f"(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> (Tensor, Tensor)",
)
backward_operator = torch.library.custom_op(
    "cuflash::attention_backward",
    backward,
    mutates_args=(),
    schema=(
        "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, bool want_dbias, "
        f"{OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
operator.register_fake(fake_forward)
backward_operator.register_fake(fake_backward)
operator.register_autograd(differentiate, setup_context=save)
