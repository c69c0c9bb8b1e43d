"""Tile configurations of the backward pass: what may be chosen of a family, and what is legal for a Spec on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from cuflash.config import (
    FLOAT_BYTES,
    HOPPER,
    MOST_WARPS,
    PANEL_COLUMNS,
    REGISTERS_PER_BLOCK,
    RESERVED_BYTES,
    SWIZZLE_BYTES,
    WARP,
    WARPGROUP_ROWS,
    mma_row_bytes,
    require_bool,
    require_positive,
    why_no_room,
    why_not_mma,
    why_not_these_instructions,
    why_not_wgmma,
)
from cuflash.device import DeviceInfo
from cuflash.problem import ITEM_BYTES, VECTOR_BYTES, Spec

STATISTICS_LANES = 4  # that share a row, as in backward_statistics.cuh
STATISTICS_ROWS = 128  # of a head, or a multiple: what its row statistics fill up, so that every tile finds its own

# Registers of a thread that copies, that multiplies dS and K, and of a consumer: all that a launch of 512 threads gives
BACKWARD_WGMMA_REGISTERS = (32, 64, 208)
SPLIT_REGISTERS = (24, 0, 240)  # the same of 384 threads, of which none multiply dS and K
MOST_COLUMNS = 128  # of dK and dV in one instruction


@dataclass(frozen=True)
class BackwardSimtConfig:
    """Tiles of the CUDA-core family, backward.

    A block of one pass owns `b_c` keys and walks over tiles of `b_r` query rows; one of the other owns `b_r` rows and
    walks over tiles of `b_c` keys.

    Attributes
    ----------
    b_r, b_c : int
        Query rows and keys of a tile.
    threads : int
        Threads of a block.
    lanes_per_row : int
        Neighbouring lanes of a warp that share the rows, or keys, that they own.
    both_tiles : bool
        Whether both tiles that pass by, Q and dO or K and V, have shared memory of their own, rather than one after the
        other, and the first once more.
    """

    b_r: int
    b_c: int
    threads: int
    lanes_per_row: int
    both_tiles: bool = True

    family: ClassVar[str] = "simt"

    def __post_init__(self) -> None:
        require_positive(self, "b_r", "b_c", "threads", "lanes_per_row")
        require_bool(self, "both_tiles")

    def constants(self) -> dict[str, int]:
        """The named constants of the kernel."""
        return {
            "kBr": self.b_r,
            "kBc": self.b_c,
            "kThreads": self.threads,
            "kLanesPerRow": self.lanes_per_row,
            "kBothTiles": self.both_tiles,
        }

    def shared_bytes(self, spec: Spec) -> int:
        """Dynamic shared memory of a block: the owner's tiles, those that pass by, P; as in backward_simt.cu."""
        return max(self._shared_bytes(spec, self.b_c, self.b_r), self._shared_bytes(spec, self.b_r, self.b_c))

    def _shared_bytes(self, spec: Spec, own: int, other: int) -> int:
        item = ITEM_BYTES[spec.accumulator]
        first, second = (d + VECTOR_BYTES // item for d in (spec.d, spec.d_v))
        passing = first + second if self.both_tiles else max(first, second)
        pad = VECTOR_BYTES // item if item == 8 else self.lanes_per_row
        return (own * (first + second) + other * passing + own * (other + pad)) * item

    def registers(self, spec: Spec) -> int:
        """The registers that a thread's sums, S and dP and one step's operands take: a lower bound."""
        words = ITEM_BYTES[spec.accumulator] // 4
        groups = self.threads // self.lanes_per_row
        of_keys = self.b_c // groups * ((spec.d + spec.d_v) // self.lanes_per_row + 2 * self.b_r // self.lanes_per_row)
        of_rows = self.b_r // groups * (spec.d // self.lanes_per_row + 2 * self.b_c // self.lanes_per_row + 3)
        return words * max(of_keys, of_rows) + 4 * max(self.b_r, self.b_c) // self.lanes_per_row

    def why_illegal(self, spec: Spec, device: DeviceInfo) -> str | None:
        """None where the configuration is legal, else the rule that it breaks and by what."""
        if self.threads % WARP or not WARP <= self.threads <= 1024:
            return f"threads must be a multiple of 32 from 32 to 1024, got {self.threads}"
        if self.lanes_per_row not in (4, 8, 16):
            return f"lanes_per_row must be 4, 8 or 16, got {self.lanes_per_row}"
        groups = self.threads // self.lanes_per_row
        for name in ("b_r", "b_c"):
            if (tile := getattr(self, name)) % groups or tile % self.lanes_per_row:
                unit = f"threads / lanes_per_row = {groups} and of lanes_per_row = {self.lanes_per_row}"
                return f"{name} must be a multiple of {unit}, got {tile}"
        if STATISTICS_ROWS % self.b_r:
            return f"b_r must divide {STATISTICS_ROWS}, got {self.b_r}"
        return why_no_room(self, spec, device)


DQ_ROWS = 32  # of a warp, where it computes dQ; as in backward_mma.cu


@dataclass(frozen=True)
class BackwardMmaConfig:
    """Tiles of the tensor-core family, `mma.sync`, backward.

    Attributes
    ----------
    b_r, b_c : int
        Query rows and keys of a tile.
    warps : int
        Warps of a block.
    key_warps : int
        Groups of warps; each owns ``b_c / key_warps`` keys, and its warps share the rows, and the columns of dK and dV.
    stages : {1, 2}
        Pairs of Q and dO tiles in shared memory.
    swizzle : bool
        Whether rows of a multiple of 128 bytes are kept out of each other's banks by swizzling, rather than by padding.
    min_blocks : int
        Blocks that a multiprocessor is to hold; the compiler limits registers to that end.
    mma_k : {16, 8}
        Depth of one instruction: 8 is the form of sm_75.
    async_copy : bool
        Whether `cp.async` brings tiles; sm_75 does not have it.
    vector_adds : bool
        Whether four numbers at a time are added to dQ in device memory; sm_90 has that.
    """

    b_r: int
    b_c: int
    warps: int
    key_warps: int
    stages: int = 2
    swizzle: bool = True
    min_blocks: int = 1
    mma_k: int = 16
    async_copy: bool = True
    vector_adds: bool = True

    family: ClassVar[str] = "mma"

    def __post_init__(self) -> None:
        require_positive(self, "b_r", "b_c", "warps", "key_warps", "stages", "min_blocks", "mma_k")
        require_bool(self, "swizzle", "async_copy", "vector_adds")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARP * self.warps

    def constants(self) -> dict[str, int]:
        """The named constants of the kernel."""
        return {
            "kBr": self.b_r,
            "kBc": self.b_c,
            "kThreads": self.threads,
            "kWarps": self.warps,
            "kKeyWarps": self.key_warps,
            "kStages": self.stages,
            "kSwizzle": self.swizzle,
            "kMinBlocks": self.min_blocks,
            "kMmaK": self.mma_k,
            "kAsyncCopy": self.async_copy,
            "kVectorAdds": self.vector_adds,
        }

    def row_bytes(self, columns: int, spec: Spec) -> int:
        """From one row of a tile in shared memory to the next."""
        return mma_row_bytes(columns, spec, self.swizzle)

    def row_tile_bytes(self, spec: Spec) -> int:
        """Shared memory of a tile of Q."""
        return self.b_r * self.row_bytes(spec.d, spec)

    def shared_bytes(self, spec: Spec) -> int:
        """Dynamic shared memory of a block: K and V, stages of Q, dO and row statistics, P and twice dS."""
        both = self.row_bytes(spec.d, spec) + self.row_bytes(spec.d_v, spec)
        stage = self.b_r * (both + ITEM_BYTES[spec.lse_dtype] + FLOAT_BYTES)
        return self.b_c * both + self.stages * stage + 3 * self.b_c * self.row_bytes(self.b_r, spec)

    def resident_blocks(self, spec: Spec, device: DeviceInfo) -> int:
        """Blocks that a multiprocessor holds, at most."""
        by_shared = (device.shared_bytes + RESERVED_BYTES) // (self.shared_bytes(spec) + RESERVED_BYTES)
        return max(1, min(by_shared, self.min_blocks))

    def sums_of_tile(self, spec: Spec) -> int:
        """How many numbers the dQ of a row tile is summed in: whole fragments of every warp."""
        pairs = -(-spec.d // (16 * (self.warps * DQ_ROWS // self.b_r)))
        return self.warps * DQ_ROWS * 16 * pairs

    def registers(self, spec: Spec) -> int:
        """A lower bound on registers: dK, dV, S and dP of a warp."""
        aside = self.warps // self.key_warps
        keys = self.b_c // self.key_warps
        columns = 16 * (-(-spec.d // (16 * aside)) + -(-spec.d_v // (16 * aside)))
        return keys * (columns + 2 * self.b_r // aside) // WARP

    def why_illegal(self, spec: Spec, device: DeviceInfo) -> str | None:
        """None where the configuration is legal, else the rule that it breaks and by what."""
        if reason := why_not_backward_mma(spec, device):
            return reason
        if self.warps > MOST_WARPS:
            return f"warps must be at most {MOST_WARPS}, got {self.warps}"
        if self.warps % self.key_warps or (aside := self.warps // self.key_warps) not in (1, 2, 4):
            return f"warps / key_warps must be 1, 2 or 4, got {self.warps} / {self.key_warps}"
        if self.b_r not in (32, 64, 128) or self.b_r % (16 * aside):
            return f"b_r must be 32, 64 or 128 and a multiple of 16 * warps / key_warps = {16 * aside}, got {self.b_r}"
        if self.warps % (dq_row_warps := self.b_r // DQ_ROWS) or self.warps // dq_row_warps not in (1, 2, 4, 8):
            return f"warps must be b_r / {DQ_ROWS} = {dq_row_warps} times 1, 2, 4 or 8, got {self.warps}"
        if self.b_c % (16 * self.key_warps):
            return f"b_c must be a multiple of 16 * key_warps = {16 * self.key_warps}, got {self.b_c}"
        if self.stages > 2:
            return f"stages must be 1 or 2, got {self.stages}"
        if reason := why_not_these_instructions(spec, device, self.mma_k, self.async_copy):
            return reason
        if self.vector_adds and device.compute_capability < HOPPER:
            return f"vector_adds needs sm_90 or newer, {device.name} is {device.architecture}"
        return why_no_room(self, spec, device, REGISTERS_PER_BLOCK // (self.threads * self.min_blocks))


def why_not_backward_mma(spec: Spec, device: DeviceInfo) -> str | None:
    """Why tensor cores do not serve the backward pass of `spec` on `device`; None where they do."""
    return why_not_mma(spec, device)


@dataclass(frozen=True)
class BackwardWgmmaConfig:
    """Tiles of the Hopper family, `wgmma` and TMA, backward.

    A block owns `b_c` keys and walks over tiles of `b_r` query rows. Of four warpgroups one asks for copies, one
    multiplies dS and K, and two are consumers. With 64 keys there are three, for dQ has a kernel of its own, whose
    blocks own 128 rows.

    Attributes
    ----------
    b_r : int
        Query rows of a tile.
    b_c : {128, 64}
        Keys of a tile: 64 for each consumer, or 64 that both own, one of them for dV and the other for dK.
    k_stages : int
        Tiles of K in shared memory: with 2, the next one arrives early.
    dq_stages : int
        Pieces of dQ, 64 rows of up to 64 columns, in shared memory; 2 where dQ has a kernel of its own.
    waves : int
        How many times as many tiles of keys are worked on together, of as many heads as that takes, as there are
        multiprocessors.
    """

    b_r: int
    b_c: int = 128
    k_stages: int = 1
    dq_stages: int = 2
    waves: int = 1

    family: ClassVar[str] = "wgmma"
    consumers: ClassVar[int] = 2
    row_stages: ClassVar[int] = 2  # of Q and dO, and of dS where it is in shared memory
    threads: ClassVar[int] = 256  # of the row statistics

    def __post_init__(self) -> None:
        require_positive(self, "b_r", "b_c", "k_stages", "dq_stages", "waves")

    @property
    def tile_threads(self) -> int:
        """Threads of a block that walks over tiles."""
        return 384 if self.splits_products else 512

    @property
    def owned_rows(self) -> int:
        """Rows of a block of the kernel that makes dQ."""
        return self.consumers * WARPGROUP_ROWS

    @property
    def splits_products(self) -> bool:
        """Whether the consumers share out the products of the same keys, rather than the keys."""
        return self.b_c == WARPGROUP_ROWS

    def constants(self) -> dict[str, int]:
        """The named constants of the kernel."""
        copy, dq, consumer = SPLIT_REGISTERS if self.splits_products else BACKWARD_WGMMA_REGISTERS
        return {
            "kBr": self.b_r,
            "kBc": self.b_c,
            "kThreads": self.threads,
            "kConsumers": self.consumers,
            "kKStages": self.k_stages,
            "kDqStages": self.dq_stages,
            "kCopyRegisters": copy,
            "kDqWarpgroupRegisters": dq,
            "kConsumerRegisters": consumer,
        }

    def pieces(self, spec: Spec) -> int:
        """Pieces of dQ of a tile of rows: 64 rows of a panel."""
        return self.b_r // WARPGROUP_ROWS * -(-spec.d // PANEL_COLUMNS)

    def piece_floats(self, spec: Spec) -> int:
        """Sums of a piece of dQ."""
        return WARPGROUP_ROWS * min(spec.d, PANEL_COLUMNS)

    def products(self, spec: Spec) -> dict[str, tuple[int, ...]]:
        """The shapes of wgmma that the kernel uses: those of K Q^T and V dO^T, of P^T dO and dS^T Q, of dS K."""
        scores, dq = (self.b_r,), (min(spec.d, PANEL_COLUMNS),)
        sums = (min(d - first, MOST_COLUMNS) for d in (spec.d, spec.d_v) for first in range(0, d, MOST_COLUMNS))
        return {
            **{"wgmma_ss_first": scores, "wgmma_ss": scores, "wgmma_rs": tuple(sums)},
            **{"wgmma_ts_first": dq, "wgmma_ts": dq},
        }

    def shared_bytes(self, spec: Spec) -> int:
        """Dynamic shared memory of a block, of whichever kernel takes most."""
        return max(self.key_shared_bytes(spec), self.row_shared_bytes(spec))

    def key_shared_bytes(self, spec: Spec) -> int:
        """The same of a block that owns keys, as in wgmma_backward_shared.cuh, and what its alignment may cost."""
        qk, v = (-(-d // PANEL_COLUMNS) * PANEL_COLUMNS * ITEM_BYTES[spec.dtype] for d in (spec.d, spec.d_v))
        keys = self.b_c * (self.k_stages * qk + v)
        rows = self.row_stages * self.b_r * (qk + v + 2 * FLOAT_BYTES)
        ds = self.row_stages * self.b_r * self.b_c * ITEM_BYTES[spec.dtype]
        pieces = self.dq_stages * self.piece_floats(spec) * FLOAT_BYTES
        handed_on = self.b_r * self.b_c * FLOAT_BYTES if self.splits_products else ds + pieces
        barriers = 8 * (3 * self.k_stages + 2 + 6 * self.row_stages + 2 * self.dq_stages + 2 + self.row_stages)
        beside_k = -(-(barriers + 4 * 3 * self.k_stages) // 16) * 16
        return keys + rows + handed_on + beside_k + 12 * FLOAT_BYTES + SWIZZLE_BYTES

    def row_shared_bytes(self, spec: Spec) -> int:
        """The same of a block that owns rows, as in wgmma_backward_rows.cuh; 0 where it only adds up."""
        if not self.splits_products:
            return 0
        qk, v = (-(-d // PANEL_COLUMNS) * PANEL_COLUMNS * ITEM_BYTES[spec.dtype] for d in (spec.d, spec.d_v))
        tiles = self.owned_rows * (qk + v) + self.b_c * (2 * qk + v)
        return tiles + 8 * (6 + 2 * 2) + 16 + self.consumers * 12 * FLOAT_BYTES + SWIZZLE_BYTES

    def registers(self, spec: Spec) -> int:
        """The registers that dK, dV, S or dP, P and dS take, a consumer's thread: a lower bound."""
        halves = 2 if spec.softcap else 1  # P or dS, and slopes, two in a register
        features = 24 if spec.mask or spec.bias else 0
        if self.splits_products:
            of_keys = max(spec.d, spec.d_v) // 2 + self.b_r // 2 + self.b_r // 4
            of_rows = spec.d // 2 + 2 * self.b_c // 2 + self.b_c // 4
            return max(of_keys, of_rows) + features
        return (spec.d + spec.d_v) // 2 + self.b_r // 2 + halves * self.b_r // 4 + features

    def why_illegal(self, spec: Spec, device: DeviceInfo) -> str | None:
        """None where the configuration is legal, else the rule that it breaks and by what."""
        if reason := why_not_wgmma(spec, device):
            return reason
        if self.b_r not in (WARPGROUP_ROWS, 2 * WARPGROUP_ROWS):
            return f"b_r must be 64 or 128, got {self.b_r}"
        if self.b_c not in (WARPGROUP_ROWS, 2 * WARPGROUP_ROWS):
            return f"b_c must be 64 or 128, got {self.b_c}"
        if self.splits_products and self.b_r != WARPGROUP_ROWS:
            return f"b_r must be 64 where b_c is, got {self.b_r}"
        if self.splits_products and self.dq_stages != 2:
            return f"dq_stages must be 2 where b_c is 64, for no pieces of dQ are summed, got {self.dq_stages}"
        if self.k_stages > 2:
            return f"k_stages must be 1 or 2, got {self.k_stages}"
        if self.dq_stages < 2:
            return f"dq_stages must be 2 or more, got {self.dq_stages}"
        if (needed := self.shared_bytes(spec)) > device.shared_bytes:
            return f"the tiles need {needed} bytes of shared memory, {device.name} has {device.shared_bytes} a block"
        available = self.constants()["kConsumerRegisters"]
        if (needed := self.registers(spec)) > available - 32:
            return f"accumulators need {needed} of {available} registers a thread"
        return None


BackwardConfig = BackwardSimtConfig | BackwardMmaConfig | BackwardWgmmaConfig
