"""Seeded bugs: substitutions in the text of the kernels, and for each the problems of which one must find it out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cases import Case


@dataclass(frozen=True)
class Mutant:
    """One bug: in `file`, `old` becomes `new` at each of `times` places, and so do the pairs of `also` at one each."""

    id: str
    file: str
    old: str
    new: str
    problems: tuple[str, ...]
    times: int = 1
    also: tuple[tuple[str, str], ...] = ()

    def texts(self, originals: Mapping[str, str]) -> dict[str, str]:
        """The kernel files with the bug.

        Raises
        ------
        LookupError
            When the text is no longer what the bug was written for.
        """
        text = originals[self.file]
        for old, new, times in ((self.old, self.new, self.times), *((*pair, 1) for pair in self.also)):
            found = text.count(old)
            if found != times:
                raise LookupError(f"{self.id} must apply to {self.file} {times} times, found {found} of {old!r}")
            text = text.replace(old, new)
        return {**originals, self.file: text}


# Sizes that are no multiple of a tile, several tiles of rows and of keys, two heads to a key head, two batch entries.
SIZED: dict[str, Any] = {"n": (40, 70), "d": (24, 40), "heads": (4, 2), "batch": (2,), "dtype": "float32"}
PROBLEMS = {
    case.id: case
    for case in (
        Case("plain", **SIZED),
        Case("bnhd", **SIZED, options={"layout": "bnhd"}),
        Case("ramp", **SIZED, values="ramp"),
        Case("dominant", **SIZED, values="dominant"),
        Case("causal", **SIZED, options={"causal": True}),
        Case("top-left", **SIZED, options={"causal": "top-left"}),
        Case("window", **SIZED, options={"window": (9, 4)}),
        Case("lengths", **SIZED, q_lengths=(33, 40), kv_lengths=(70, 21), options={"causal": True}),
        Case("lengths-beyond", **SIZED, q_lengths=(99, -2), kv_lengths=(99, 5), lengths_dtype="int64"),
        Case("mask", **SIZED, mask="bhqk"),
        Case("late-mask", **SIZED, mask="bhqk", mask_kind="late-keys"),
        Case("mask-with-lengths", **SIZED, mask="bhqk", q_lengths=(33, 40)),
        Case("dead-rows", **SIZED, mask="bhqk", mask_kind="dead-rows"),
        Case("bias", **SIZED, bias="bhqk", options={"scale": 0.3}),
        Case("softcap", **SIZED, bias="bhqk", options={"softcap": 1.5}),
        Case("odd-head-dims", **SIZED | {"d": (23, 41)}),
        Case("head-dims", **SIZED | {"d": (40, 24)}),
    )
}

KERNEL, MASK, SCORES, SOFTMAX, TILE = "forward_simt.cu", "mask.cuh", "scores.cuh", "softmax.cuh", "tile.cuh"
MUTANTS = [
    # ---- barriers ----
    Mutant("no-barrier-after-loading-k", KERNEL, "    __syncthreads();\n    Real s[", "    Real s[", ("plain",)),
    Mutant(
        "no-barrier-after-reading-k", KERNEL, "    __syncthreads();  // every warp is done with K\n", "", ("plain",)
    ),
    Mutant(
        "no-barrier-after-loading-v", KERNEL, "    __syncthreads();\n    multiply_add", "    multiply_add", ("plain",)
    ),
    Mutant(
        "no-barrier-after-reading-v", KERNEL, "    __syncthreads();  // every warp is done with V\n", "", ("plain",)
    ),
    Mutant(
        "barrier-for-half-of-the-threads",
        *(KERNEL, "    __syncthreads();  // every warp is done with K\n"),
        *("    if (threadIdx.x < kThreads / 2) __syncthreads();\n", ("plain",)),
    ),
    # ---- which keys a row sees ----
    Mutant("right-bound-one-too-far", MASK, "row + delta + right + 1)", "row + delta + right + 2)", ("causal",)),
    Mutant("right-bound-one-short", MASK, "row + delta + right + 1)", "row + delta + right)", ("causal",)),
    Mutant("left-bound-one-too-far", MASK, "row + delta - left)", "row + delta - left - 1)", ("window",)),
    Mutant("left-bound-one-short", MASK, "row + delta - left)", "row + delta - left + 1)", ("window",)),
    Mutant("key-beyond-the-length", MASK, " : key_length; }", " : key_length + 1; }", ("plain",)),
    Mutant("diagonal-of-the-arrays", MASK, "see.key_length - see.query_length : 0", "p.n_k - p.n_q : 0", ("lengths",)),
    Mutant("diagonal-at-the-other-corner", MASK, "p.bottom_right ? ", "!p.bottom_right ? ", ("causal", "top-left")),
    Mutant("lengths-not-clamped", MASK, "min(max(length, 0LL), static_cast<i64>(n))", "length", ("lengths-beyond",)),
    Mutant("lengths-of-the-wrong-width", MASK, "= is_long ?", "= !is_long ?", ("lengths", "lengths-beyond")),
    Mutant("lengths-of-the-first-batch", MASK, "batch * p.kv_lengths_batch", "0", ("lengths",)),
    Mutant(
        "mask-transposed",
        *(MASK, "mask[row * mask_row + key * mask_column]", "mask[key * mask_row + row * mask_column]", ("mask",)),
    ),
    Mutant("mask-of-the-first-head", MASK, " + head * p.mask_head", "", ("mask",)),
    Mutant("mask-inverted", MASK, "&& mask[", "&& !mask[", ("mask",)),
    Mutant("mask-read-beyond-the-queries", MASK, "(row < query_length && mask[", "(mask[", ("mask",)),
    Mutant(
        "first-tile-one-late",
        MASK,
        "see.first_key(first_row) / kBc",
        "(see.first_key(first_row) + kBc - 1) / kBc",
        ("window",),
    ),
    Mutant(
        "last-tile-left-out", MASK, "(see.end_key(last_row) + kBc - 1) / kBc", "see.end_key(last_row) / kBc", ("plain",)
    ),
    Mutant("last-tile-taken-for-whole", MASK, "see.end_key(first_row) / kBc", "tiles.end", ("causal",)),
    Mutant("first-tile-taken-for-whole", MASK, "(see.first_key(last_row) + kBc - 1) / kBc", "tiles.first", ("window",)),
    # ---- tiles ----
    Mutant("rows-beyond-the-end-loaded", TILE, "row < rows_live && column", "column", ("plain",)),
    Mutant("columns-beyond-the-end-loaded", TILE, " && column < columns_live) from", ") from", ("plain",)),
    Mutant(
        "tail-not-zeroed",
        *(TILE, "if (row < rows_live && column < columns_live) from ="),
        *("if (row >= rows_live || column >= columns_live) continue;\n    from =", ("plain",)),
    ),
    # ---- scores ----
    Mutant("scale-forgotten", SCORES, "dot * scale;", "dot;", ("plain",)),
    Mutant(
        "softcap-inside-out", SCORES, "softcap * tanh_of(dot * scale)", "tanh_of(softcap * dot * scale)", ("softcap",)
    ),
    Mutant("softcap-forgotten", SCORES, "softcap * tanh_of(dot * scale)", "softcap * dot * scale", ("softcap",)),
    Mutant(
        "softcap-after-bias",
        *(SCORES, "? score + bias_at(row, key)"),
        *("? softcap * tanh_of(dot * scale + bias_at(row, key) / softcap)", ("softcap",)),
    ),
    Mutant("bias-of-the-first-row", SCORES, "bias[row * bias_row + ", "bias[", ("bias",)),
    Mutant("bias-of-the-first-batch", SCORES, " + batch * p.bias_batch", "", ("bias",)),
    Mutant("bias-read-beyond-the-queries", KERNEL, "min(row, see.query_length - 1)", "row", ("bias",), times=2),
    # ---- softmax ----
    Mutant("o-not-rescaled", KERNEL, "o[i][c] *= rescale", "o[i][c] *= 1", ("ramp",)),
    Mutant("l-not-rescaled", KERNEL, "    row_of[i].l *= rescale;\n", "", ("ramp",)),
    Mutant(
        "rescaled-the-wrong-way", SOFTMAX, "exp_of(before - reference())", "exp_of(reference() - before)", ("ramp",)
    ),
    Mutant("maximum-not-kept", SOFTMAX, "m = max_of(m, tile_max)", "m = tile_max", ("dominant",)),
    Mutant("nothing-seen-not-minded", SOFTMAX, "m == -kInfinity ? Real(0) : m", "m", ("late-mask",)),
    Mutant("m-and-l-mixed-up", SOFTMAX, "log_of(static_cast<Lse>(l))", "log_of(static_cast<Lse>(m))", ("plain",)),
    Mutant("lse-of-base-2", SOFTMAX, "log_of(static_cast<Lse>(l))", "log2(static_cast<Lse>(l))", ("plain",)),
    Mutant("lse-without-l", SOFTMAX, " + log_of(static_cast<Lse>(l))", "", ("plain",)),
    Mutant("lse-without-m", SOFTMAX, "static_cast<Lse>(m) + ", "", ("plain",)),
    Mutant(
        "maximum-across-rows",
        KERNEL,
        "__shfl_xor_sync(0xffffffff, tile_max, step)",
        "__shfl_xor_sync(0xffffffff, tile_max, 2 * step)",
        ("plain",),
    ),
    Mutant(
        "maximum-of-one-lane",
        KERNEL,
        "tile_max = max_of(tile_max, __shfl_xor_sync(0xffffffff, tile_max, step))",
        "tile_max += 0",
        ("plain",),
    ),
    Mutant(
        "l-of-one-lane",
        KERNEL,
        "row_of[i].l += __shfl_xor_sync(0xffffffff, row_of[i].l, step)",
        "row_of[i].l += 0",
        ("plain",),
    ),
    # ---- heads, strides, what is written ----
    Mutant("head-of-the-group", KERNEL, "head / p.group", "head % p.group", ("plain",)),
    Mutant("values-of-the-query-head", KERNEL, "kv_head * p.v_head", "head * p.v_head", ("plain",)),
    Mutant("queries-with-the-stride-of-keys", KERNEL, "row0 * p.q_row", "row0 * p.k_row", ("bnhd",)),
    Mutant("output-with-the-stride-of-queries", KERNEL, "batch * p.out_batch", "batch * p.q_batch", ("plain",)),
    Mutant("output-row-with-the-stride-of-values", KERNEL, "row * p.out_row", "row * p.v_row", ("bnhd",)),
    Mutant(
        "values-as-wide-as-keys",
        KERNEL,
        "see.key_length - key0, p.d_v",
        "see.key_length - key0, p.d",
        ("plain", "head-dims"),
    ),
    Mutant("rows-beyond-the-end-written", KERNEL, "    if (row >= p.n_q) continue;\n", "", ("plain",)),
    Mutant("columns-beyond-the-end-written", KERNEL, "if (column < p.d_v) *", "*", ("plain",)),
    Mutant("rows-beyond-the-length-written", KERNEL, "row >= see.query_length || ", "", ("lengths",)),
    Mutant("row-without-keys-divided-by-zero", KERNEL, " || row_of[i].l == Real(0)", "", ("dead-rows",)),
    Mutant(
        "lse-of-another-head",
        KERNEL,
        "batch * p.lse_batch + head * p.lse_head",
        "head * p.lse_batch + batch * p.lse_head",
        ("plain",),
    ),
    Mutant("lse-of-every-lane", KERNEL, " && own.lane == 0", "", ("plain",)),
]
