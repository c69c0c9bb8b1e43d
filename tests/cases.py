"""The problems that every implementation is tried on: the CPU path, the emulated kernels and the kernels on a GPU.

A `Case` is data: sizes, options, and names for how values are drawn (case_values.py) and how arrays lie in
memory (`VIEWS`). `make_arrays` turns it into arrays that know the block of memory they are a view of, so that the same
strides can be made on a device; `make_inputs` gives the NumPy views themselves. All are small enough for an emulator.
"""

import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from case_values import BIASES, MASKS, VALUES, Shape

FLOATS = ("float16", "bfloat16", "float32", "float64")
MOST_WORK = 20_000_000  # multiply-adds of a case: some hundredths of a second for a kernel that is emulated on one core


@dataclass(frozen=True)
class Case:
    """One call of attention.

    Attributes
    ----------
    n, d, heads : (int, int)
        (N_q, N_k), (D, D_v), (H_q, H_kv).
    batch, kv_batch : tuple of int
        Batch axes of q, and of k and v where they differ.
    rank : {2, 3, 4}
        2 for arrays without a head axis, which needs batch () and one head; otherwise batch decides.
    options : mapping
        The scalar options of the call: scale, causal, window, softcap, layout.
    mask, bias : str or None
        Which of the axes "bhqk" (the last len(mask) of them) are not broadcast: "--q-" is the shape (1, 1, N_q, 1).
    mask_kind, bias_kind, values : str
        Names in MASKS, BIASES, VALUES.
    bias_dtype : str or None
        None for the dtype of q.
    q_lengths, kv_lengths : tuple of int or None
        One for each batch entry, or one for all. What lies beyond them is poisoned.
    views : mapping
        For an argument the name of its view in VIEWS, "plain" where it is absent.
    """

    id: str
    n: tuple[int, int] = (65, 65)
    d: tuple[int, int] = (64, 64)
    heads: tuple[int, int] = (2, 2)
    batch: Shape = (1,)
    kv_batch: Shape | None = None
    rank: int = 4
    dtype: str = "float16"
    options: Mapping[str, Any] = field(default_factory=dict)
    mask: str | None = None
    mask_kind: str = "random"
    bias: str | None = None
    bias_kind: str = "normal"
    bias_dtype: str | None = None
    q_lengths: tuple[int, ...] | None = None
    kv_lengths: tuple[int, ...] | None = None
    lengths_dtype: str = "int32"
    values: str = "normal"
    views: Mapping[str, str] = field(default_factory=dict)

    @property
    def work(self) -> int:
        """Multiply-adds of the plain formula."""
        return int(np.prod(self.all_batch, initial=1)) * self.heads[0] * self.n[0] * self.n[1] * sum(self.d)

    @property
    def all_batch(self) -> Shape:
        return np.broadcast_shapes(self.batch, self.batch if self.kv_batch is None else self.kv_batch)


def sizes() -> Iterator[Case]:
    for n, dtype in zip((1, 2, 7, 13, 63, 64, 65, 127, 129, 257), itertools.cycle(FLOATS)):
        yield Case(f"n-{n}", n=(n, n), dtype=dtype)
        yield Case(f"n-{n}-causal", n=(n, n), dtype=dtype, options={"causal": True})
    for n, dtype in ((1000, "float32"), (1025, "float16")):
        yield Case(f"n-{n}-causal", n=(n, n), d=(8, 8), heads=(1, 1), dtype=dtype, options={"causal": True})
    for (n_q, n_k), dtype in zip(
        ((1, 257), (7, 64), (64, 7), (129, 65), (65, 200), (200, 65)), itertools.cycle(FLOATS)
    ):
        for causal in (False, True, "top-left"):
            name = {False: "full", True: "causal"}.get(causal, causal)
            yield Case(f"n-{n_q}x{n_k}-{name}", n=(n_q, n_k), d=(16, 16), dtype=dtype, options={"causal": causal})
    yield Case("no-keys", n=(5, 0))
    yield Case("no-queries", n=(0, 5))
    yield Case("no-batch", n=(5, 5), batch=(0,))
    yield Case("no-heads", n=(5, 5), heads=(0, 0))
    yield Case("no-value-features", n=(5, 5), d=(8, 0), dtype="float32")


def head_dims() -> Iterator[Case]:
    for d, dtype in zip((1, 8, 16, 40, 59, 64, 72, 80, 96, 111, 128, 160, 192, 256), itertools.cycle(FLOATS)):
        yield Case(f"d-{d}", n=(33, 47), d=(d, d), dtype=dtype)
        yield Case(f"d-{d}-16-bit", n=(33, 47), d=(d, d), dtype="bfloat16" if dtype == "float16" else "float16")
    for (d, d_v), dtype in zip(
        ((64, 32), (40, 128), (192, 128), (1, 256), (59, 111), (16, 7)), itertools.cycle(FLOATS)
    ):
        yield Case(f"d-{d}-to-{d_v}", n=(47, 33), d=(d, d_v), dtype=dtype, options={"causal": True})


def heads_and_batches() -> Iterator[Case]:
    for heads, dtype in zip(((3, 1), (6, 2), (8, 1), (16, 2), (16, 1), (5, 5)), itertools.cycle(FLOATS)):
        yield Case(
            f"heads-{heads[0]}-over-{heads[1]}",
            n=(33, 40), d=(16, 16), heads=heads, batch=(2,), dtype=dtype, options={"causal": True},
        )  # fmt: skip
    yield Case("rank-2", n=(33, 40), batch=(), heads=(1, 1), rank=2, dtype="float32")
    yield Case("rank-2-bnhd", n=(33, 40), batch=(), heads=(1, 1), rank=2, options={"layout": "bnhd"})
    yield Case("rank-3", n=(33, 40), batch=(), heads=(4, 2))
    yield Case("rank-3-bnhd", n=(33, 40), batch=(), heads=(4, 2), dtype="bfloat16", options={"layout": "bnhd"})
    yield Case("rank-4-bnhd", n=(33, 40), batch=(2,), heads=(4, 2), dtype="float32", options={"layout": "bnhd"})
    yield Case("rank-5", n=(13, 20), batch=(2, 3), heads=(4, 2), dtype="float32", options={"causal": True})
    yield Case("one-key-set-for-all-batches", n=(13, 20), batch=(3,), kv_batch=(1,))
    yield Case("one-query-set-for-all-batches", n=(13, 20), batch=(1,), kv_batch=(3,), dtype="float32")
    yield Case("batches-broadcast-both-ways", n=(13, 20), batch=(2, 1), kv_batch=(3,), heads=(2, 1), dtype="bfloat16")
    for dtype in "float16", "float32":
        yield Case(f"batch-axes-apart-{dtype}", n=(13, 20), batch=(3, 2), kv_batch=(1, 2), dtype=dtype)
    yield Case("many-tiny-problems", n=(1, 1), d=(8, 8), batch=(300,), heads=(1, 1), dtype="float32")


def windows() -> Iterator[Case]:
    sized = {"n": (65, 65), "d": (16, 16)}
    for window in ((0, 0), (3, None), (None, 2), (16, 3), (31, 32), (200, 300), (0, 64), (64, 0)):
        name = "-".join("all" if bound is None else str(bound) for bound in window)
        for causal, dtype in ((False, "float16"), (True, "float32"), ("top-left", "bfloat16")):
            where = {False: "", True: "-causal"}.get(causal, f"-{causal}")
            yield Case(f"window-{name}{where}", **sized, dtype=dtype, options={"window": window, "causal": causal})
    for n in ((30, 130), (130, 30)):
        yield Case(f"window-n-{n[0]}x{n[1]}", n=n, d=(16, 16), dtype="float32", options={"window": (9, 4)})
        yield Case(f"window-n-{n[0]}x{n[1]}-causal", n=n, d=(16, 16), options={"window": (9, 4), "causal": True})
    yield Case("window-long", n=(257, 257), d=(16, 16), heads=(1, 1), dtype="float32", options={"window": (20, 0)})


def masks_and_biases() -> Iterator[Case]:
    small = {"n": (33, 13), "d": (16, 16), "batch": (2,)}
    patterns = ["".join(p) for p in itertools.product("b-", "h-", "q-", "k-")]
    for pattern, dtype, n_k in zip(patterns, itertools.cycle(FLOATS), itertools.cycle((13, 7, 64, 65, 40))):
        yield Case(f"mask-{pattern}", **small | {"n": (33, n_k)}, dtype=dtype, mask=pattern)
        yield Case(f"bias-{pattern}", **small | {"n": (33, n_k)}, dtype=dtype, bias=pattern)
        yield Case(f"bias-float32-{pattern}", **small | {"n": (33, n_k)}, bias=pattern, bias_dtype="float32")
    for pattern in ("qk", "-k", "hqk", "k"):
        yield Case(f"mask-of-rank-{len(pattern)}-{pattern}", **small, mask=pattern, bias=pattern, dtype="float32")
    for kind in MASKS:
        yield Case(f"mask-{kind}", n=(65, 130), d=(16, 16), mask="bhqk", mask_kind=kind, dtype="float32")
        yield Case(
            f"mask-{kind}-causal", n=(65, 130), d=(16, 16), mask="--qk", mask_kind=kind, options={"causal": True}
        )
    for kind in BIASES:
        values = "zero-queries" if kind == "large" else "normal"
        sized = {"n": (65, 130), "d": (16, 16), "values": values, "bias_kind": kind}
        yield Case(f"bias-{kind}", **sized, bias="bhqk", dtype="float32")
        yield Case(f"bias-{kind}-causal", **sized, bias="-hqk", options={"causal": True})
    for view in VIEWS:
        views = {"mask": view, "bias": view}
        yield Case(f"mask-and-bias-{view}", **small, mask="bhqk", bias="bhqk", views=views, dtype="bfloat16")
    yield Case(
        "mask-of-one-head-of-a-group", **small | {"heads": (4, 2)}, mask="-hqk", bias="-h--", bias_dtype="float32"
    )


def lengths() -> Iterator[Case]:
    three = {"n": (65, 90), "d": (16, 16), "batch": (3,)}
    some = {"kv_lengths": (90, 33, 1), "q_lengths": (1, 65, 40)}
    for dtype in FLOATS:
        yield Case(f"kv-lengths-{dtype}", **three, dtype=dtype, kv_lengths=(90, 33, 1))
        yield Case(f"both-lengths-causal-{dtype}", **three, **some, dtype=dtype, options={"causal": True})
    yield Case("q-lengths", **three, dtype="float32", q_lengths=(0, 64, 65))
    yield Case("lengths-int64", **three, **some, lengths_dtype="int64")
    yield Case(
        "lengths-beyond-the-arrays", **three, kv_lengths=(1000, -3, 90), q_lengths=(-1, 1000, 65), dtype="float32"
    )
    yield Case("lengths-one-for-all", **three, kv_lengths=(40,), q_lengths=(50,), options={"causal": True})
    yield Case("lengths-top-left", **three, **some, options={"causal": "top-left"}, dtype="float32")
    yield Case("lengths-window", **three, **some, options={"window": (7, 5)}, dtype="float32")
    yield Case("lengths-window-bnhd", **three, **some, options={"window": (7, 5), "layout": "bnhd"}, heads=(4, 2))
    yield Case("lengths-mask-bias", **three, **some, mask="bhqk", bias="---k", dtype="bfloat16")
    yield Case("lengths-of-zero", **three, kv_lengths=(0, 0, 0), dtype="float32")
    yield Case("lengths-rank-3", n=(33, 40), batch=(), heads=(4, 2), q_lengths=(20,), kv_lengths=(30,), dtype="float32")
    yield Case("lengths-strided", **three, **some, views={"q_lengths": "every-second-column", "kv_lengths": "reversed"})
    for values, dtype in itertools.product(("infinite-key", "nan-query"), ("float16", "float64")):
        some = {"kv_lengths": (90, 33, 50), "q_lengths": (1, 65, 40)}
        yield Case(f"lengths-{values}-{dtype}", **three, **some, values=values, dtype=dtype)
    yield Case("lengths-batch-of-keys-broadcast", **three, kv_batch=(1,), kv_lengths=(90, 33, 1), dtype="float32")


def value_kinds() -> Iterator[Case]:
    for kind, dtype in itertools.product(VALUES, FLOATS):
        options: dict[str, Any] = {}
        if kind in ("exact-hot", "large-products"):
            options["scale"] = {"exact-hot": 1.0, "large-products": 1 / 28800}[kind]
        yield Case(f"{kind}-{dtype}", n=(65, 130), heads=(2, 1), dtype=dtype, values=kind, options=options)
        yield Case(
            f"{kind}-{dtype}-causal",
            n=(130, 130), heads=(1, 1), dtype=dtype, values=kind, options=options | {"causal": True},
        )  # fmt: skip
    for dtype in FLOATS:
        yield Case(f"ramp-long-{dtype}", n=(33, 600), d=(16, 16), heads=(1, 1), dtype=dtype, values="ramp")


def scales_and_softcaps() -> Iterator[Case]:
    for scale, dtype in itertools.product((0.0, -0.3, 1.0, 2.0, 0.1, -1e-50), ("float16", "float32", "float64")):
        yield Case(f"scale-{scale}-{dtype}", d=(16, 16), dtype=dtype, options={"scale": scale, "causal": True})
    for scale in (1024.0, -1024.0):
        yield Case(f"scale-{scale}-hot", dtype="float32", values="exact-hot", options={"scale": scale})
    for softcap, dtype in itertools.product((0.5, 30.0), FLOATS):
        yield Case(f"softcap-{softcap}-{dtype}", dtype=dtype, options={"softcap": softcap, "causal": True})
    yield Case("softcap-hot", dtype="float32", values="exact-hot", options={"softcap": 20.0, "scale": 1.0})
    yield Case("softcap-infinite-score", dtype="float32", values="infinite-key", options={"softcap": 20.0})
    yield Case(
        "everything",
        n=(70, 90), d=(40, 24), heads=(4, 2), batch=(2,), mask="b-qk", bias="-h-k", bias_dtype="float32",
        q_lengths=(70, 31), kv_lengths=(57, 90),
        options={"softcap": 5.0, "window": (40, 20), "scale": 0.3, "layout": "bnhd"},
        views={"q": "column-slice", "k": "rows-reversed", "v": "odd-offset", "mask": "every-second-row"},
    )  # fmt: skip


def strides() -> Iterator[Case]:
    sized = {"n": (64, 40), "d": (24, 24), "batch": (2,), "heads": (4, 2)}
    for view, dtype in itertools.product(VIEWS, ("float16", "float32")):
        views = dict.fromkeys("qkv", view)
        # Features that are all the same make large scores, which is not the question here.
        options = {"causal": True} | ({"scale": 0.02} if view == "broadcast-columns" else {})
        yield Case(f"all-{view}-{dtype}", **sized, dtype=dtype, views=views, options=options)
    for view, name in itertools.product(VIEWS, "qkv"):
        yield Case(f"{name}-{view}", **sized, dtype="bfloat16", views={name: view}, options={"layout": "bnhd"})
    one = {"n": (1, 1), "batch": (1,), "heads": (1, 1), "views": dict.fromkeys("qkv", "size-one-axes")}
    yield Case("size-one-axes-everywhere", **one, d=(1, 1), dtype="float32")
    yield Case("size-one-axes-but-features", **one, d=(24, 24))
    yield Case(
        "broadcast-keys-of-all-batches-and-heads", **sized, views={"k": "broadcast-batch", "v": "broadcast-heads"}
    )


def saturated_softcaps() -> Iterator[Case]:
    """tanh is almost ±1 for every key, and its derivative next to nothing."""
    for dtype, values in zip(FLOATS, itertools.cycle(("falling", "ramp"))):
        yield Case(
            f"softcap-saturated-{dtype}",
            n=(33, 40), d=(16, 16), dtype=dtype, values=values, mask="--qk", mask_kind="late-keys",
            options={"softcap": 4.0},
        )  # fmt: skip


@dataclass(frozen=True)
class View:
    """How an array lies in a larger block of memory.

    `drawn` tells which shape of values is drawn for an array of a shape (less, where it is broadcast), `base` the shape
    of the block that they lie in, and `take` gets them out of it, for any array library.
    """

    base: Callable[[Shape], Shape] = lambda shape: shape
    take: Callable[[Any, Shape], Any] = lambda base, shape: base
    drawn: Callable[[Shape], Shape] = lambda shape: shape


def swapped(shape: Shape, a: int, b: int) -> Shape:
    """The shape with two axes swapped; as it is where it has too few."""
    axes = list(shape)
    if len(axes) >= -min(a, b):
        axes[a], axes[b] = axes[b], axes[a]
    return tuple(axes)


def swap(x: Any, a: int, b: int) -> Any:
    return x.swapaxes(a, b) if x.ndim >= -min(a, b) else x


BACKWARDS = slice(None, None, -1)
# The names of axes are those of (batch, head, row, column), for an array in another layout too.
VIEWS = {
    "plain": View(),
    "transposed": View(lambda s: swapped(s, -3, -2), lambda x, s: swap(x, -3, -2)),
    "features-first": View(lambda s: swapped(s, -2, -1), lambda x, s: swap(x, -2, -1)),
    "every-second-row": View(lambda s: (*s[:-2], 2 * s[-2] + 1, s[-1]), lambda x, s: x[..., 1::2, :]),
    "every-second-column": View(lambda s: (*s[:-1], 2 * s[-1]), lambda x, s: x[..., ::2]),
    "column-slice": View(lambda s: (*s[:-1], s[-1] + 5), lambda x, s: x[..., 3:-2]),
    "middle-of-three": View(lambda s: (*s[:-1], 3 * s[-1]), lambda x, s: x[..., s[-1] : 2 * s[-1]]),
    "rows-reversed": View(take=lambda x, s: x[..., BACKWARDS, :]),
    "columns-reversed": View(take=lambda x, s: x[..., BACKWARDS]),
    "reversed": View(take=lambda x, s: x[(BACKWARDS,) * x.ndim]),
    "odd-offset": View(lambda s: (int(np.prod(s)) + 1,), lambda x, s: x[1:].reshape(s)),
    "size-one-axes": View(
        lambda s: tuple(3 if n == 1 else n for n in s),
        lambda x, s: x[tuple(slice(1, 0, -1) if n == 1 else slice(None) for n in s)],
    ),
    "broadcast-batch": View(drawn=lambda s: (*(1 for _ in s[:-3]), *s[-3:])),
    "broadcast-heads": View(drawn=lambda s: (*s[:-3], *(1 for _ in s[-3:-2]), *s[-2:])),
    "broadcast-rows": View(drawn=lambda s: (*s[:-2], 1, s[-1])),
    "broadcast-columns": View(drawn=lambda s: (*s[:-1], 1)),
}


@dataclass(frozen=True)
class Array:
    """An array as a view of `base`; everything in `base` outside of it is poison."""

    base: Any
    drawn: Shape
    shape: Shape
    view: str

    def of(self, base: Any) -> Any:
        """The same view of `base`, which may be the copy of another array library."""
        taken = VIEWS[self.view].take(base, self.drawn)
        return taken if self.drawn == self.shape else np.broadcast_to(taken, self.shape)


def lay_out(shape: Shape, view: str, dtype: Any, draw: Callable[[Shape], Any]) -> Array:
    """An array of `shape` in the memory layout `view`, with the values that `draw` gives for a shape."""
    drawn = VIEWS[view].drawn(shape)
    poison = {"f": np.nan, "V": np.nan, "i": 1 << 20, "b": True}[np.dtype(dtype).kind]
    base = np.full(VIEWS[view].base(drawn), poison, dtype)
    VIEWS[view].take(base, drawn)[...] = draw(drawn)
    return Array(base, drawn, shape, view)


def present(case: Case, shape: Shape) -> Shape:
    """(*batch, head, row, column) in the layout of the case, and back."""
    if case.rank == 2:
        return shape[-2:]
    return swapped(shape, -3, -2) if case.options.get("layout") == "bnhd" else shape


def make_arrays(case: Case) -> dict[str, Array]:
    """The array arguments of the call, the same ones each time."""
    rng = np.random.default_rng(zlib.crc32(case.id.encode()))
    dtype = np.dtype(case.dtype)
    kv_batch = case.batch if case.kv_batch is None else case.kv_batch
    bnhd = case.options.get("layout") == "bnhd" and case.rank > 2
    result = {}
    for name, batch, head, row, column in (
        ("q", case.batch, case.heads[0], case.n[0], case.d[0]),
        ("k", kv_batch, case.heads[1], case.n[1], case.d[0]),
        ("v", kv_batch, case.heads[1], case.n[1], case.d[1]),
    ):
        limit = case.q_lengths if name == "q" else case.kv_lengths

        def draw(shape: Shape, name: str = name, limit: Any = limit, rows: int = row) -> Any:
            # Values are drawn with axes (..., row, column) and turned into the layout of the case.
            values = VALUES[case.values](rng, name, swapped(shape, -3, -2) if bnhd else shape, dtype)
            if limit is not None:
                poison_tails(values, limit, rows)
            with np.errstate(all="ignore"):
                return (values.swapaxes(-3, -2) if bnhd else values).astype(dtype)

        shape = present(case, (*batch, head, row, column))
        result[name] = lay_out(shape, case.views.get(name, "plain"), dtype, draw)

    scores = dict(zip("bhqk", (case.all_batch[-1] if case.all_batch else 1, case.heads[0], *case.n), strict=True))
    for name, pattern, kinds, kind, kind_dtype in (
        ("mask", case.mask, MASKS, case.mask_kind, np.dtype(bool)),
        ("bias", case.bias, BIASES, case.bias_kind, np.dtype(case.bias_dtype or dtype)),
    ):
        if pattern is not None:
            shape = tuple(scores.get(axis, 1) for axis in pattern)
            result[name] = lay_out(shape, case.views.get(name, "plain"), kind_dtype, lambda s, f=kinds[kind]: f(rng, s))
    for name, given in (("q_lengths", case.q_lengths), ("kv_lengths", case.kv_lengths)):
        if given is not None:
            view = case.views.get(name, "plain")
            result[name] = lay_out((len(given),), view, case.lengths_dtype, lambda s, given=given: given)
    return result


def make_inputs(case: Case) -> dict[str, Any]:
    """The array arguments of the call as NumPy views."""
    return {name: array.of(array.base) for name, array in make_arrays(case).items()}


def poison_tails(values: Any, limits: tuple[int, ...], rows: int) -> None:
    """Put NaN and infinities in the rows of each batch entry that its length excludes, where it has rows of its own."""
    if values.shape[-2] != rows:
        return
    entries = values.reshape(-1, *values.shape[-3:]) if values.ndim > 3 else values[None]
    own = len(limits) == len(entries)
    for index, entry in enumerate(entries):
        limit = limits[index] if own else max(limits)
        entry[..., max(limit, 0) :: 2, :] = np.nan
        entry[..., max(limit, 0) + 1 :: 2, :] = np.inf


def random_case(seed: int) -> Case:
    """A small problem with every property drawn at random."""
    rng = np.random.default_rng(seed)
    while (case := draw_case(f"random-{seed}", rng)).work > MOST_WORK:
        pass
    return case


def draw_case(name: str, rng: np.random.Generator) -> Case:
    def pick(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    def pattern() -> str | None:
        axes = "bhqk"[-len(batch) - 3 :]
        return "".join(axis if rng.random() < 0.6 else "-" for axis in axes) if rng.random() < 0.3 else None

    def lengths(extent: int) -> tuple[int, ...] | None:
        if rng.random() < 0.75:
            return None
        return tuple(int(x) for x in rng.integers(-1, extent + 3, size=batch[0] if batch else 1))

    h_kv = int(rng.integers(1, 4))
    batch = pick((), (1,), (2,), (3,))
    n_q, n_k = (int(pick(rng.integers(1, 20), rng.integers(20, 150))) for _ in "qk")
    d = int(pick(rng.integers(1, 129), pick(16, 32, 64, 128)))
    values = pick("normal", "normal", "normal", "exact-hot", "ramp", "falling", "dominant", "equal-keys")
    options: dict[str, Any] = {"causal": pick(False, True, "top-left"), "layout": pick("bhnd", "bnhd")}
    if rng.random() < 0.4:
        options["window"] = tuple(pick(None, int(rng.integers(0, 80))) for _ in "lr")
    if values == "exact-hot":
        options["scale"] = pick(1.0, -0.25, 0.5)
    elif rng.random() < 0.3:
        options["scale"] = pick(0.0, -0.3, 0.2, 1.0)
    if rng.random() < 0.2:
        options["softcap"] = pick(0.7, 5.0, 50.0)
    return Case(
        name,
        n=(n_q, n_k), d=(d, pick(d, int(rng.integers(1, 129)))), heads=(h_kv * int(rng.integers(1, 4)), h_kv),
        batch=batch, dtype=pick(*FLOATS), options=options, values=values,
        mask=pattern(), mask_kind=pick("random", "random", "dead-rows", "late-keys", "early-keys"),
        bias=pattern(), bias_kind=pick("normal", "normal", "dead-columns"), bias_dtype=pick(None, "float32"),
        q_lengths=lengths(n_q), kv_lengths=lengths(n_k), lengths_dtype=pick("int32", "int64"),
        views={argument: pick(*VIEWS) for argument in ("q", "mask", "bias")}
        | {argument: pick(*(view for view in VIEWS if view != "broadcast-columns")) for argument in "kv"},
    )  # fmt: skip


CASES = [
    case
    for family in (
        *(sizes, head_dims, heads_and_batches, windows, masks_and_biases),
        *(lengths, value_kinds, scales_and_softcaps, strides, saturated_softcaps),
    )
    for case in family()
]
