"""What to tune: a workload is the shapes and options of one call, and stands for the calls of its size bucket."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cuflash.backward_problem import BackwardProblem, read_backward_problem
from cuflash.problem import DTYPES, ITEM_BYTES, Operand, Problem, Spec, contiguous_strides, read_problem
from cuflash.timing import BACKWARD_WORK
from cuflash.winner import BACKWARD, FORWARD

SOFTCAP = 30.0
DIAGONALS = (None, "bottom-right", "top-left")
UNALIGNED = 1  # elements by which the arrays of an unaligned workload start late


class Workload(NamedTuple):
    """The shapes and options of one call. Pairs are of queries and keys: (H_q, H_kv), (N_q, N_k), (D, D_v).

    `backward` is of the call that computes the gradients, `bias_of_keys` of a bias that is the same for all rows.

    Examples
    --------
    >>> from cuflash.tuning import Workload
    >>> print(Workload("bfloat16", 4, (32, 8), (4096, 4096), (128, 128), causal="bottom-right"))
    bfloat16 4x32/8x4096x128 causal
    """

    dtype: str
    batch: int
    heads: tuple[int, int]
    seqlen: tuple[int, int]
    head_dim: tuple[int, int]
    causal: str | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: bool = False
    mask: bool = False
    bias: str | None = None
    q_lengths: bool = False
    kv_lengths: bool = False
    aligned: bool = True
    backward: bool = False
    bias_of_keys: bool = False

    def __str__(self) -> str:
        def pair(both: tuple[int, int]) -> str:
            return str(both[0]) if both[0] == both[1] else f"{both[0]}/{both[1]}"

        words = [self.dtype, "x".join([str(self.batch), pair(self.heads), pair(self.seqlen), pair(self.head_dim)])]
        if self.causal:
            words.append("causal" if self.causal == "bottom-right" else self.causal)
        if self.window:
            words.append("window {},{}".format(*("none" if side is None else side for side in self.window)))
        words += [name for name in ("softcap", "mask", "q_lengths", "kv_lengths") if getattr(self, name)]
        words += [f"bias {self.bias}{' of keys' if self.bias_of_keys else ''}"] if self.bias else []
        words += [] if self.aligned else ["unaligned"]
        words += ["backward"] if self.backward else []
        return " ".join(words)

    @property
    def operation(self) -> str:
        """As `cuflash.winner` names it."""
        return BACKWARD if self.backward else FORWARD

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every array that is given; mask and bias are one for all heads and batch entries."""
        (h_q, h_kv), (n_q, n_k), (d, d_v) = self.heads, self.seqlen, self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "q": (self.batch, h_q, n_q, d),
            "k": (self.batch, h_kv, n_k, d),
            "v": (self.batch, h_kv, n_k, d_v),
        }
        if self.mask:
            shapes["mask"] = (n_q, n_k)
        if self.bias:
            shapes["bias"] = (1 if self.bias_of_keys else n_q, n_k)
        if self.q_lengths:
            shapes["q_lengths"] = (self.batch,)
        if self.kv_lengths:
            shapes["kv_lengths"] = (self.batch,)
        if self.backward:
            shapes["dout"] = (self.batch, h_q, n_q, d_v)
        return shapes

    def dtypes(self) -> dict[str, str]:
        """The dtype of each."""
        own = {"mask": "bool", "bias": self.bias or "", "q_lengths": "int32", "kv_lengths": "int32"}
        return {name: own.get(name, self.dtype) for name in self.shapes()}

    def options(self) -> dict[str, Any]:
        """The keywords of the call that are not arrays."""
        return {
            "causal": self.causal or False,
            "window": self.window,
            "softcap": SOFTCAP if self.softcap else None,
        }

    def problem(self) -> Problem | BackwardProblem:
        """The call as the planner sees it.

        Raises
        ------
        TypeError, ValueError
            When no call can have these shapes and options.
        """
        shapes, dtypes = self.shapes(), self.dtypes()
        alignment = 16 if self.aligned else ITEM_BYTES.get(self.dtype, 1)
        operands = {
            name: Operand(name, shape, contiguous_strides(shape), dtypes[name], alignment)
            for name, shape in shapes.items()
        }
        if not self.backward:
            return read_problem(**operands, **self.options())
        rows = shapes["dout"][:-1]
        operands["out"] = operands["dout"]._replace(name="out")
        operands["lse"] = Operand("lse", rows, contiguous_strides(rows), Spec(self.dtype, 16, 16).lse_dtype)
        given: dict[str, Any] = {**operands, **self.options()}
        return read_backward_problem(**given)

    def flops(self) -> float:
        """Operations as the papers count them: a causal mask halves them, the gradients take 2.5 times as many."""
        share = (0.5 if self.causal else 1.0) * (BACKWARD_WORK if self.backward else 1.0)
        return 2.0 * self.batch * self.heads[0] * self.seqlen[0] * self.seqlen[1] * sum(self.head_dim) * share

    def ragged(self) -> Workload:
        """A small workload of the same kernel whose lengths are no multiple of a tile: what is checked."""
        n_q, n_k = (min(n, small) for n, small in zip(self.seqlen, RAGGED, strict=True))
        group = self.heads[0] // max(self.heads[1], 1)
        left, right = self.window or (None, None)
        window = self.window and (left and min(left, 70), right and min(right, 70))
        kv_heads = min(self.heads[1], 2)
        return self._replace(batch=2, heads=(kv_heads * group, kv_heads), seqlen=(n_q, n_k), window=window)

    def as_json(self) -> list[Any]:
        """Its fields, for JSON."""
        return list(self)

    @staticmethod
    def from_json(fields: Sequence[Any]) -> Workload:
        """The workload that `as_json` made these of."""
        values: list[Any] = [tuple(field) if isinstance(field, list) else field for field in fields]
        return Workload(*values)


RAGGED = (333, 467)
TOKENS = 16384  # in a batch, whatever its sequence length


def _batch(n: int) -> int:
    return max(1, TOKENS // n)


def _llm() -> Iterator[Workload]:
    """Prefill of language models: causal, grouped heads too; and decoding, one row a sequence."""
    for heads, d in (((32, 8), 128), ((16, 16), 128), ((32, 32), 64), ((16, 8), 256)):
        for n in (1024, 4096, 16384):
            yield Workload("bfloat16", _batch(n), heads, (n, n), (d, d), "bottom-right")
    for heads, d in (((32, 8), 128), ((32, 32), 64)):
        for n in (2048, 8192):
            yield Workload("float16", _batch(n), heads, (n, n), (d, d), "bottom-right")
    for heads, d in (((32, 8), 128), ((16, 8), 256)):
        for n in (4096, 16384):
            yield Workload("bfloat16", 16, heads, (1, n), (d, d))


def _vit() -> Iterator[Workload]:
    """Encoders of images: every patch sees every other, and lengths are odd."""
    for dtype in ("float16", "bfloat16"):
        for heads, n, d in ((12, 197, 64), (16, 577, 64), (16, 1025, 80), (16, 256, 72), (16, 4096, 72)):
            yield Workload(dtype, max(1, 8 * TOKENS // (heads * n)), (heads, heads), (n, n), (d, d))


def _long() -> Iterator[Workload]:
    """Long sequences, also with a sliding window."""
    for n in (32768, 131072):
        yield Workload("bfloat16", 1, (32, 8), (n, n), (128, 128), "bottom-right")
        yield Workload("bfloat16", 1, (8, 8), (n, n), (64, 64))
        yield Workload("bfloat16", 1, (32, 8), (n, n), (128, 128), "bottom-right", window=(4095, 0))


def _papers() -> Iterator[Workload]:
    """What papers and `cuflash bench` compare: as many heads as 2048 columns make, full and causal."""
    for d, n, causal in itertools.product((64, 128, 256), (1024, 4096, 16384), (None, "bottom-right")):
        yield Workload("bfloat16", _batch(n), (2048 // d, 2048 // d), (n, n), (d, d), causal)


PRESETS: dict[str, Callable[[], Iterator[Workload]]] = {"llm": _llm, "vit": _vit, "long": _long, "papers": _papers}


def preset(name: str) -> list[Workload]:
    """The workloads of ``"llm"``, ``"vit"``, ``"long"``, ``"papers"`` or ``"all"``.

    Examples
    --------
    >>> from cuflash.tuning import preset
    >>> len(preset("llm"))
    20
    """
    if name == "all":
        return list(dict.fromkeys(itertools.chain.from_iterable(make() for make in PRESETS.values())))
    if name not in PRESETS:
        raise ValueError(f"the preset must be one of {', '.join(PRESETS)} or all, got {name!r}")
    return list(PRESETS[name]())


def with_gradients(workloads: Sequence[Workload]) -> list[Workload]:
    """`workloads`, and the gradients of those that have any: decoding has none.

    Examples
    --------
    >>> from cuflash.tuning import preset, with_gradients
    >>> len(with_gradients(preset("llm")))
    36
    """
    return [*workloads, *(workload._replace(backward=True) for workload in workloads if workload.seqlen[0] > 1)]


def like(paths: Sequence[Path], dtype: str | None = None, **options: Any) -> Workload:
    """The workload of q, k and v in three .npy files, of which only the headers are read.

    bfloat16, which the format does not know, comes as uint16 or 2-byte void and needs `dtype`.

    Raises
    ------
    TypeError, ValueError
        When a file holds no array that can be attended to.
    """
    shapes: list[tuple[int, ...]] = []
    found = ""
    for path in paths:
        shape, own = _read_header(path)
        if own in ("uint16", "void16"):
            own = "bfloat16" if dtype == "bfloat16" else own
        elif dtype is not None:
            own = dtype
        if own not in DTYPES:
            raise TypeError(f"{path}: must hold one of {', '.join(DTYPES)}, got {own}")
        if shapes and own != found:
            raise TypeError(f"{path}: must have the dtype of the others, {found}, got {own}")
        if not 2 <= len(shape) <= 4:
            raise ValueError(f"{path}: must have 2 to 4 axes, got shape {shape}")
        found = own
        shapes.append((1,) * (4 - len(shape)) + shape)
    q, k, v = shapes
    batch = max(shape[0] for shape in shapes)
    if k[:3] != v[:3] or q[3] != k[3]:
        raise ValueError(f"q, k and v must be (..., H, N, D) of one call, got {q}, {k} and {v}")
    workload = Workload(found, batch, (q[1], k[1]), (q[2], k[2]), (q[3], v[3]), **options)
    workload.problem()
    return workload


def _read_header(path: Path) -> tuple[tuple[int, ...], str]:
    """Shape and dtype of the array in a .npy file."""
    with path.open("rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, _, dtype = read(file)
        except ValueError as error:
            raise ValueError(f"{path}: not a .npy file that can be read: {error}") from error
    return tuple(shape), dtype.name
