"""Seeded bugs of the Hopper kernel, and for each the problem that must find it out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cases import Case

from cuflash.config import WgmmaConfig
from emulator.mutants import Mutant

# Several tiles of rows and of keys, of which the last are not full; two heads to a key head, two batch entries.
# Keys are walked from the last to the first: "rising" scores are those that fall along the keys.
SIZED: dict[str, Any] = {"n": (150, 90), "d": (64, 64), "heads": (4, 2), "batch": (1,), "dtype": "float16"}
SMALL: dict[str, Any] = SIZED | {"n": (80, 90), "heads": (2, 1)}
USUAL = WgmmaConfig(consumers=2, b_c=32)
PROBLEMS = {
    "plain": (Case("wgmma-plain", **SIZED), USUAL),
    "causal": (Case("wgmma-causal", **SIZED, options={"causal": "top-left"}), USUAL),
    "window": (Case("wgmma-window", **SIZED, options={"window": (20, 9), "causal": "top-left"}), USUAL),
    "rising": (Case("wgmma-rising", **SMALL | {"n": (80, 192)}, values="falling", options={"scale": 0.1}), USUAL),
    "rising-by-care": (Case("wgmma-rising-by-care", **SMALL, values="falling"), replace(USUAL, speculative=False)),
    "soaring": (Case("wgmma-soaring", **SIZED, values="stairs", options={"scale": -0.125}), USUAL),
    "wild": (Case("wgmma-wild", **SMALL | {"n": (80, 192)}, values="hot", options={"scale": 3.0}), USUAL),
    "hot": (Case("wgmma-hot", **SMALL, values="exact-hot", options={"scale": 2.0**20}), USUAL),
    "lengths": (
        Case("wgmma-lengths", **SIZED | {"heads": (2, 1), "batch": (2,)}, kv_lengths=(90, 45), q_lengths=(150, 90)),
        USUAL,
    ),
    "negative": (Case("wgmma-negative", **SIZED, options={"scale": -0.3}), replace(USUAL, ping_pong=False)),
    "passing-over": (
        Case("wgmma-passing-over", **SIZED | {"n": (512, 512), "d": (16, 16)}, options={"window": (0, 0)}),
        WgmmaConfig(consumers=2, b_c=16, stages=1, ping_pong=False),
    ),
    "two-ends": (
        Case(
            "wgmma-two-ends",
            **SIZED | {"n": (300, 300), "d": (16, 16)},
            q_lengths=(100,),
            options={"causal": True, "window": (1, None)},
        ),
        WgmmaConfig(consumers=2, b_c=64),
    ),
    "panels": (Case("wgmma-panels", **SIZED | {"d": (80, 144)}), USUAL),
    "no-room": (Case("wgmma-no-room", **SMALL | {"n": (80, 70), "d": (256, 256)}), replace(USUAL, b_c=64)),
    "bias-of-keys": (Case("wgmma-bias-of-keys", **SIZED | {"batch": (2,), "n": (150, 150)}, bias="bh-k"), USUAL),
    "bias-of-keys-causal": (
        Case("wgmma-bias-of-keys-causal", **SIZED, bias="-h-k", bias_dtype="float32", options={"causal": "top-left"}),
        replace(USUAL, stages=3, q_stages=2),
    ),
    "bias-of-keys-soaring": (
        Case("wgmma-bias-of-keys-soaring", **SIZED, values="stairs", bias="bh-k", options={"scale": -0.125}),
        USUAL,
    ),
    "bias-of-rows": (Case("wgmma-bias-of-rows", **SIZED, bias="bhqk", q_lengths=(149,)), USUAL),
    "bias-of-odd-rows": (
        Case("wgmma-bias-of-odd-rows", **SIZED | {"n": (150, 99)}, bias="bhqk"),
        replace(USUAL, b_c=80),
    ),
}

KERNEL, TILE, SOFTMAX = "forward_wgmma.cu", "wgmma_tile.cuh", "wgmma_softmax.cuh"
SHARED, STORE = "wgmma_shared.cuh", "wgmma_store.cuh"
PANELS, RING = "wgmma_panels.cuh", "wgmma_ring.cuh"
WAIT_FOR_S = "    wgmma_wait_group<kPending ? 1 : 0>();\n    pin(s);\n"
WAIT_FOR_O = "      wgmma_wait_group<0>();\n      pin(o);\n"
RELEASE_K = "    arrive(shared.empty_k(k_ring.slot));\n    mbarrier_arrive_if(shared.empty_q"
RELEASE_V = "(kPending) {\n      arrive(shared.empty_v(v_ring.slot));\n"  # where WAIT_FOR_O no longer stands between
SEEN_BY_ALL = "      __syncwarp();  // all lanes have seen the phase end before one of them lets the next begin\n"
STAGE_READ = "    if (lane == 0) bulk_wait_group_read<0>();\n"
STAGE_FENCE = "    fence_proxy_async();\n"
TELL_KEYS = "    *shared.key_work() = {keys.first, keys.end, rows.head / p.group, rows.batch};\n"
TOLD = "    mbarrier_arrive(shared.full_work());\n"
WAIT_TO_DRAW = "    mbarrier_wait(shared.draw(), draw_ring.parity);\n"
TELL_ROWS = "      *shared.row_work(q_ring.slot, w) = work;\n"
MUTANTS = [
    # ---- tiles that are released too early, or read too early ----
    Mutant(
        "k-released-before-its-product",
        *(
            KERNEL,
            WAIT_FOR_S + RELEASE_K,
            "    arrive(shared.empty_k(k_ring.slot));\n" + WAIT_FOR_S + "    mbarrier_arrive_if(shared.empty_q",
            ("plain",),
        ),
    ),
    Mutant(
        "v-released-before-its-product",
        *(KERNEL, WAIT_FOR_O, "", ("plain",)),
        also=((RELEASE_V + "      v_ring", RELEASE_V + WAIT_FOR_O + "      v_ring"),),
    ),
    Mutant(
        "q-released-before-its-last-use",
        KERNEL,
        "warpgroup), j == work.tiles.first)",
        "warpgroup), j == work.tiles.first + 1)",
        ("plain",),
    ),
    Mutant(
        "k-read-before-it-came",
        KERNEL,
        "    mbarrier_wait(shared.full_k(k_ring.slot), k_ring.parity);\n    begin_turn",
        "    begin_turn",
        ("plain",),
    ),
    Mutant(
        "v-read-before-it-came",
        KERNEL,
        "    mbarrier_wait(shared.full_v(v_ring.slot), v_ring.parity);\n    wgmma_fence",
        "    wgmma_fence",
        ("plain",),
    ),
    Mutant(
        "k-loaded-over-the-last",
        KERNEL,
        "    mbarrier_wait(shared.empty_k(k_ring.slot), k_ring.parity);\n    request",
        "    request",
        ("plain",),
    ),
    Mutant(
        "tiles-passed-over-before-all-lanes-saw-them",
        *(KERNEL, SEEN_BY_ALL + "      arrive(shared.empty_k", "      arrive(shared.empty_k", ("passing-over",)),
        also=(("      __syncwarp();\n      arrive(shared.empty_v", "      arrive(shared.empty_v"),),
    ),
    # ---- barriers: phases, counts, bytes ----
    Mutant("consumer-starts-a-phase-ahead", RING, "u32 parity = 0;", "u32 parity = 1;", ("plain",)),
    Mutant("producer-starts-a-phase-behind", RING, "kEmptyAtFirst = 1", "kEmptyAtFirst = 0", ("plain",)),
    Mutant("too-few-bytes-announced", KERNEL, "(full, Tile::kBytes)", "(full, Tile::kBytes / 2)", ("panels",)),
    Mutant(
        "an-arrival-is-not-waited-for",
        KERNEL,
        "(shared.empty_k(slot), kConsumerWarps)",
        "(shared.empty_k(slot), kConsumerWarps - 1)",
        ("plain",),
    ),
    Mutant("barriers-are-not-published", KERNEL, "    fence_mbarrier_init();\n", "", ("plain",)),
    Mutant(
        "no-barrier-after-the-prologue", KERNEL, "  __syncthreads();\n\n  // Main loop", "\n  // Main loop", ("plain",)
    ),
    Mutant("v-a-stage-short", SHARED, "kV + kStages * VTile::kBytes", "kV + (kStages - 1) * VTile::kBytes", ("plain",)),
    # ---- turns, registers, the scheduler ----
    Mutant(
        "turn-of-three-warpgroups",
        KERNEL,
        "bar_sync(kTurnBarrier + warpgroup, 2 * kWarpgroup)",
        "bar_sync(kTurnBarrier + warpgroup, 3 * kWarpgroup)",
        ("plain",),
    ),
    Mutant(
        "registers-that-are-not-there",
        KERNEL,
        "setmaxnreg_inc<kConsumerRegisters>",
        "setmaxnreg_inc<kConsumerRegisters + 8>",
        ("plain",),
    ),
    Mutant(
        "counter-left-behind",
        KERNEL,
        "atomicInc(a.next_tile, tiles_of_rows - 1)",
        "atomicInc(a.next_tile, tiles_of_rows)",
        ("plain",),
    ),
    Mutant(
        "rows-told-after-their-q",
        *(KERNEL, TELL_ROWS, "", ("plain",)),
        also=(("kReadOnce);\n    }\n", "kReadOnce);\n" + TELL_ROWS + "    }\n"),),
    ),
    # ---- wgmma ----
    Mutant("no-fence-before-s", KERNEL, "    begin_turn();\n    wgmma_fence();\n", "    begin_turn();\n", ("plain",)),
    Mutant("s-not-committed", TILE, ", step > 0);\n  wgmma_commit_group();\n", ", step > 0);\n", ("plain",)),
    Mutant("s-not-waited-for", KERNEL, WAIT_FOR_S, "", ("plain",)),
    Mutant("o-not-waited-for", KERNEL, WAIT_FOR_O, "", ("plain",)),
    Mutant("p-replaced-in-flight", KERNEL, WAIT_FOR_O, "      pack_p(p, s);\n" + WAIT_FOR_O, ("plain",)),
    Mutant("stride-halved", PANELS, "in_units(kAtomBytes)) << 32", "in_units(kAtomBytes / 2)) << 32", ("plain",)),
    Mutant(
        "panels-of-v-too-near",
        PANELS,
        "descriptor(address, panel_bytes)",
        "descriptor(address, panel_bytes / 2)",
        ("panels",),
    ),
    Mutant("column-step-halved", PANELS, "kStep * static_cast<i32>(sizeof(Element))", "kStep", ("plain",)),
    Mutant("swizzle-of-64-bytes", PANELS, "1ULL << 62", "2ULL << 62", ("plain",)),
    Mutant("written-without-a-proxy-fence", KERNEL, "    fence_proxy_async();\n", "", ("negative",), times=2),
    Mutant(
        "written-without-meeting",
        KERNEL,
        "    fence_proxy_async();\n    meet();\n",
        "    fence_proxy_async();\n",
        ("negative",),
        times=2,
    ),
    # ---- a bias of keys, which comes with K ----
    Mutant(
        "bias-not-waited-for",
        KERNEL,
        "(shared.full_k(slot), 1 + kBiasWarps)",
        "(shared.full_k(slot), 1)",
        ("bias-of-keys",),
    ),
    Mutant(
        "bias-told-before-it-is-there",
        KERNEL,
        "      __syncwarp();\n      mbarrier_arrive_if(shared.full_k",
        "      mbarrier_arrive_if(shared.full_k",
        ("bias-of-keys",),
    ),
    Mutant(
        "bias-loaded-over-the-last",
        KERNEL,
        "      mbarrier_wait(shared.empty_k(k_ring.slot), k_ring.parity);\n#pragma",
        "#pragma",
        ("bias-of-keys",),
    ),
    Mutant("bias-without-a-slot-more", SHARED, "kBiasSlots = kStages + 1", "kBiasSlots = kStages", ("bias-of-keys",)),
    Mutant(
        "bias-of-passed-over-keys",
        *(KERNEL, "      bias_ring.advance();\n      mbarrier_wait(shared.full_v", "      mbarrier_wait(shared.full_v"),
        ("bias-of-keys-causal",),
    ),
    Mutant(
        "bias-from-the-tile-of-the-warpgroup",
        KERNEL,
        "work.tiles.end + work.passed_over - 1",
        "work.tiles.end - 1",
        ("bias-of-keys-causal",),
    ),
    Mutant(
        "bias-beyond-the-keys-read",
        KERNEL,
        "key < p.n_k ? score.bias_at(0, key) : 0",
        "score.bias_at(0, key)",
        ("bias-of-keys",),
    ),
    Mutant(
        "rows-released-before-they-are-read",
        KERNEL,
        "kWarpgroup + (w == 0",
        "kWarpgroup - 32 + (w == 0",
        ("bias-of-keys",),
    ),
    Mutant(
        "lost-scores-with-the-next-bias",
        *(KERNEL, "(bias_ring.slot == 0 ? Shared::kBiasSlots : bias_ring.slot) - 1;", "bias_ring.slot;"),
        ("bias-of-keys-soaring",),
    ),
    # ---- a bias by rows ----
    Mutant(
        "bias-of-one-row-for-two",
        SOFTMAX,
        "score.bias + min(row0 + 8 * r, see.query_length - 1)",
        "score.bias + min(row0, see.query_length - 1)",
        ("bias-of-rows",),
    ),
    Mutant(
        "bias-beyond-the-rows-read",
        SOFTMAX,
        "score.bias + min(row0 + 8 * r, see.query_length - 1)",
        "score.bias + (row0 + 8 * r)",
        ("bias-of-rows",),
    ),
    Mutant(
        "bias-of-the-first-blocks",
        SOFTMAX,
        "kBlock * (first + i / 4) + i % 2",
        "kBlock * (i / 4) + i % 2",
        ("bias-of-odd-rows",),
    ),
    # ---- which keys, rows and heads ----
    Mutant("right-bound-one-too-far", SOFTMAX, "key < end)", "key <= end)", ("causal",)),
    Mutant("left-bound-one-short", SOFTMAX, "key >= first)", "key > first)", ("window",)),
    Mutant("tail-not-masked", KERNEL, "kMayBeCut = kFirst ||", "kMayBeCut =", ("plain",)),
    Mutant(
        "warpgroup-passes-over-too-much",
        KERNEL,
        "passed_over = of_block.end - work.tiles.end",
        "passed_over = of_block.end - work.tiles.end + 1",
        ("causal",),
    ),
    Mutant(
        "values-beyond-the-length-kept",
        KERNEL,
        "if (live_rows < kBc) clear_v_beyond",
        "if (false) clear_v_beyond",
        ("lengths",),
    ),
    Mutant(
        "head-of-the-group", KERNEL, "rows.head / p.group, rows.batch}", "rows.head % p.group, rows.batch}", ("plain",)
    ),
    # ---- softmax and what is stored ----
    Mutant(
        "l-not-rescaled", SOFTMAX, "m[r] = to[r];\n        l[r] *= factor[r];\n", "m[r] = to[r];\n", ("rising-by-care",)
    ),
    Mutant("o-of-the-rows-before", KERNEL, "    if constexpr (kFirst) o_has_products = false;\n", "", ("plain",)),
    Mutant("last-product-alone", KERNEL, "    o_has_products = true;\n", "", ("plain",)),
    Mutant("never-repaired", KERNEL, "kMayOutgrow && rows.may_be_outgrown(sum)", "false", ("rising",)),
    Mutant(
        "maxima-ignored-by-rows-that-settled",
        *(
            KERNEL,
            "if constexpr (kReference != Reference::kTrusted)",
            "if constexpr (kReference == Reference::kEither)",
        ),
        ("rising",),
    ),
    Mutant(
        "lost-scores-not-recomputed",
        SOFTMAX,
        "if (__any_sync(0xffffffff, lost[0] || lost[1]))",
        "if (false)",
        ("soaring",),
    ),
    Mutant("lost-scores-of-other-keys", KERNEL, "(j + 1) * kBc + key, lane)", "(j + 1) * kBc, lane)", ("soaring",)),
    Mutant("lost-scores-of-other-rows", TILE, "of.row0 + 8 * (i % 2)", "of.row0", ("soaring",)),
    Mutant("lost-scores-of-the-other-sign", KERNEL, "a.p.scale_log2 < 0)  // as", "false)  // as", ("soaring",)),
    Mutant("coarse-reference", SOFTMAX, "fabsf(m * c) < kFar", "fabsf(m * c) < 1e30f", ("hot",)),
    Mutant("l-of-one-lane", STORE, "sum_over_quad(rows.l[r])", "rows.l[r]", ("plain",)),
    Mutant("lse-of-base-2", SOFTMAX, " * static_cast<Lse>(kLn2) + log_of", " + log_of", ("plain",)),
    Mutant(
        "o-of-other-columns", STORE, "panel * kPanelColumns, row", "(panel - first) * kPanelColumns, row", ("no-room",)
    ),
    Mutant(
        "stage-overwritten-too-early",
        *(STORE, STAGE_READ, "    if (lane == 0 && first == 0) bulk_wait_group_read<0>();\n", ("no-room",)),
    ),
    Mutant(
        "stage-of-other-rows-overwritten-too-early",
        *(STORE, STAGE_READ, "    if (lane == 0 && first > 0) bulk_wait_group_read<0>();\n", ("two-ends",)),
    ),
    Mutant(
        "stage-overwritten-before-all-lanes-know",
        *(STORE, STAGE_READ + "    __syncwarp();\n", STAGE_READ, ("two-ends",)),
    ),
    Mutant("stage-read-too-early", STORE, STAGE_FENCE + "    __syncwarp();\n", STAGE_FENCE, ("plain",)),
    Mutant("stage-not-fenced", STORE, STAGE_FENCE, "", ("plain",)),
    Mutant("kernel-left-before-o-is", KERNEL, "if (threadIdx.x % 32 == 0) bulk_wait_group<0>();", "", ("plain",)),
    # ---- rows that are drawn ----
    Mutant("keys-of-rows-told-too-early", KERNEL, TELL_KEYS + TOLD, TOLD + TELL_KEYS, ("plain",)),
    Mutant("rows-drawn-before-keys-were-read", KERNEL, WAIT_TO_DRAW, "", ("plain",)),
    Mutant(
        "never-drawn-for-one-tile",
        KERNEL,
        "if (j == draws_at) mb",
        "if (j == draws_at && j > now.first) mb",
        ("two-ends",),
    ),
    Mutant("end-not-told", KERNEL, "  shared.key_work()->end = kNoRows;\n", "", ("plain",)),
    Mutant(
        "rows-drawn-once-too-often",
        KERNEL,
        "a.next_tile, tiles_of_rows - 1)",
        "a.next_tile, tiles_of_rows)",
        ("plain",),
    ),
]
