"""NumPy arrays on the GPU: the same strides, the same alignment, the same bytes between the elements."""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np

from cuflash.arrays import byte_bounds, memory_of

ALIGNMENT = 16


def on_device(array: Any) -> Any:
    """A CuPy array that lies as `array` does."""
    import cupy

    low, high = byte_bounds(memory_of(array))
    shift = low % ALIGNMENT
    block = cupy.empty(high - low + ALIGNMENT, np.uint8)
    if high > low:
        block[shift : shift + high - low] = cupy.asarray(
            np.frombuffer((ctypes.c_uint8 * (high - low)).from_address(low), np.uint8)
        )
    start = block.data + shift + (array.ctypes.data - low if high > low else 0)
    return cupy.ndarray(array.shape, array.dtype, start, array.strides)


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every allocation of CuPy starts as NaN, so that what a kernel does not write shows."""
    import cupy

    def allocate(size: int) -> Any:
        memory = cupy.get_default_memory_pool().malloc(size)
        memory.memset_async(0xFF, size)
        return memory

    with cupy.cuda.using_allocator(allocate):
        yield
