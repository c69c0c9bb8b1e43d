"""How many cycles a score costs, by arithmetic: which of several legal tiles to take on a GPU where none was timed.

A tile of keys costs each warp its products on its quarter's tensor cores and the work on its scores, and the
multiprocessor its reads of shared memory (FlashAttention-2, Dao 2023, section 3). These overlap as far as warps take
turns: the longest of them counts in full, the rest is shared out among the warps of a quarter. Waiting for one another
costs the same for every tile, and more where one stage leaves nothing to be copied ahead.

The constants are those of an H200, where `mma.sync` has half the rate of `wgmma`, rounded from fits to the sweeps in
tests/data/sweeps; tests/test_cost_model.py holds what the model achieves on them. L2 limited none of them and is left
out, and so is how well a grid fills the GPU: that depends on sizes, for which nothing is compiled anew.
"""

from __future__ import annotations

from cuflash.config import REGISTERS_PER_BLOCK, REGISTERS_PER_THREAD, RESERVED_BYTES, MmaConfig
from cuflash.device import DeviceInfo
from cuflash.problem import ITEM_BYTES, Spec

QUARTERS = 4  # of a multiprocessor, each with its own tensor cores and scheduler
SHARED_BYTES = 128  # that a multiprocessor reads in a cycle
PRODUCTS = 512  # multiply-adds of 16-bit elements in a cycle
HALF_RATE = frozenset({(7, 5), (8, 6), (8, 9), (12, 0)})  # compute capabilities with half as many
FLOAT32_PRODUCTS = 6  # a multiply-add of 3xTF32 takes as long as that many
SCORES = 128  # on which a multiprocessor works in a cycle
WAITING = 1024  # cycles a tile
ONE_STAGE = 1.35  # times as many
UNSWIZZLED = 1.5  # times as long to read
REGISTERS_BESIDES = 64  # what a thread takes beyond `MmaConfig.registers`


def cycles_per_score(config: MmaConfig, spec: Spec, device: DeviceInfo) -> float:
    """Cycles of a multiprocessor for one score, softmax and both products included, on a GPU that is full.

    Only ratios are meant.

    Examples
    --------
    >>> from cuflash.config import MmaConfig
    >>> from cuflash.cost_model import cycles_per_score
    >>> from cuflash.device import known_device
    >>> from cuflash.problem import Spec
    >>> wide, narrow = (MmaConfig(b_r=128, b_c=b_c, warps=4, stages=1, swizzle=True) for b_c in (64, 16))
    >>> spec, device = Spec("float16", 128, 128), known_device("sm_80")
    >>> cycles_per_score(wide, spec, device) < cycles_per_score(narrow, spec, device)
    True
    """
    item, columns = ITEM_BYTES[spec.dtype], spec.d + spec.d_v
    warp_rows = config.b_r // config.warps
    rate = PRODUCTS / (2 if device.compute_capability in HALF_RATE else 1)
    rate /= FLOAT32_PRODUCTS if spec.dtype == "float32" else 1
    products = warp_rows * config.b_c * columns / (rate / QUARTERS)
    scores = warp_rows * config.b_c / (SCORES / QUARTERS)
    # Every warp reads all of K and V, and its rows of Q unless they stay in registers; and K and V are written once.
    moved = (config.warps + 1) * config.b_c * columns * item
    moved += 0 if config.q_in_registers else config.b_r * spec.d * item
    is_swizzled = config.swizzle and spec.d * item % 128 == 0 and spec.d_v * item % 128 == 0
    reads = moved / SHARED_BYTES * (1 if is_swizzled else UNSWIZZLED)

    blocks = resident_blocks(config, spec, device)
    turns = -(-blocks * config.warps // QUARTERS)  # warps of a quarter
    parts = (turns * products, turns * scores, blocks * reads)
    longest = max(parts)
    copies_ahead = config.stages > 1 and config.async_copy
    waiting = WAITING * (1 if copies_ahead else ONE_STAGE)
    cycles = longest + (sum(parts) - longest) / turns + waiting
    return cycles / (blocks * config.b_r * config.b_c)


def resident_blocks(config: MmaConfig, spec: Spec, device: DeviceInfo) -> int:
    """Blocks that a multiprocessor holds, by what is known before compiling."""
    limit = min(REGISTERS_PER_THREAD, REGISTERS_PER_BLOCK // (config.threads * config.min_blocks))
    registers = min(config.registers(spec) + REGISTERS_BESIDES, limit)
    by_registers = REGISTERS_PER_BLOCK // (config.threads * (-(-registers // 8) * 8))
    by_shared = (device.shared_bytes + RESERVED_BYTES) // (config.shared_bytes(spec) + RESERVED_BYTES)
    return max(1, min(by_registers, by_shared))
