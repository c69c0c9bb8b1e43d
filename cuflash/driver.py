"""Kernel launches by the driver's own call, with parameters that are written in place or kept.

CuPy's launch looks at every argument anew. Here a kernel's parameters are one block of bytes, laid out when the launch
is planned; a call writes what changes, the addresses, into a block that no other thread is using (`Kernel.take`), or
finds a block with these addresses, which all threads share and nobody writes to (`Kernel.run`).
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT: this thread has not used the GPU before


class Parameters:
    """A kernel's parameter block, and the list of one pointer by which cuLaunchKernel finds it."""

    __slots__ = ("_pointer", "block", "pointers")

    def __init__(self, content: bytes) -> None:
        self.block = ctypes.create_string_buffer(content, len(content))
        self._pointer = ctypes.c_void_p(ctypes.addressof(self.block))
        self.pointers = ctypes.addressof(self._pointer)


class Kernel:
    """A loaded function with its grid, and the parameters that it is launched with, on CuPy's current device.

    Parameters
    ----------
    function : cupy.cuda.Function
    grid, threads, shared_bytes : int
    content : bytes
        The parameter block that `take` gives, but for what each launch writes into it.
    """

    def __init__(self, function: Any, grid: int, threads: int, shared_bytes: int, content: bytes = b"") -> None:
        import cupy

        driver, runtime = cupy.cuda.driver, cupy.cuda.runtime
        self._launch = functools.partial(driver.launchKernel, function.ptr, grid, 1, 1, threads, 1, 1, shared_bytes)
        self._error = driver.CUDADriverError
        self._make_context = runtime.memGetInfo
        self._current_stream = functools.partial(cupy.cuda.get_current_stream, runtime.getDevice())
        self._function = function  # keeps the module loaded
        self._content = content
        self._idle: list[Parameters] = []  # pop and append are atomic

    def stream(self, of: Any) -> Any:
        """The address of a stream, an object with a `ptr`; None is CuPy's current one."""
        return (self._current_stream() if of is None else of).ptr

    def take(self) -> Parameters:
        """A block that no other launch is using until `launch` has read it."""
        try:
            return self._idle.pop()
        except IndexError:
            return Parameters(self._content)

    def launch(self, parameters: Parameters, stream: int) -> None:
        """Launch on the stream at that address. The driver has copied the parameters when it returns."""
        self.run(parameters, stream)
        self._idle.append(parameters)

    def run(self, parameters: Parameters, stream: int) -> None:
        """As `launch`, with parameters that are used again and not given back."""
        try:
            self._launch(stream, parameters.pointers, 0)
        except self._error as error:
            if error.status != NO_CONTEXT:
                raise
            self._make_context()
            self._launch(stream, parameters.pointers, 0)
