"""Seeded bugs of the backward pass on CUDA cores, and for each the problems of which one must find it out."""

from __future__ import annotations

from typing import Any

from cases import Case

from emulator.mutants import Mutant

# Sizes that are no multiple of a tile, several tiles of rows and of keys, two heads to a key head, two batch entries.
SIZED: dict[str, Any] = {"n": (40, 50), "d": (24, 40), "heads": (4, 2), "batch": (2,), "dtype": "float32"}
PROBLEMS = {
    case.id: case
    for case in (
        Case("backward-plain", **SIZED),
        Case("backward-bnhd", **SIZED, options={"layout": "bnhd"}),
        Case("backward-causal", **SIZED, options={"causal": True}),
        Case("backward-window", **SIZED, options={"window": (16, 4)}),
        Case("backward-hot", **SIZED, values="exact-hot", options={"scale": 1.0}),
        Case("backward-dead-rows", **SIZED, mask="bhqk", mask_kind="dead-rows"),
        Case("backward-one-key", **SIZED, mask="bhqk", mask_kind="one-key"),
        Case("backward-lengths", **SIZED, q_lengths=(33, 40), kv_lengths=(50, 21), options={"causal": True}),
        Case("backward-lengths-infinite-key", **SIZED, values="infinite-key", q_lengths=(33, 40), kv_lengths=(50, 30)),
        Case("backward-bias", **SIZED, bias="bhqk", options={"scale": 0.3}),
        Case("backward-bias-of-heads", **SIZED, bias="-h-k"),
        Case("backward-bias-of-keys", **SIZED, bias="b--k"),
        Case("backward-bias-of-rows", **SIZED, bias="b-q-"),
        Case("backward-softcap", **SIZED, options={"softcap": 1.5}),
        Case(
            "backward-softcap-saturated",
            **SIZED | {"options": {"softcap": 2.0}, "values": "ramp", "mask": "bhqk", "mask_kind": "late-keys"},
        ),
        Case("backward-softcap-bias", **SIZED, bias="bhqk", options={"softcap": 1.5}),
        Case("backward-dead-bias-rows", **SIZED, bias="bhqk", bias_kind="dead-rows"),
    )
}

KERNEL, BIAS, STATISTICS, PAIR = (
    "backward_simt.cu",
    "backward_bias.cu",
    "backward_statistics.cuh",
    "backward_scores.cuh",
)
MASK, SCORES = "mask.cuh", "scores.cuh"
PLAIN = ("backward-plain",)
MUTANTS = [
    # ---- barriers ----
    Mutant("no-barrier-after-loading", KERNEL, "__syncthreads();  // the tiles have come", "", PLAIN),
    Mutant("no-barrier-after-reading", KERNEL, "__syncthreads();  // every warp is done with the tiles", "", PLAIN),
    Mutant(
        "no-barrier-before-overwriting-p",
        KERNEL,
        "__syncwarp();  // its lanes are done with what stood there",
        "",
        PLAIN,
    ),
    Mutant("no-barrier-before-reading-p", KERNEL, "  __syncwarp();\n  multiply_add", "  multiply_add", PLAIN),
    Mutant(
        "bias-no-barrier-before-adding-up",
        *(BIAS, "    __syncthreads();\n    const i32 key = ", "    const i32 key = ", ("backward-bias-of-heads",)),
    ),
    # ---- row statistics ----
    Mutant("delta-forgotten", PAIR, "(dp - stats.delta)", "dp", PLAIN),
    Mutant("dlse-forgotten", STATISTICS, "p.dlse != nullptr", "false", ("backward-bnhd",)),
    Mutant("delta-of-one-lane", STATISTICS, "delta += __shfl_xor_sync(0xffffffff, delta, step)", "delta += 0", PLAIN),
    Mutant("lse-of-float", STATISTICS, "(score - lse) - lse_low", "score - lse", ("backward-hot",)),
    Mutant(
        "row-without-keys-alive",
        STATISTICS,
        "empty ? static_cast<Lse>(kInfinity) : lse",
        "lse",
        ("backward-dead-bias-rows",),
    ),
    Mutant(
        "statistics-of-the-next-head",
        KERNEL,
        "statistics0 + static_cast<i64>(h) * p.statistics_rows",
        "statistics0",
        PLAIN,
    ),
    Mutant("lse-with-the-stride-of-rows-of-q", STATISTICS, "head * p.lse_head", "head * p.out_head", PLAIN),
    # ---- scores and their derivative ----
    Mutant("slope-forgotten", PAIR, "dz * z.slope", "dz", ("backward-softcap",)),
    Mutant(
        "slope-that-cancels",
        "arithmetic.cuh",
        "return {tanhf(x), 4 * e / ((1 + e) * (1 + e))};",
        "return {tanhf(x), (1 - tanhf(x)) * (1 + tanhf(x))};",
        ("backward-softcap-saturated",),
    ),
    Mutant("scale-of-the-softcap", KERNEL, "p.gradient_scale", "p.scale", ("backward-softcap",)),
    Mutant("scale-of-dv", KERNEL, "sum2, Real(1)", "sum2, scale", PLAIN),
    Mutant("bias-gradient-of-the-product", BIAS, ").dz;", ").ds;", ("backward-softcap-bias",)),
    Mutant("no-weight-not-minded", PAIR, "p == Real(0) ? Real(0) : ", "", ("backward-dead-bias-rows",)),
    # ---- which rows see a key ----
    Mutant(
        "first-row-tile-one-late",
        MASK,
        "tiles.first = from_first / kBr",
        "tiles.first = (from_first + kBr - 1) / kBr",
        ("backward-causal",),
    ),
    Mutant(
        "last-row-tile-left-out",
        MASK,
        "tiles.end = max((to_last + kBr - 1) / kBr, 0)",
        "tiles.end = to_last / kBr",
        PLAIN,
    ),
    Mutant(
        "row-tile-taken-for-whole",
        MASK,
        "tiles.whole_first = (from_last + kBr - 1) / kBr",
        "tiles.whole_first = tiles.first",
        ("backward-causal",),
    ),
    Mutant("window-taken-for-whole", MASK, "max(to_first, 0) / kBr : 0", "tiles.end : 0", ("backward-window",)),
    # ---- heads, strides, what is written ----
    Mutant("one-head-of-the-group", KERNEL, "kOwnsKeys ? p.group : 1;", "1;", PLAIN),
    Mutant("mask-of-the-first-head-of-the-group", KERNEL, "see0.of_head(h)", "see0", ("backward-dead-rows",)),
    Mutant("bias-of-the-first-head-of-the-group", KERNEL, "score0.of_head(h)", "score0", ("backward-bias",)),
    Mutant("dout-with-the-stride-of-q", KERNEL, "dout0 + h * p.dout_head", "dout0 + h * p.q_head", PLAIN),
    Mutant("dq-with-the-stride-of-dk", KERNEL, "own0 * p.dq_row", "own0 * p.dk_row", ("backward-bnhd",)),
    Mutant("keys-beyond-the-end-written", KERNEL, "p.n_k - own0, p.d, own", "kOwn, p.d, own", PLAIN),
    Mutant("columns-beyond-the-end-written", KERNEL, "if (column < columns_live) *", "*", PLAIN),
    Mutant(
        "sums-of-empty-rows-stored", KERNEL, "is_empty[i] ? Real(0) : sums", "sums", ("backward-lengths-infinite-key",)
    ),
    # ---- the bias gradient ----
    Mutant(
        "bias-rows-not-summed",
        BIAS,
        "for (i32 r = 1; r < kRows; ++r) sums[0][c] += sums[r][c];",
        ";",
        ("backward-bias-of-heads",),
    ),
    Mutant(
        "bias-keys-of-one-lane",
        BIAS,
        "sums[r][0] += __shfl_xor_sync(0xffffffff, sums[r][0], step)",
        "sums[r][0] += 0",
        ("backward-bias-of-rows",),
    ),
    Mutant(
        "bias-groups-left-out",
        BIAS,
        "group < kRowGroups; ++group",
        "group < kRowGroups - 1; ++group",
        ("backward-bias-of-heads",),
    ),
    Mutant(
        "bias-of-one-head",
        BIAS,
        "all_or_one(all_heads, p.heads, head)",
        "Range{head, head + 1}",
        ("backward-bias-of-keys",),
    ),
    Mutant("bias-rows-beyond-the-end-written", BIAS, "row < p.n_q && ", "", ("backward-bias",)),
]
