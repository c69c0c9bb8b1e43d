"""Other implementations of attention, to compare with: how each is called, and what each cannot do."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import cuflash
from cuflash.arrays import DTYPE_OF
from cuflash.problem import ITEM_BYTES, Spec
from cuflash.timing import BACKWARD_WORK, flops


class Unserved(Exception):
    """A peer does not do what a case asks for; the message says what that is."""


@dataclass(frozen=True)
class Case:
    """What is computed and timed: self-attention of `batch` sequences of length `n`.

    Attributes
    ----------
    heads, kv_heads : int
        Heads of queries, and of keys and values.
    window : (left, right) or None
        As `cuflash.attention` takes it.
    alibi : bool
        Scores get ``slope * (j - i)``, the slopes of Press et al. (2022): ``2 ** (-8 * (head + 1) / heads)``.
    layout : {"bhnd", "bnhd"}
        Order of the axes in memory.
    backward : bool
        Whether it is the gradients that are computed, of what the forward pass has left.
    deterministic : bool
        Whether cuflash's gradients have the same bits on every run; the others' are as they come.
    """

    d: int
    n: int
    causal: bool = False
    dtype: str = "bfloat16"
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi: bool = False
    layout: str = "bnhd"
    backward: bool = False
    deterministic: bool = True

    def __str__(self) -> str:
        words = [f"D={self.d} N={self.n} {'causal' if self.causal else 'full'}"]
        words += [f"{self.heads}:{self.kv_heads} heads"] if self.heads != self.kv_heads else []
        words += ["window {}:{}".format(*self.window)] if self.window else []
        words += [f"softcap {self.softcap:g}"] if self.softcap else []
        words += ["ALiBi"] if self.alibi else []
        words += ["backward"] if self.backward else []
        words += [] if self.deterministic else ["not deterministic"]
        return " ".join(words)

    def shape(self, heads: int) -> tuple[int, int, int, int]:
        """Of q, or of k and v."""
        rows = (self.n, heads) if self.layout == "bnhd" else (heads, self.n)
        return (self.batch, *rows, self.d)

    def reach(self) -> tuple[int, int]:
        """How many keys a row sees to the left and to the right of its own."""
        left, right = self.window or (None, None)
        return self.n if left is None else left, 0 if self.causal else self.n if right is None else right

    def visible(self, rows: NDArray[Any]) -> NDArray[Any]:
        """Which keys `rows` see: a boolean array (rows, N)."""
        left, right = self.reach()
        distance = np.arange(self.n) - rows[:, None]
        return np.asarray((distance >= -left) & (distance <= right))

    def flops(self) -> float:
        """Operations, as the papers count them: a causal mask halves them; of a window, the pairs that are seen.

        Five products rather than two make 2.5 times as many of the gradients.
        """
        whole = flops(self.batch, self.heads, self.n, self.n, self.d, self.causal and not self.window)
        whole *= BACKWARD_WORK if self.backward else 1.0
        if not self.window:
            return whole
        left, right = self.reach()
        rows = np.arange(self.n)
        seen = np.minimum(rows + right, self.n - 1) - np.maximum(rows - left, 0) + 1
        return whole * float(seen.mean()) / self.n

    def slopes(self) -> NDArray[Any]:
        """Those of ALiBi, one a head."""
        return np.asarray(2.0 ** (-8.0 * np.arange(1, self.heads + 1) / self.heads))

    def score_bytes(self, item: int) -> int:
        """Size of a matrix of all scores."""
        return self.batch * self.heads * self.n * self.n * item


class Numbers:
    """Normal random numbers, on the host and on the GPU, of which every case of one dtype takes as many as it needs."""

    def __init__(self, dtype: str, cases: Sequence[Case], put: Callable[[NDArray[Any]], Any]) -> None:
        random = np.random.default_rng(0)
        heads = ("heads", "kv_heads", "kv_heads", *(["heads"] if any(case.backward for case in cases) else []))
        sizes = [max(math.prod(case.shape(getattr(case, which))) for case in cases) for which in heads]
        self.host = [random.standard_normal(size, np.float32).astype(DTYPE_OF[dtype]) for size in sizes]
        self.device = [put(numbers) for numbers in self.host]
        self.put = put


class Arrays:
    """q, k, v and for gradients dO of one case, as arrays of every library, of the same memory where that can be."""

    def __init__(self, case: Case, numbers: Numbers) -> None:
        shapes = [case.shape(case.heads), case.shape(case.kv_heads), case.shape(case.kv_heads)]
        shapes += [case.shape(case.heads)] if case.backward else []
        self.case, self.put = case, numbers.put
        self.host = [x[: math.prod(shape)].reshape(shape) for x, shape in zip(numbers.host, shapes, strict=False)]
        self.cupy = [x[: math.prod(shape)].reshape(shape) for x, shape in zip(numbers.device, shapes, strict=False)]

    def torch(self, layout: str) -> list[Any]:
        """PyTorch tensors, the axes in the order of `layout`."""
        tensors = [as_torch(x) for x in self.cupy]
        return tensors if layout == self.case.layout else [x.transpose(1, 2) for x in tensors]

    def jax(self) -> list[Any]:
        """JAX arrays (B, N, H, D)."""
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or it takes most of the GPU's memory
        import jax

        arrays = [jax.dlpack.from_dlpack(_bits(x)).view(self.case.dtype) for x in self.cupy]
        return arrays if self.case.layout == "bnhd" else [x.swapaxes(1, 2) for x in arrays]


def as_torch(array: Any) -> Any:
    """A CuPy array as a PyTorch tensor of the same memory."""
    import torch

    return torch.from_dlpack(_bits(array)).view(getattr(torch, array.dtype.name))


def _bits(array: Any) -> Any:
    """The array as integers: not every library's DLPack knows bfloat16."""
    return array.view(f"int{8 * array.itemsize}")


class Runner(NamedTuple):
    """A case, made ready for an implementation.

    Attributes
    ----------
    run : callable
        Computes the case once, without waiting for the GPU unless `on_host`, and returns the result: O, or the
        gradients of q, k and v.
    layout : str
        Order of the result's axes.
    on_host : bool
        Whether it must be timed by the host's clock, since it computes on a stream of its own.
    """

    run: Callable[[], Any]
    layout: str
    on_host: bool = False


class Peer(NamedTuple):
    """An implementation: its name on the command line and in tables, and what makes a case ready for it.

    `make` raises where the implementation is not installed or does not serve the case.
    """

    name: str
    title: str
    make: Callable[[Case, Arrays], Runner]


def make_cuflash(case: Case, arrays: Arrays) -> Runner:
    """`cuflash.attention`, or `cuflash.attention_backward`, as it plans the call."""
    options = cuflash_options(case, arrays)
    if not case.backward:
        return Runner(functools.partial(cuflash.attention, *arrays.cupy, **options), case.layout)
    q, k, v, dout = arrays.cupy
    out, lse = cuflash.attention_forward(q, k, v, **options)
    options["deterministic"] = case.deterministic
    return Runner(functools.partial(cuflash.attention_backward, dout, q, k, v, out, lse, **options), case.layout)


def plan_cuflash(case: Case, arrays: Arrays, *, prepare: bool) -> cuflash.Explanation:
    """How cuflash computes a case; with `prepare`, what it needs is compiled too."""
    options = cuflash_options(case, arrays)
    if not case.backward:
        return (cuflash.prepare if prepare else cuflash.explain)(*arrays.cupy, **options)
    q, k, v, dout = arrays.cupy
    if prepare:
        cuflash.prepare(q, k, v, **options)
    lse = arrays.put(np.empty((case.batch, case.heads, case.n), Spec(case.dtype, 16, 16).lse_dtype))
    explain = cuflash.prepare_backward if prepare else cuflash.explain_backward
    return explain(dout, q, k, v, dout, lse, **options, deterministic=case.deterministic)


def cuflash_options(case: Case, arrays: Arrays) -> dict[str, Any]:
    """The keywords of `cuflash.attention` for a case."""
    options: dict[str, Any] = {"causal": case.causal, "layout": case.layout}
    if case.window:
        options["window"] = case.window
    if case.softcap:
        options["softcap"] = case.softcap
    if case.alibi:
        options["bias"] = arrays.put(alibi_bias(case).astype(np.float32))
    return options


def alibi_bias(case: Case) -> NDArray[Any]:
    """ALiBi as a bias (H, 1, N): without the part that is the same along a row, which the softmax takes out again."""
    return np.asarray(case.slopes()[:, None, None] * (np.arange(case.n) - (case.n - 1)))


# ---- PyTorch ----


def run_torch(attend: Callable[..., Any], case: Case, arrays: Arrays, layout: str) -> Runner:
    """`attend` of q, k and v, PyTorch tensors in `layout`, or the gradients that PyTorch derives of it."""
    import torch

    tensors = arrays.torch(layout)
    if not case.backward:

        def run() -> Any:
            with torch.no_grad():
                return attend(*tensors)

        return Runner(run, layout)
    *qkv, dout = tensors
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = attend(*leaves)
    return Runner(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), layout)


def make_sdpa(backend: str, case: Case, arrays: Arrays) -> Runner:
    """`torch.nn.functional.scaled_dot_product_attention`, by one backend."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    refuse(case, "window", "softcap", "alibi")
    if backend == "MATH":  # in float32, and softmax makes a second matrix
        require_memory((6 if case.backward else 3) * case.score_bytes(4))
    chosen = [getattr(SDPBackend, backend)]
    options = {"is_causal": case.causal, "enable_gqa": case.heads != case.kv_heads}

    def attend(q: Any, k: Any, v: Any) -> Any:
        with sdpa_kernel(chosen):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, **options)

    return run_torch(attend, case, arrays, "bhnd")


def make_flex(case: Case, arrays: Arrays) -> Runner:
    """FlexAttention, compiled for the case."""
    import torch
    from torch._functorch import config as functorch_config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    device = arrays.torch("bhnd")[0].device
    sees, modified = flex_functions(case, device)
    torch._dynamo.reset()  # it compiles a function for a few shapes only
    compiled = torch.compile(flex_attention, dynamic=False)
    masked = case.causal or case.window
    options = {
        "score_mod": modified if case.softcap or case.alibi else None,
        "block_mask": create_block_mask(sees, None, None, case.n, case.n, device=device) if masked else None,
        "enable_gqa": case.heads != case.kv_heads,
    }
    with functorch_config.patch(donated_buffer=False):  # a graph is run backward many times
        return run_torch(functools.partial(compiled, **options), case, arrays, "bhnd")


def flex_functions(case: Case, device: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """A case as FlexAttention's ``mask_mod`` and ``score_mod``."""
    import torch

    left, right = case.reach()
    softcap, alibi = case.softcap, case.alibi
    slopes = torch.as_tensor(case.slopes(), dtype=torch.float32, device=device)

    def sees(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (j - i <= right) & (i - j <= left)

    def modified(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        if softcap:
            score = softcap * torch.tanh(score / softcap)
        return score + slopes[h] * (j - i) if alibi else score

    return sees, modified


# ---- the FlashAttention packages ----


def make_fa3(case: Case, arrays: Arrays) -> Runner:
    """FlashAttention-3, of the packages flash-attn-3 or fa3-fwd; the latter has no backward pass."""
    refuse(case, "alibi")
    module = import_first("flash_attn_interface", *([] if case.backward else ["fa3_fwd_interface"]))
    return make_packaged(module.flash_attn_func, case, arrays, window_size=package_window(case, -1))


def make_fa2(case: Case, arrays: Arrays) -> Runner:
    """FlashAttention-2, of the package flash-attn."""
    import torch

    options: dict[str, Any] = {"window_size": package_window(case, -1)}
    if case.alibi:
        if not case.causal:
            raise Unserved("its ALiBi is symmetric without a causal mask")
        options["alibi_slopes"] = torch.as_tensor(case.slopes(), dtype=torch.float32, device="cuda")
    return make_packaged(importlib.import_module("flash_attn").flash_attn_func, case, arrays, **options)


def make_fa4(case: Case, arrays: Arrays) -> Runner:
    """FlashAttention-4, of the package flash-attn-4."""
    refuse(case, "alibi")
    module = importlib.import_module("flash_attn.cute")
    return make_packaged(module.flash_attn_func, case, arrays, window_size=package_window(case, None))


def make_packaged(function: Callable[..., Any], case: Case, arrays: Arrays, **options: Any) -> Runner:
    """The `flash_attn_func` of a package."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        result = function(q, k, v, causal=case.causal, softcap=case.softcap or 0.0, **options)
        return result[0] if isinstance(result, tuple) else result

    return run_torch(attend, case, arrays, "bnhd")


def package_window(case: Case, unbounded: int | None) -> tuple[int | None, int | None]:
    """A window as these packages take it."""
    left, right = case.window or (None, None)
    return unbounded if left is None else left, unbounded if right is None else right


# ---- JAX and CuPy ----


def make_jax(case: Case, arrays: Arrays) -> Runner:
    """`jax.nn.dot_product_attention`, by cuDNN for 16-bit arrays."""
    refuse(case, "softcap", "alibi")
    q, k, v, *dout = arrays.jax()
    import jax

    options: dict[str, Any] = {"is_causal": case.causal}
    options["implementation"] = "cudnn" if ITEM_BYTES[case.dtype] == 2 else "xla"
    if case.window:
        options["local_window_size"] = case.reach()
    if options["implementation"] == "xla":
        require_memory((6 if case.backward else 3) * case.score_bytes(ITEM_BYTES[case.dtype]))
    compiled = jax.jit(functools.partial(jax.nn.dot_product_attention, **options))
    if not case.backward:
        return Runner(lambda: compiled(q, k, v).block_until_ready(), "bnhd", on_host=True)
    _, pull_back = jax.vjp(compiled, q, k, v)
    pull = jax.jit(lambda function, cotangent: function(cotangent))
    return Runner(lambda: jax.block_until_ready(pull(pull_back, *dout)), "bnhd", on_host=True)


def make_cupy(case: Case, arrays: Arrays) -> Runner:
    """The plain formula, as one writes it in CuPy without a fused kernel."""
    import cupy

    refuse(case, "window", "softcap", "alibi", "backward")
    require_memory(4 * case.score_bytes(ITEM_BYTES[case.dtype]))
    q, k, v = arrays.cupy if case.layout == "bhnd" else [x.swapaxes(1, 2) for x in arrays.cupy]
    group = case.heads // case.kv_heads

    def forward() -> Any:
        keys, values = (k, v) if group == 1 else (k.repeat(group, axis=1), v.repeat(group, axis=1))
        s = q @ keys.swapaxes(-1, -2)
        s *= s.dtype.type(case.d**-0.5)
        if case.causal:
            s = cupy.where(cupy.tri(case.n, dtype=bool), s, s.dtype.type(-np.inf))
        p = cupy.exp(s - s.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        return p @ values

    return Runner(forward, "bhnd")


# ---- what they share ----


def refuse(case: Case, *features: str) -> None:
    """Raise where a case has a feature that an implementation does not have, or not as one option of its call."""
    names = {"alibi": "ALiBi", "backward": "gradients"}
    lacking = [names.get(feature, feature) for feature in features if getattr(case, feature)]
    if lacking:
        raise Unserved(f"has no option for {' and '.join(lacking)}")


def require_memory(size: int) -> None:
    """Raise where the GPU has not `size` bytes left."""
    import cupy

    free, _ = cupy.cuda.runtime.memGetInfo()
    if size > free:
        raise Unserved(
            f"needs {size / 2**30:.0f} GiB for its matrices of scores, and the GPU has {free / 2**30:.0f} left"
        )


def import_first(*names: str) -> Any:
    """The first module of `names` that is there."""
    for name in names[:-1]:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    return importlib.import_module(names[-1])


CUFLASH = Peer("cuflash", "cuflash", make_cuflash)
PEERS = (
    Peer("cudnn", "cuDNN", functools.partial(make_sdpa, "CUDNN_ATTENTION")),
    Peer("fa2", "FA2 (PyTorch)", functools.partial(make_sdpa, "FLASH_ATTENTION")),
    Peer("efficient", "efficient (PyTorch)", functools.partial(make_sdpa, "EFFICIENT_ATTENTION")),
    Peer("math", "math (PyTorch)", functools.partial(make_sdpa, "MATH")),
    Peer("flex", "FlexAttention", make_flex),
    Peer("fa3", "FA3", make_fa3),
    Peer("fa4", "FA4", make_fa4),
    Peer("flash-attn", "flash-attn 2", make_fa2),
    Peer("jax", "JAX", make_jax),
    Peer("cupy", "CuPy formula", make_cupy),
)
PACKAGES = (
    "cupy-cuda13x",
    "cupy-cuda12x",
    "torch",
    "triton",
    "flash-attn-3",
    "fa3-fwd",
    "flash-attn-4",
    "flash-attn",
    "jax",
)


def versions() -> dict[str, str]:
    """Versions of the packages behind the peers, as far as they are installed, and of PyTorch's cuDNN."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    with contextlib.suppress(ImportError):
        import torch

        if cudnn := torch.backends.cudnn.version():
            found["cudnn"] = str(cudnn)
    return found
