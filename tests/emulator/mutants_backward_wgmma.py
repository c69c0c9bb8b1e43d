"""Seeded bugs of the Hopper backward kernels, and for each the problem that must find it out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cases import CASES, Case

from cuflash.backward_config import BackwardWgmmaConfig
from emulator.mutants import Mutant

# Several tiles of rows and of keys, of which the last are not full.
SIZED: dict[str, Any] = {"n": (150, 300), "d": (16, 16), "heads": (1, 1), "batch": (1,), "dtype": "bfloat16"}
USUAL, SHARED_OUT = BackwardWgmmaConfig(64), BackwardWgmmaConfig(64, 64)
PROBLEMS = {
    "plain": (Case("backward-wgmma-plain", **SIZED), USUAL),
    "panels": (Case("backward-wgmma-panels", **SIZED | {"d": (80, 96), "n": (70, 200)}), USUAL),
    "wide": (Case("backward-wgmma-wide", **SIZED | {"n": (200, 600)}), BackwardWgmmaConfig(128, k_stages=2)),
    "groups": (Case("backward-wgmma-groups", **SIZED | {"heads": (4, 2), "batch": (2,)}), USUAL),
    "sections": (Case("backward-wgmma-sections", **SIZED | {"heads": (10, 10), "n": (70, 300)}), USUAL),  # 8 heads, 2
    "parts": (
        Case(
            "backward-wgmma-parts",
            **SIZED | {"heads": (5, 1), "n": (200, 100), "dtype": "float16"},
            options={"causal": "top-left"},
        ),
        USUAL,
    ),
    "causal": (
        Case("backward-wgmma-causal", **SIZED | {"heads": (3, 3), "n": (200, 260)}, options={"causal": True}),
        USUAL,
    ),
    "window": (
        Case("backward-wgmma-window", **SIZED, options={"window": (40, 30), "causal": "top-left"}),
        replace(USUAL, k_stages=2),
    ),
    "half": (Case("backward-wgmma-half", **SIZED | {"dtype": "float16"}, values="large-values"), USUAL),
    "lengths": (
        Case("backward-wgmma-lengths", **SIZED | {"batch": (2,)}, q_lengths=(150, 70), kv_lengths=(300, 190)),
        USUAL,
    ),
    "softcap": (Case("backward-wgmma-softcap", **SIZED, options={"softcap": 1.5, "scale": 1.0}), USUAL),
    "nan": (Case("backward-wgmma-nan", **SIZED, values="nan-query", options={"causal": "top-left"}), USUAL),
    "split": (
        Case("backward-wgmma-split", **SIZED | {"d": (160, 144), "n": (150, 200)}, options={"softcap": 3.0}),
        SHARED_OUT,
    ),
    "split-lengths": (
        Case(
            "backward-wgmma-split-lengths",
            **SIZED | {"batch": (2,), "dtype": "float16"},
            options={"causal": True},
            q_lengths=(150, 70),
            kv_lengths=(300, 190),
        ),
        SHARED_OUT,
    ),
    "any-order": (Case("backward-wgmma-any-order", **SIZED | {"heads": (2, 1), "d": (80, 96), "n": (150, 600)}), USUAL),
    "any-order-wide": (
        Case("backward-wgmma-any-order-wide", **SIZED | {"n": (200, 300)}),
        BackwardWgmmaConfig(128, k_stages=2),
    ),
    "few-terms": (next(case for case in CASES if case.id == "both-lengths-causal-float16"), USUAL),
}

ANY_ORDER = ("any-order", "any-order-wide")  # of the parts of dQ
MORE_BLOCKS = {"parts": 3}  # the last part, of one head, is done before the one that it waits for
KERNEL, ORDER, WEIGHTS = "backward_wgmma.cu", "wgmma_backward_order.cuh", "wgmma_backward_weights.cuh"
CONSUMER, SPLIT, ROWS = "wgmma_backward_consumer.cuh", "wgmma_backward_split.cuh", "wgmma_backward_rows.cuh"
PARTS = "wgmma_backward_parts.cuh"
TILE, SHARED, UNITS = "wgmma_backward_tile.cuh", "wgmma_backward_shared.cuh", "wgmma_backward_units.cuh"
WAIT_FOR_DK = "    wgmma_wait_group<0>();\n    pin(dk);\n"
WAIT_FOR_DP = "    wgmma_wait_group<1>();\n    pin(dp);\n"
WAIT_FOR_DQ = "        wgmma_wait_group<0>();\n        pin(dq);\n"
MUTANTS = [
    # ---- tiles that are released, overwritten or read too early ----
    Mutant(
        "q-released-before-dk",
        *(
            KERNEL,
            WAIT_FOR_DK + "    mbarrier_arrive(shared.empty_q(slot));\n",
            "    mbarrier_arrive(shared.empty_q(slot));\n" + WAIT_FOR_DK,
        ),
        ("plain",),
    ),
    Mutant(
        "v-released-before-dp",
        *(KERNEL, WAIT_FOR_DP + "    if (kLast)", "    if (kLast)", ("wide",)),
        also=(("(kLast) arrive(shared.empty_v());\n", "(kLast) arrive(shared.empty_v());\n" + WAIT_FOR_DP),),
    ),
    Mutant(
        "ds-released-before-dq",
        KERNEL,
        WAIT_FOR_DQ + "        if (piece == kDqPieces - 1) mbarrier_arrive_if(shared.empty_ds(slot), lane == 0);\n",
        "        if (piece == kDqPieces - 1) mbarrier_arrive_if(shared.empty_ds(slot), lane == 0);\n" + WAIT_FOR_DQ,
        ("plain",),
    ),
    Mutant(
        "ds-overwritten",
        *(
            KERNEL,
            "    mbarrier_wait(shared.empty_ds(slot), parity_of<kSlots>(steps) ^ kEmptyAtFirst);\n",
            "",
            ("plain",),
        ),
    ),
    Mutant(
        "dout-read-before-it-came",
        *(KERNEL, "    mbarrier_wait(shared.full_dout(slot), parity_of<kSlots>(steps));\n", "", ("plain",)),
    ),
    Mutant(
        "piece-of-dq-overwritten",
        *(
            KERNEL,
            "          mbarrier_wait(shared.empty_dq(dq_slot), parity_of<kDqStages>(pieces) ^ kEmptyAtFirst);\n",
            "",
            ("plain",),
        ),
    ),
    Mutant(
        "k-released-by-consumers-only",
        *(KERNEL, "    mbarrier_arrive(shared.empty_k(k_slot));  // each", "    // each", ("groups",)),
        also=(("(kSplit ? 0 : kWarpgroup + kDeterministic)", "kDeterministic"),),
    ),
    Mutant("dp-not-waited-for", KERNEL, WAIT_FOR_DP, "", ("plain",)),
    Mutant(
        "ds-without-a-proxy-fence",
        KERNEL,
        "    fence_proxy_async();\n    __syncwarp();\n",
        "    __syncwarp();\n",
        ("plain",),
    ),
    Mutant(
        "dq-without-a-proxy-fence",
        *(KERNEL, "        fence_proxy_async();\n        __syncwarp();\n", "        __syncwarp();\n", ("plain",)),
    ),
    Mutant(
        "too-few-bytes-announced",
        *(KERNEL, "QTile::kBytes + Shared::kStatisticsBytes", "QTile::kBytes", ("plain",)),
    ),
    # ---- the order of the sums of dQ ----
    Mutant(
        "turn-not-waited-for",
        *(KERNEL, "            ld_acquire_until(a.turns + index, turn);\n", "", ("plain", "causal")),
    ),
    Mutant(
        "turn-ended-before-its-piece-is-added",
        *(
            KERNEL,
            "        bulk_wait_group<1>();\n        finish_piece();\n",
            "        finish_piece();\n",
            ("plain", "wide"),
        ),
        also=(
            (
                "    bulk_wait_group<0>();\n    finish_piece();\n  }\n}",
                "    finish_piece();\n    bulk_wait_group<0>();\n  }\n}",
            ),
        ),
    ),
    Mutant("first-turn-adds", KERNEL, "        if (turn == 0)\n", "        if (turn < 0)\n", ("plain",)),
    Mutant("turns-reversed", ORDER, "end - 1 - tile.number", "tile.number - first", ("plain",)),
    Mutant("turns-of-the-other-direction", ORDER, "tile.downwards ? tile.number - first : end", "end", ("causal",)),
    Mutant(
        "turns-not-cleared",
        KERNEL,
        "first_row % kBr == 0) a.turns[index] = 0",
        "first_row == 0) a.turns[index] = 0",
        ("plain",),
    ),
    # ---- sums of dQ in any order ----
    Mutant(
        "part-of-dq-overwritten",
        *(KERNEL, "bulk_wait_group_read<kDqStages - 1>()", "bulk_wait_group_read<kDqStages>()", ("any-order",)),
    ),
    Mutant(
        "part-of-dq-overwritten-by-other-lanes",
        *(KERNEL, "bulk_wait_group_read<kDqStages - 1>();\n          __syncwarp();\n"),
        "bulk_wait_group_read<kDqStages - 1>();\n",
        ("any-order",),
    ),
    Mutant(
        "last-parts-of-dq-not-waited-for",
        *(KERNEL, "  if (!kDeterministic && lane == 0) bulk_wait_group<0>();\n", "", ("any-order",)),
    ),
    Mutant("part-of-another-warp", KERNEL, "* kWarps + warp)", "* kWarps + (warp ^ 1))", ("any-order",)),
    Mutant("sums-not-cleared", KERNEL, "sums[i] = {};", ";", ("any-order",)),
    Mutant(
        "sums-of-later-rows-not-cleared",
        KERNEL,
        "(index * kBr + first_row % kBr)",
        "(index * kBr)",
        ("any-order-wide",),
    ),
    Mutant(
        "an-arrival-at-k-too-many-is-waited-for",
        KERNEL,
        "kWarpgroup + kDeterministic)",
        "kWarpgroup + 1)",
        ("any-order",),
    ),
    Mutant(
        "parts-of-one-tile-of-rows", KERNEL, "--left, walk.advance(a.p), ++steps", "--left, ++steps", ("any-order",)
    ),
    # ---- which tiles, rows, keys and heads ----
    Mutant("head-of-the-group", ORDER, "first_head(a, tile) + in_part", "first_head(a, tile)", ("groups",)),
    Mutant("heads-of-the-first-part", ORDER, "(kSplit ? 0 : tile.part * a.heads_of_part)", "0", ("parts",)),
    Mutant(
        "a-last-part-of-as-many-heads",
        *(ORDER, "min(a.heads_of_part, a.p.group - tile.part * a.heads_of_part)", "a.heads_of_part", ("parts",)),
    ),
    # ---- sums of keys that have several tickets ----
    Mutant(
        "part-before-not-waited-for",
        *(
            PARTS,
            "    if (thread() == 0) ld_acquire_until(a.key_turns + index(), of.part);\n",
            "",
            ("parts",),
        ),
    ),
    Mutant(
        "part-ended-before-all-have-added",
        PARTS,
        "  __device__ __forceinline__ void end() const {\n    bar_sync(kMeetBarrier + consumer(), kWarpgroup);\n",
        "  __device__ __forceinline__ void end() const {\n",
        ("parts",),
    ),
    Mutant("first-part-adds", PARTS, "if (is_first()) {", "if (false) {", ("parts",)),
    Mutant("last-part-without-the-others", PARTS, "x[i + e] += before.x[e];", ";", ("parts",)),
    Mutant("a-part-stores", KERNEL, "if (!sums.is_last()) return;", "", ("parts",)),
    Mutant("dv-into-the-sums-of-dk", KERNEL, "sums.add(kKeysOfConsumer * kD, dv)", "sums.add(0, dv)", ("parts",)),
    Mutant("parts-in-units-of-their-own", KERNEL, "dk[i] *= per_unit;", ";", ("parts",)),
    Mutant("turns-of-parts-not-cleared", KERNEL, "a.key_turns[i] = 0", "a.key_turns[i] = 1", ("parts",)),
    Mutant(
        "heads-of-a-section",
        ORDER,
        "in_half - rank * width",
        "in_half % a.section",
        ("sections",),
        also=(("min(a.section, all - section * a.section)", "a.section"),),
    ),
    Mutant("void-tickets-worked-on", ORDER, "if (!kTurnsAround || key_tile", "if (true || key_tile", ("causal",)),
    Mutant("walks-past-the-end", ORDER, "highest = rows.end - 1", "highest = rows.end", ("causal",)),
    Mutant("diagonal-one-off", WEIGHTS, "column < first[r]", "column <= first[r]", ("causal",)),
    Mutant("window-one-off", WEIGHTS, "at + see.left + 1)", "at + see.left)", ("window",)),
    Mutant(
        "rows-beyond-the-end-weigh",
        WEIGHTS,
        "live_keys > 8 ? kRight ? at + 8 - see.right : 0 : kNever",
        "kRight ? at + 8 - see.right : 0",
        ("lengths",),
    ),
    Mutant("poisoned-rows-kept", CONSUMER, "    if (first >= end) return;\n", "    return;\n", ("lengths",)),
    Mutant("pairs-nobody-sees-are-multiplied", WEIGHTS, "kMasked && p.x[e] < Weights::kLeast ? 0 :", "", ("nan",)),
    # ---- numbers ----
    Mutant("what-was-cut-off-is-lost", WEIGHTS, "+ behind - kHalfUnit", "", ("few-terms",)),
    Mutant("bits-of-another-pair", WEIGHTS, "byte = 2 * (i % 2) + e", "byte = 2 - 2 * (i % 2) + e", ("few-terms",)),
    Mutant("unit-forgotten-in-dq", KERNEL, "dq[i] *= per_unit", "dq[i] *= 1", ("half",)),
    Mutant("unit-forgotten-in-dk", CONSUMER, "(p.gradient_scale) * per_unit;", "(p.gradient_scale);", ("half",)),
    Mutant("unit-too-large", UNITS, "127 - min(max(exponent, -60), 60)", "127", ("half",)),
    Mutant("slope-forgotten", WEIGHTS, "kSoftcap ? ds * slope.x[e] : ds", "ds", ("softcap",)),
    Mutant(
        "delta-of-other-rows",
        KERNEL,
        "p.row_delta + first_statistic(",
        "p.row_delta - walk.row_tile % 2 * 4 + first_statistic(",
        ("plain",),
    ),
    Mutant(
        "panels-of-ds-k-too-near",
        TILE,
        "b = column_operand(k, KTile::kPanelBytes)",
        "b = column_operand(k, 16)",
        ("panels",),
        also=(("kDqColumns = kD < kPanelColumns ? kD : kPanelColumns", "kDqColumns = kD"),),
    ),
    Mutant("piece-of-another-panel", KERNEL, "panel * KTile::kPanelBytes", "rows * KTile::kPanelBytes", ("panels",)),
    # ---- products that the consumers share out ----
    Mutant(
        "p-read-before-it-came", SPLIT, "    mbarrier_wait(shared.full_p(), parity_of<1>(steps));\n", "", ("split",)
    ),
    Mutant(
        "p-overwritten",
        *(SPLIT, "    mbarrier_wait(shared.empty_p(), parity_of<1>(weighed) ^ kEmptyAtFirst);\n", "", ("split",)),
    ),
    Mutant("slope-forgotten-in-p", SPLIT, "kSoftcap ? s[2 * i] * first : s[2 * i]", "s[2 * i]", ("split",)),
    Mutant(
        "q-released-by-the-weigher-only",
        *(SPLIT, "    pin(dk);\n    arrive(shared.empty_q(slot));\n", "    pin(dk);\n", ("split",)),
    ),
    Mutant(
        "dout-multiplied-before-it-is-clean",
        *(
            SPLIT,
            "    if (kQLengths) mbarrier_wait(shared.clean_dout(slot), parity_of<kSlots>(steps));\n",
            "",
            ("split-lengths",),
        ),
    ),
    Mutant(
        "columns-beyond-128-from-the-first-ones",
        *(TILE, "kMostColumns / kPanelColumns * Rows::kPanelBytes", "0 * Rows::kPanelBytes", ("split",)),
    ),
    Mutant(
        "weights-changed-under-way",
        *(
            SPLIT,
            "      weigh_scores(next, of, walk);\n",
            "      weigh_scores(next, of, walk);\n      pack(p, s);\n",
            ("split",),
        ),
    ),
    # ---- dQ in a kernel of its own ----
    Mutant("k-of-rows-released-before-dq", ROWS, "      wgmma_wait_group<2>();\n", "", ("split",)),
    Mutant("s-of-rows-read-under-way", ROWS, "    wgmma_wait_group<1>();\n    pin(s);\n", "    pin(s);\n", ("split",)),
    Mutant(
        "dp-of-rows-read-under-way", ROWS, "    wgmma_wait_group<0>();\n    pin(dp);\n", "    pin(dp);\n", ("split",)
    ),
    Mutant(
        "q-of-rows-released-too-early",
        ROWS,
        "mbarrier_arrive_if(shared.empty_q(), is_last);",
        "mbarrier_arrive(shared.empty_q());",
        ("split",),
    ),
    Mutant(
        "an-arrival-at-q-of-rows-is-not-waited-for",
        *(KERNEL, "(shared.empty_q(), kWarpgroup * kConsumers)", "(shared.empty_q(), kWarpgroup * kConsumers - 1)"),
        ("split",),
    ),
    Mutant(
        "dout-of-rows-not-waited-for",
        *(ROWS, "    if constexpr (kFirst) mbarrier_wait(shared.full_dout(), parity_of<1>(tiles));\n", "", ("split",)),
    ),
    Mutant(
        "v-of-rows-not-waited-for", ROWS, "    mbarrier_wait(shared.full_v(), parity_of<1>(steps));\n", "", ("split",)
    ),
    Mutant(
        "v-of-rows-never-empty",
        ROWS,
        "mbarrier_wait(shared.empty_v(), parity_of<1>(steps) ^ kEmptyAtFirst);",
        "",
        ("split",),
    ),
    Mutant(
        "k-of-rows-in-one-slot",
        ROWS,
        "const i32 slot = slot_of<kRowKStages>(steps), before",
        "const i32 slot = 0, before",
        ("split",),
    ),
    Mutant("last-keys-left-out-of-dq", ROWS, "        issue_dq(slot);\n        wgmma", "        wgmma", ("split",)),
    Mutant("slope-forgotten-in-dq", ROWS, "          if (kSoftcap) x *= slope;\n", "", ("split",)),
    Mutant("rows-of-dq-mixed-up", ROWS, "lse[r] = p.row_lse[at]", "lse[r] = p.row_lse[at - r]", ("split",)),
    Mutant(
        "keys-of-rows-not-cleared",
        ROWS,
        "      if (live_keys < kBc) clear_keys(shared.k(slot), live_keys);\n",
        "",
        ("split-lengths",),
    ),
    Mutant(
        "keys-of-rows-cleared-by-halves",
        ROWS,
        "    bar_sync(kMeetBarrier + kConsumers, kConsumers * kWarpgroup);\n",
        "",
        ("split-lengths",),
    ),
    Mutant(
        "dq-in-the-wrong-unit",
        ROWS,
        "(kHalf ? 1 / (kWeightUnit * unit) : 1)",
        "(kHalf ? 1 / kWeightUnit : 1)",
        ("split-lengths",),
    ),
    Mutant(
        "rows-of-dq-not-masked",
        ROWS,
        "      weigh_scores<true>(own, tile);\n",
        "      weigh_scores<false>(own, tile);\n",
        ("split-lengths",),
    ),
    Mutant(
        "second-consumer-has-the-rows-of-the-first",
        ROWS,
        "shared.full_q(), own.row0 + w * kWarpgroupRows",
        "shared.full_q(), own.row0",
        ("split",),
    ),
    Mutant("slots-of-v-and-q-overlap", SHARED, "kV + VTile::kBytes", "kV + VTile::kBytes / 2", ("panels",)),
]
