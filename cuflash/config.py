"""Tile configurations: what may be chosen of a kernel family, and what is legal for a Spec on a GPU.

A configuration is data: integers that are checked here before they are rendered into a kernel. The planner, the tuner
and every error message ask `why_illegal`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from cuflash.device import DeviceInfo
from cuflash.problem import ITEM_BYTES, Spec

WARP = 32
REGISTERS_PER_THREAD = 255
OTHER_REGISTERS = 40  # than for accumulators and operands: addresses, counters
REGISTERS_PER_BLOCK = 65536
MOST_WARPS = 16
AMPERE = (8, 0)
FLOAT_BYTES = 4
RESERVED_BYTES = 1024  # of shared memory, for each block that is resident
HOPPER = (9, 0)


@dataclass(frozen=True)
class NumpyConfig:
    """Tiles of the NumPy path: `b_r` query rows by `b_c` keys."""

    b_r: int
    b_c: int

    family: ClassVar[str] = "numpy"

    def __post_init__(self) -> None:
        require_positive(self, "b_r", "b_c")


@dataclass(frozen=True)
class SimtConfig:
    """Tiles of the CUDA-core family.

    Attributes
    ----------
    b_r, b_c : int
        Query rows and keys of a tile.
    threads : int
        Threads of a block.
    lanes_per_row : int
        Neighbouring lanes of a warp that share the rows they own; each owns ``b_c / lanes_per_row`` columns of S and
        ``d_v / lanes_per_row`` columns of O in ``b_r * lanes_per_row / threads`` rows.
    """

    b_r: int
    b_c: int
    threads: int
    lanes_per_row: int

    family: ClassVar[str] = "simt"

    def __post_init__(self) -> None:
        require_positive(self, "b_r", "b_c", "threads", "lanes_per_row")

    def constants(self) -> dict[str, int]:
        """The named constants of the kernel."""
        return {"kBr": self.b_r, "kBc": self.b_c, "kThreads": self.threads, "kLanesPerRow": self.lanes_per_row}

    def shared_bytes(self, spec: Spec) -> int:
        """Dynamic shared memory of a block: Q, one buffer that K and V take in turn, P; as in forward_simt.cu."""
        item = ITEM_BYTES[spec.accumulator]
        pad = 16 // item
        q = self.b_r * (spec.d + pad)
        kv = self.b_c * (max(spec.d, spec.d_v) + pad)
        p = self.b_r * (self.b_c + self.lanes_per_row)
        return (q + kv + p) * item

    def registers(self, spec: Spec) -> int:
        """The registers that the accumulators O and S and one step's operands take, a thread: a lower bound."""
        words = ITEM_BYTES[spec.accumulator] // 4
        rows = self.b_r * self.lanes_per_row // self.threads
        columns = self.b_c // self.lanes_per_row
        out = spec.d_v // self.lanes_per_row
        return words * (rows * (columns + out) + 2 * rows) + 4 * columns

    def why_illegal(self, spec: Spec, device: DeviceInfo) -> str | None:
        """None where the configuration is legal, else the rule that it breaks and by what."""
        if self.threads % WARP or not WARP <= self.threads <= 1024:
            return f"threads must be a multiple of 32 from 32 to 1024, got {self.threads}"
        if self.lanes_per_row not in (4, 8, 16):
            return f"lanes_per_row must be 4, 8 or 16, got {self.lanes_per_row}"
        groups = self.threads // self.lanes_per_row
        if self.b_r % groups:
            return f"b_r must be a multiple of threads / lanes_per_row = {groups}, got {self.b_r}"
        if self.b_c % max(self.lanes_per_row, 4):
            return f"b_c must be a multiple of lanes_per_row = {self.lanes_per_row}, got {self.b_c}"
        return why_no_room(self, spec, device)


@dataclass(frozen=True)
class MmaConfig:
    """Tiles of the tensor-core family, `mma.sync`.

    Attributes
    ----------
    b_r, b_c : int
        Query rows and keys of a tile. Each warp owns ``b_r / warps`` rows, a multiple of 16.
    warps : int
        Warps of a block.
    stages : int
        Pairs of K and V tiles in shared memory.
    q_in_registers : bool
        Whether Q stays in registers, rather than being read from shared memory for every tile.
    swizzle : bool
        Whether rows of a multiple of 128 bytes are kept out of each other's banks by swizzling, rather than by padding.
    min_blocks : int
        Blocks that a multiprocessor is to hold; the compiler limits registers to that end.
    mma_k : {16, 8}
        Depth of one instruction: 8 is the form of sm_75, and that of float32 (TF32).
    async_copy : bool
        Whether `cp.async` brings K and V; sm_75 does not have it.
    pack_gqa : bool
        Whether the rows of a tile are those of all query heads that share a head of K and V.
    tile_sums : bool
        Whether P V of a tile is summed on its own, because O of very many keys would lose what is added to it.
    """

    b_r: int
    b_c: int
    warps: int
    stages: int = 2
    q_in_registers: bool = False
    swizzle: bool = False
    min_blocks: int = 1
    mma_k: int = 16
    async_copy: bool = True
    pack_gqa: bool = False
    tile_sums: bool = False

    family: ClassVar[str] = "mma"

    def __post_init__(self) -> None:
        require_positive(self, "b_r", "b_c", "warps", "stages", "min_blocks", "mma_k")
        require_bool(self, "q_in_registers", "swizzle", "async_copy", "pack_gqa", "tile_sums")

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
            "kStages": self.stages,
            "kQInRegisters": self.q_in_registers,
            "kSwizzle": self.swizzle,
            "kMinBlocks": self.min_blocks,
            "kMmaK": self.mma_k,
            "kAsyncCopy": self.async_copy,
            "kPackGqa": self.pack_gqa,
            "kTileSums": self.tile_sums,
        }

    def row_bytes(self, columns: int, spec: Spec) -> int:
        """From one row of a tile in shared memory to the next."""
        return mma_row_bytes(columns, spec, self.swizzle)

    def shared_bytes(self, spec: Spec) -> int:
        """Dynamic shared memory of a block: Q, stages of K and V, two tiles' bias; O takes their place in the end."""
        qk, v = self.row_bytes(spec.d, spec), self.row_bytes(spec.d_v, spec)
        bias = 0 if spec.bias is None else 2 * self.b_c * FLOAT_BYTES
        return max(self.b_r * qk + self.stages * self.b_c * (qk + v) + bias, self.b_r * v)

    def resident_warps(self, spec: Spec, device: DeviceInfo) -> int:
        """Warps that a multiprocessor holds of blocks that use all the registers there are for a thread."""
        by_shared = (device.shared_bytes + RESERVED_BYTES) // (self.shared_bytes(spec) + RESERVED_BYTES)
        by_registers = max(REGISTERS_PER_BLOCK // (self.threads * (REGISTERS_PER_THREAD + 1)), self.min_blocks)
        return self.warps * min(by_shared, by_registers)

    def registers(self, spec: Spec) -> int:
        """A lower bound on registers: the accumulators O and S, the row statistics, and Q if it stays."""
        row_blocks = self.b_r // (16 * self.warps)
        q = spec.d * ITEM_BYTES[spec.dtype] // 8 if self.q_in_registers else 4
        return row_blocks * ((spec.d_v + self.b_c) // 2 + q + 4)

    def why_illegal(self, spec: Spec, device: DeviceInfo) -> str | None:
        """None where the configuration is legal, else the rule that it breaks and by what."""
        if reason := why_not_mma(spec, device):
            return reason
        if self.warps > MOST_WARPS:
            return f"warps must be at most {MOST_WARPS}, got {self.warps}"
        if self.b_r % (16 * self.warps):
            return f"b_r must be a multiple of 16 * warps = {16 * self.warps}, got {self.b_r}"
        if self.b_c % 16:
            return f"b_c must be a multiple of 16, got {self.b_c}"
        if reason := why_not_these_instructions(spec, device, self.mma_k, self.async_copy):
            return reason
        return why_no_room(self, spec, device, REGISTERS_PER_BLOCK // (self.threads * self.min_blocks))


WARPGROUP = 128
WARPGROUP_ROWS, WARP_ROWS = 64, 16
PANEL_COLUMNS = 64
SWIZZLE_BYTES = 1024  # where a swizzled tile is aligned to
STAGE_BYTES = 4 * 16 * 128  # for a panel of the rows of a warpgroup on its way out
HOPPER_SHARED_BYTES = 227 << 10  # of a block
KEY_WORK_BYTES, ROW_WORK_BYTES = 16, 48  # of a tile of rows, for the thread that asks for K and V, for a warpgroup
MEGABYTE = 1 << 20

# Registers of a producer and a consumer thread by consumer warpgroups; (0, 0) leaves them as they are. A launch gives
# every thread 65536 / threads of them, rounded down to a multiple of 8; no more than that in all is there to share out.
WGMMA_REGISTERS = {1: (0, 0), 2: (40, 232), 3: (32, 160), 4: (32, 112)}


@dataclass(frozen=True)
class WgmmaConfig:
    """Tiles of the Hopper family, `wgmma` and TMA.

    Attributes
    ----------
    consumers : int
        Warpgroups that compute, of 64 query rows each; one more asks for the copies.
    b_c : int
        Keys of a tile.
    stages : int
        Tiles of K, and of V, in shared memory.
    q_stages : int
        Tiles of Q of each warpgroup in shared memory: with 2, the next rows' Q arrives early.
    ping_pong : bool
        Whether warpgroups take turns in issuing products.
    speculative : bool
        Whether a row keeps its reference maximum until its sums show that it must be raised, instead of looking at the
        maximum of every tile.
    section_mb : int
        How many megabytes of K and V are worked on at a time where rows differ in length, so that they stay in L2.
    """

    consumers: int
    b_c: int
    stages: int = 2
    q_stages: int = 1
    ping_pong: bool = True
    speculative: bool = True
    section_mb: int = 16

    family: ClassVar[str] = "wgmma"

    def __post_init__(self) -> None:
        require_positive(self, "consumers", "b_c", "stages", "q_stages", "section_mb")
        require_bool(self, "ping_pong", "speculative")

    @property
    def b_r(self) -> int:
        """Query rows of a tile."""
        return WARPGROUP_ROWS * self.consumers

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return WARPGROUP * (self.consumers + 1)

    def constants(self) -> dict[str, int]:
        """The named constants of the kernel."""
        producer, consumer = WGMMA_REGISTERS.get(self.consumers, (0, 0))
        return {
            "kBr": self.b_r,
            "kBc": self.b_c,
            "kThreads": self.threads,
            "kConsumers": self.consumers,
            "kStages": self.stages,
            "kQStages": self.q_stages,
            "kProducerRegisters": producer,
            "kConsumerRegisters": consumer,
            "kPingPong": self.ping_pong,
            "kSpeculative": self.speculative,
        }

    def shared_bytes(self, spec: Spec) -> int:
        """Dynamic shared memory of a block, as in the map of wgmma_shared.cuh, and what its alignment may cost."""
        return self._bytes_beside_stage(spec) + self.stage_panels(spec) * STAGE_BYTES * self.consumers

    def stage_panels(self, spec: Spec) -> int:
        """How many panels of O each warpgroup has room for on their way out: all of them if they fit, one at least."""
        room = (HOPPER_SHARED_BYTES - self._bytes_beside_stage(spec)) // (STAGE_BYTES * self.consumers)
        return min(max(1, room), -(-spec.d_v // PANEL_COLUMNS))

    def _bytes_beside_stage(self, spec: Spec) -> int:
        qk, v = (-(-d // PANEL_COLUMNS) * PANEL_COLUMNS * ITEM_BYTES[spec.dtype] for d in (spec.d, spec.d_v))
        q_tiles = self.q_stages * self.consumers
        tiles = q_tiles * WARPGROUP_ROWS * qk + self.stages * self.b_c * (qk + v)
        barriers = 8 * (4 * self.stages + 2 * q_tiles + 2)
        bias = (self.stages + 1) * self.b_c * FLOAT_BYTES if spec.bias_of_keys else 0
        return tiles + barriers + KEY_WORK_BYTES + ROW_WORK_BYTES * q_tiles + bias + SWIZZLE_BYTES

    def products(self, spec: Spec) -> dict[str, tuple[int, ...]]:
        """The shapes of wgmma that the kernel uses: those of Q K^T and of P V."""
        return {"wgmma_ss": (self.b_c,), "wgmma_rs": (spec.d_v,)}

    def registers(self, spec: Spec) -> int:
        """The registers that O, S and P take, a thread: a lower bound."""
        return spec.d_v // 2 + self.b_c // 2 + self.b_c // 4

    def why_illegal(self, spec: Spec, device: DeviceInfo) -> str | None:
        """None where the configuration is legal, else the rule that it breaks and by what."""
        if reason := why_not_wgmma(spec, device):
            return reason
        if self.consumers not in WGMMA_REGISTERS:
            return f"consumers must be 1 to {max(WGMMA_REGISTERS)}, got {self.consumers}"
        if self.b_c % 16 or self.b_c > 256:
            return f"b_c must be a multiple of 16 up to 256, got {self.b_c}"
        if self.ping_pong and self.consumers == 1:
            return "ping_pong needs two consumers or more, got 1"
        if (needed := self.shared_bytes(spec)) > device.shared_bytes:
            return f"the tiles need {needed} bytes of shared memory, {device.name} has {device.shared_bytes} a block"
        available = WGMMA_REGISTERS[self.consumers][1] or REGISTERS_PER_THREAD
        if (needed := self.registers(spec)) > available - 32:
            return f"accumulators need {needed} of {available} registers a thread"
        return None


def why_not_wgmma(spec: Spec, device: DeviceInfo) -> str | None:
    """Why wgmma and TMA do not serve `spec` on `device`; None where they do."""
    if device.compute_capability != HOPPER:
        return f"wgmma needs sm_90, {device.name} is {device.architecture}"
    if ITEM_BYTES[spec.dtype] != 2:
        return f"wgmma serves float16 and bfloat16, got {spec.dtype}"
    if not spec.aligned:
        return "TMA needs rows that start at, and consist of, whole 16-byte vectors"
    return None


def why_not_mma(spec: Spec, device: DeviceInfo) -> str | None:
    """Why tensor cores do not serve `spec` on `device`; None where they do."""
    if spec.dtype == "float64":
        return "float64 is computed on CUDA cores"
    if spec.dtype != "float16" and device.compute_capability < AMPERE:
        return f"{spec.dtype} on tensor cores needs sm_80 or newer, {device.name} is {device.architecture}"
    return None


def mma_depths(spec: Spec, device: DeviceInfo) -> tuple[int, ...]:
    """The legal values of `mma_k`."""
    if spec.dtype == "float32" or device.compute_capability < AMPERE:
        return (8,)
    return (16,) if spec.dtype == "bfloat16" else (16, 8)


def why_not_these_instructions(spec: Spec, device: DeviceInfo, mma_k: int, async_copy: bool) -> str | None:
    """Why `device` does not have these forms of `mma.sync` and of copies for `spec`; None where it does."""
    if mma_k not in (depths := mma_depths(spec, device)):
        legal = " or ".join(map(str, depths))
        return f"mma_k must be {legal} for {spec.dtype} on {device.architecture}, got {mma_k}"
    if async_copy and device.compute_capability < AMPERE:
        return f"async_copy needs sm_80 or newer, {device.name} is {device.architecture}"
    return None


def mma_row_bytes(columns: int, spec: Spec, swizzle: bool) -> int:
    """From one row of a tile in shared memory to the next; as TileLayout in mma_tile.cuh."""
    row = columns * ITEM_BYTES[spec.dtype]
    return row if swizzle and row % 128 == 0 else row + 16


class Tiles(Protocol):
    """A configuration, as far as it takes room."""

    def shared_bytes(self, spec: Spec) -> int:
        """Dynamic shared memory of a block."""

    def registers(self, spec: Spec) -> int:
        """A lower bound on the registers of a thread."""


def why_no_room(tiles: Tiles, spec: Spec, device: DeviceInfo, registers: int = REGISTERS_PER_THREAD) -> str | None:
    """Why `tiles` do not fit shared memory, or the `registers` that there are for a thread; None where they do."""
    if (needed := tiles.shared_bytes(spec)) > device.shared_bytes:
        return f"the tiles need {needed} bytes of shared memory, {device.name} has {device.shared_bytes} a block"
    available = min(registers, REGISTERS_PER_THREAD)
    if (needed := tiles.registers(spec)) > available - OTHER_REGISTERS:
        return f"accumulators and operands need {needed} of {available} registers a thread"
    return None


TileConfig = NumpyConfig | SimtConfig | MmaConfig | WgmmaConfig


def require_positive(config: object, *names: str) -> None:
    """Refuse anything but positive integers in the fields `names`."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{type(config).__name__}.{name} must be a positive int, got {value!r}")


def require_bool(config: object, *names: str) -> None:
    """Refuse anything but booleans in the fields `names`."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise ValueError(f"{type(config).__name__}.{name} must be True or False, got {value!r}")
