"""NumPy arrays on the GPU: the same strides, the same alignment, the same bytes between the elements."""

import contextlib
import ctypes
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import cuflash
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


def call_on_device(call: Mapping[str, Any], options: Mapping[str, Any], config: Any = None) -> dict[str, Any]:
    """A call of the backward pass, with O and LSE of the forward pass on the GPU, by `config`; poison as in `call`.

    Tensor cores cut off what they add, alike in both passes: the weights that the backward pass computes again sum to 1
    with the log-sum-exp of the same family's forward pass, and with that of the CPU not quite, where scores are large.
    """
    import cupy

    arrays = {name: on_device(x) for name, x in call.items()}
    inputs = {name: x for name, x in arrays.items() if name not in ("out", "dout", "lse", "dlse")}
    results = cuflash.attention_forward(**inputs, **options, config=config)
    for name, x in zip(("out", "lse"), results, strict=True):
        arrays[name] = on_device(np.where(np.isnan(call[name]), call[name], cupy.asnumpy(x)))
    return arrays
