"""Tensor maps: what TMA is told of an array and of the box that one copy takes of it. The driver makes them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

from cuflash.problem import ITEM_BYTES, Problem

MAP_BYTES = 128
MAP_ALIGNMENT = 128
MAX_STRIDE = 2**40  # bytes
MAX_KNOWN_ADDRESSES = 1024
PANEL_COLUMNS = 64  # of 16-bit elements: what the 128-byte swizzle spans

# Of cuda.h: CUtensorMapDataType and the modes of CUtensorMapInterleave, ...Swizzle, ...L2promotion, ...FloatOOBfill.
DATA_TYPES = {"float16": 6, "bfloat16": 9}
INTERLEAVE_NONE, SWIZZLE_128B, L2_PROMOTION_256B, FILL_WITH_ZEROS = 0, 3, 3, 0


class MapLayout(NamedTuple):
    """An array and its box but for the address, innermost axis first: (column, row, head, batch entry).

    `strides` are in bytes and leave the innermost axis out.
    """

    dtype: str
    extents: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    box: tuple[int, int, int, int]


def why_no_tensor_map(problem: Problem, writes_out: bool = True) -> str | None:
    """Why q, k, v, or out where TMA writes it, cannot be described to TMA; None where they can.

    Alignment is `Spec.aligned`.
    """
    if problem.n_k == 0 or problem.d_v == 0:
        return "TMA does not read empty arrays"
    rank = len(problem.batch)
    rows_of = {"q": problem.n_q, "k": problem.n_k, "v": problem.n_k, **({"out": problem.n_q} if writes_out else {})}
    for name, rows in rows_of.items():
        if reason := why_no_map(name, problem.spec.dtype, rows, problem.strides[name][: rank + 2]):
            return reason
    return None


def why_no_map(name: str, dtype: str, rows: int, strides: tuple[int, ...]) -> str | None:
    """Why an array with strides (batch…, head, row) cannot be described to TMA; None where it can."""
    item = ITEM_BYTES[dtype]
    if min(strides) < 0 or max(strides) * item >= MAX_STRIDE:
        return f"TMA takes strides from 0 to 2^40 bytes, got {name} with {tuple(s * item for s in strides)}"
    if rows > 1 and strides[-1] == 0:
        return f"TMA does not repeat rows, which {name} does"
    return None


def map_layout(
    dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], batch: int, batch_stride: int, box_rows: int
) -> MapLayout:
    """The layout of an array of `shape` (…, head, row, column) and `strides` (head, row).

    An axis along which it is broadcast has one element.
    """
    item = ITEM_BYTES[dtype]
    heads, rows, columns = shape[-3:]
    head_stride, row_stride = strides
    axes = ((rows, row_stride), (heads, head_stride), (batch, batch_stride))
    extents = [extent if stride else 1 for extent, stride in axes]
    steps = [stride * item if stride else 16 for _, stride in axes]
    return MapLayout(
        dtype=dtype,
        extents=(columns, extents[0], extents[1], extents[2]),
        strides=(steps[0], steps[1], steps[2]),
        box=(PANEL_COLUMNS, box_rows, 1, 1),
    )


@functools.cache
def _encoder() -> Any:
    """`cuTensorMapEncodeTiled` of the CUDA driver."""
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    pointer, word = ctypes.c_void_p, ctypes.c_uint32
    function.argtypes = (pointer, word, word, pointer, pointer, pointer, pointer, pointer, word, word, word, word)
    function.restype = ctypes.c_int
    return function


def encode(layout: MapLayout, address: int) -> bytes:
    """The tensor map of the array at `address`.

    Raises
    ------
    RuntimeError
        When the driver does not accept it.
    """

    def array(kind: Any, values: Sequence[int]) -> Any:
        return (kind * len(values))(*values)

    buffer = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
    start = -ctypes.addressof(buffer) % MAP_ALIGNMENT
    status = _encoder()(
        ctypes.addressof(buffer) + start,
        DATA_TYPES[layout.dtype],
        len(layout.extents),
        address,
        array(ctypes.c_uint64, layout.extents),
        array(ctypes.c_uint64, layout.strides),
        array(ctypes.c_uint32, layout.box),
        array(ctypes.c_uint32, (1, 1, 1, 1)),
        INTERLEAVE_NONE,
        SWIZZLE_128B,
        L2_PROMOTION_256B,
        FILL_WITH_ZEROS,
    )
    if status:
        raise RuntimeError(
            f"the CUDA driver refuses a tensor map with error {status}: {layout} at address {address:#x}"
        )
    return buffer.raw[start : start + MAP_BYTES]


class TensorMaps(dict[int, bytes]):
    """The tensor maps of one layout by address, of which as many are kept as are likely to come again."""

    def __init__(self, layout: MapLayout) -> None:
        super().__init__()
        self.layout = layout

    at = dict.__getitem__  # the map of the array at an address

    def __missing__(self, address: int) -> bytes:
        if len(self) >= MAX_KNOWN_ADDRESSES:
            self.clear()
        made = self[address] = encode(self.layout, address)
        return made
