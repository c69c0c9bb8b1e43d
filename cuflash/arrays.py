"""Any array library in and out.

Two kinds are computed on: NumPy arrays and CuPy arrays. Every other library's arrays are viewed as one of the two
without a copy (DLPack, or the buffer that both share), on that library's current device and stream, and results are
handed back as its own kind.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cuflash.problem import VECTOR_BYTES, Operand

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPE_OF = {
    "float16": np.dtype(np.float16),
    "bfloat16": BFLOAT16,
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
NO_GRADIENT = "{name} {what}, and cuflash.attention has no derivative: its gradient would be lost. {remedy}"


def import_cupy() -> Any:
    """CuPy, or an ImportError that says how to get it."""
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            "arrays on a GPU need CuPy: pip install 'cuflash[cuda13]' (or 'cuflash[cuda12]' for CUDA 12 drivers)"
        ) from error
    return cupy


class Memory(NamedTuple):
    """Where an array lies: address of its first element, shape, strides and size of an element in bytes."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item: int


class NumpyKind:
    """NumPy arrays, as they are.

    Attributes
    ----------
    on_gpu : bool
    writable : bool
        Whether a caller may pass an array to write to.
    """

    name = "numpy"
    on_gpu = False
    writable = True

    def __str__(self) -> str:
        return f"{self.name} ({'GPU' if self.on_gpu else 'CPU'})"

    def view(self, name: str, array: Any) -> Any:
        """The NumPy or CuPy array to compute on."""
        if isinstance(array, np.ma.MaskedArray):
            raise TypeError(f"{name} must not be a masked array (its mask would be lost); pass mask= instead")
        if not array.dtype.isnative:
            raise TypeError(f"{name} must be of native byte order, got {array.dtype.str}")
        view = np.asarray(array)
        return view if name == "out" or is_regular(view) else view.copy()

    def result(self, array: Any, like: Any) -> Any:
        """A computed array as the caller's kind."""
        return array

    @contextlib.contextmanager
    def current(self, like: Any) -> Iterator[None]:
        """The device and stream that the caller's library works on."""
        yield


class CupyKind(NumpyKind):
    """CuPy arrays, as they are, on CuPy's current stream of the device that holds them."""

    name = "cupy"
    on_gpu = True

    def view(self, name: str, array: Any) -> Any:
        return array

    @contextlib.contextmanager
    def current(self, like: Any) -> Iterator[None]:
        with like.device:
            yield

    def signature(self, array: Any) -> Any:
        """What of an array, its data aside, decides how it is computed on."""
        data = array.data
        return array.shape, array.strides, array.dtype, data.device_id, data.ptr & 15

    def address(self, array: Any) -> Any:
        """Where its first element is."""
        return array.data.ptr

    def read(self, arrays: Sequence[Any]) -> tuple[list[Any], list[int]]:
        """What of every array decides how it is computed on, and their addresses; None and 0 for one that is absent.

        The strides of a contiguous array follow from its shape. An array of another kind raises AttributeError,
        RuntimeError or TypeError, or reads like none that was checked: `kind_of` says what is wrong with it.
        """
        signatures: list[Any] = []
        addresses = []
        for array in arrays:
            if array is None:
                signatures.append(None)
                addresses.append(0)
            else:
                data = array.data
                address = data.ptr
                strides = None if array._c_contiguous else array.strides
                signatures += (array.shape, strides, array.dtype, data.device_id, address & 15)
                addresses.append(address)
        return signatures, addresses

    def memory(self, array: Any) -> Memory:
        """Where it lies."""
        return memory_of(array)

    def new(self, shape: tuple[int, ...], dtype: str, like: Any) -> Any:
        """A new array of the caller's kind."""
        return self.maker(shape, dtype, like)(like)

    def maker(self, shape: tuple[int, ...], dtype: str, like: Any) -> Callable[[Any], Any]:
        """What makes new arrays of the caller's kind, on the device of arrays that read as `like` does."""
        ndarray, numpy_dtype = import_cupy().ndarray, DTYPE_OF[dtype]
        return lambda like: ndarray(shape, numpy_dtype)

    def memory_maker(self, size: int) -> Callable[[Any], tuple[Any, int]]:
        """What makes `size` bytes where arrays like its argument are: what keeps them, and their address."""
        allocate = import_cupy().cuda.alloc

        def make(like: Any) -> tuple[Any, int]:
            memory = allocate(size)
            return memory, memory.ptr

        return make

    def stream(self, like: Any) -> Any:
        """The stream to launch on; None is CuPy's current one."""
        return None


class CudaStream:
    """A stream of another library: as CuPy's launches take it (`ptr`) and as its streams are made of it."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr

    def __cuda_stream__(self) -> tuple[int, int]:
        """Version of the protocol, and the stream's address."""
        return 0, self.ptr


class TorchCpuKind(NumpyKind):
    """PyTorch tensors of the CPU, through NumPy."""

    name = "torch"

    def view(self, name: str, array: Any) -> Any:
        import torch

        array = array.detach().resolve_neg()
        return array.view(torch.int16).numpy().view(BFLOAT16) if array.dtype == torch.bfloat16 else array.numpy()

    def result(self, array: Any, like: Any) -> Any:
        import torch

        return (
            torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
            if array.dtype == BFLOAT16
            else torch.from_numpy(array)
        )


class TorchCudaKind(CupyKind):
    """PyTorch tensors of a CUDA device, on PyTorch's current stream and from its allocator."""

    name = "torch"

    def view(self, name: str, array: Any) -> Any:
        return import_cupy().from_dlpack(array.detach())

    def result(self, array: Any, like: Any) -> Any:
        import torch

        return torch.from_dlpack(array)

    @contextlib.contextmanager
    def current(self, like: Any) -> Iterator[None]:
        import torch

        cupy = import_cupy()
        with (
            cupy.cuda.Device(like.device.index),
            torch.cuda.device(like.device),
            cupy.cuda.Stream.from_external(self.stream(like)),
        ):
            yield

    def signature(self, array: Any) -> Any:
        return array.shape, array.stride(), array.dtype, array.get_device(), array.data_ptr() & 15

    def address(self, array: Any) -> Any:
        return array.data_ptr()

    def read(self, arrays: Sequence[Any]) -> tuple[list[Any], list[int]]:
        torch = sys.modules["torch"]
        if torch.autograd.forward_ad._current_level >= 0:
            raise TypeError("tensors may have tangents")
        signatures: list[Any] = []
        addresses = []
        for array in arrays:
            if array is None:
                signatures.append(None)
                addresses.append(0)
            else:
                if array.requires_grad and torch.is_grad_enabled():
                    raise TypeError("a tensor requires grad")
                address = array.data_ptr()  # which no tensor has that torch.func transforms
                strides = None if array.is_contiguous() else array.stride()
                signatures += (array.shape, strides, array.dtype, array.get_device(), address & 15)
                addresses.append(address)
        return signatures, addresses

    def memory(self, array: Any) -> Memory:
        item = array.element_size()
        return Memory(array.data_ptr(), tuple(array.shape), tuple(step * item for step in array.stride()), item)

    def maker(self, shape: tuple[int, ...], dtype: str, like: Any) -> Callable[[Any], Any]:
        import torch

        if like.is_contiguous() and like.shape == shape and like.dtype == getattr(torch, dtype):
            maker: Callable[[Any], Any] = torch.empty_like  # the fastest
            return maker
        return operator.methodcaller("new_empty", shape, dtype=getattr(torch, dtype))

    def memory_maker(self, size: int) -> Callable[[Any], tuple[Any, int]]:
        import torch

        def make(like: Any) -> tuple[Any, int]:
            memory = like.new_empty(size, dtype=torch.uint8)
            return memory, memory.data_ptr()

        return make

    def stream(self, like: Any) -> Any:
        import torch

        return CudaStream(torch._C._cuda_getCurrentRawStream(like.get_device()))


class JaxKind(NumpyKind):
    """JAX arrays: of the CPU through NumPy, of a GPU through DLPack, on CuPy's current stream."""

    name = "jax"
    writable = False

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu

    def view(self, name: str, array: Any) -> Any:
        return import_cupy().from_dlpack(array) if self.on_gpu else np.asarray(array)

    def result(self, array: Any, like: Any) -> Any:
        import jax

        return jax.dlpack.from_dlpack(array) if self.on_gpu else jax.device_put(array, like.device)

    @contextlib.contextmanager
    def current(self, like: Any) -> Iterator[None]:
        if not self.on_gpu:
            yield
            return
        with import_cupy().cuda.Device(like.device.local_hardware_id):
            yield


class DlpackKind(NumpyKind):
    """Arrays of any other library that speaks DLPack, and Numba's, on CuPy's current stream of their device."""

    on_gpu = True

    def __init__(self, name: str) -> None:
        self.name = name

    def view(self, name: str, array: Any) -> Any:
        cupy = import_cupy()
        return cupy.from_dlpack(array) if hasattr(array, "__dlpack__") else cupy.asarray(array)

    def result(self, array: Any, like: Any) -> Any:
        if self.name == "numba":
            from numba import cuda  # type: ignore[import-not-found]

            return cuda.as_cuda_array(array)
        return like.__array_namespace__().from_dlpack(array)

    @contextlib.contextmanager
    def current(self, like: Any) -> Iterator[None]:
        with self.view("", like).device:
            yield


NUMPY, CUPY = NumpyKind(), CupyKind()
TORCH = {"cpu": TorchCpuKind(), "cuda": TorchCudaKind()}
JAX = {False: JaxKind(False), True: JaxKind(True)}
DLPACK: dict[str, DlpackKind] = {}
KIND_OF_TYPE: dict[type, NumpyKind] = {np.ndarray: NUMPY}  # of types whose arrays are all of one kind
DLPACK_CUDA = 2
OVERLAP_EFFORT = 100_000


def kind_of(name: str, array: Any) -> NumpyKind:
    """The kind of one array.

    Raises
    ------
    TypeError
        For anything that is not an array of the CPU or of a CUDA device, or that is traced for a derivative.
    """
    kind = KIND_OF_TYPE.get(type(array))
    if kind is not None:
        return kind
    if isinstance(array, np.ndarray):
        return NUMPY
    library = type(array).__module__.partition(".")[0]
    if library == "cupy" and hasattr(array, "data"):
        KIND_OF_TYPE[type(array)] = CUPY
        return CUPY
    if (torch := sys.modules.get("torch")) and isinstance(array, torch.Tensor):
        if array.requires_grad and torch.is_grad_enabled():
            remedy = "Use cuflash.torch.attention, or pass it detached, or call inside torch.no_grad()."
            raise TypeError(NO_GRADIENT.format(name=name, what="requires grad", remedy=remedy))
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(array)  # by torch.func.grad, vmap, jvp
        forward_ad = torch.autograd.forward_ad
        if wrapped or (forward_ad._current_level >= 0 and forward_ad.unpack_dual(array).tangent is not None):
            remedy = "Call it outside of torch.func and of forward-mode differentiation."
            raise TypeError(NO_GRADIENT.format(name=name, what="is being transformed", remedy=remedy))
        if array.is_cuda:
            return TORCH["cuda"]
        if array.device.type not in TORCH:
            raise TypeError(f"{name} must be a tensor of the CPU or of a CUDA device, got one on {array.device}")
        return TORCH[array.device.type]
    if (jax := sys.modules.get("jax")) and isinstance(array, jax.Array):
        if isinstance(array, jax.core.Tracer):
            remedy = "Call it outside of jax.jit, jax.grad and jax.vmap."
            raise TypeError(NO_GRADIENT.format(name=name, what="is a JAX tracer", remedy=remedy))
        if array.is_deleted():
            raise ValueError(f"{name} must be alive, got a JAX array that was deleted or donated")
        if len(array.devices()) != 1:
            raise TypeError(f"{name} must live on one device, got an array sharded over {len(array.devices())}")
        return JAX[array.device.platform in ("gpu", "cuda")]
    if library == "numba" and hasattr(array, "__cuda_array_interface__"):
        return DLPACK.setdefault(library, DlpackKind(library))
    if (
        hasattr(array, "__array_namespace__")
        and hasattr(array, "__dlpack_device__")
        and array.__dlpack_device__()[0] == DLPACK_CUDA
    ):
        return DLPACK.setdefault(library, DlpackKind(library))
    came = type(array).__name__
    raise TypeError(
        f"{name} must be a NumPy, CuPy, PyTorch or JAX array, or one that speaks DLPack on a CUDA device, got {came}"
    )


def memory_of(array: Any) -> Memory:
    """Where a NumPy or CuPy array lies."""
    address = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    return Memory(int(address), array.shape, array.strides, array.dtype.itemsize)


def describe(name: str, array: Any) -> Operand:
    """A NumPy or CuPy array as the checks see it."""
    address, shape, strides, item = memory_of(array)
    if not is_regular(array):
        raise ValueError(f"{name} must have strides that are multiples of its {item}-byte elements, got {strides}")
    if address % item and not isinstance(array, np.ndarray):
        raise ValueError(f"{name} must lie at a multiple of its {item}-byte elements, got address {address:#x}")
    steps = tuple(stride // item for stride in strides)
    return Operand(
        name, shape, steps, array.dtype.name, alignment=VECTOR_BYTES if address % VECTOR_BYTES == 0 else item
    )


def is_regular(array: Any) -> bool:
    """Whether elements are whole elements apart along every axis."""
    return not any(n > 1 and step % array.itemsize for n, step in zip(array.shape, array.strides, strict=True))


def is_strided(array: Any) -> bool:
    """Whether neighbours along the last axis are not neighbours in memory."""
    return bool(array.size and array.shape[-1] > 1 and array.strides[-1] != array.itemsize)


def canonical_view(
    array: np.ndarray[Any, Any], shape: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    """The NumPy array with the axes and strides (in elements) of the Problem."""
    in_bytes = tuple(stride * array.itemsize for stride in strides)
    return np.lib.stride_tricks.as_strided(array, shape, in_bytes)


def overlap(one: Memory, other: Memory) -> bool:
    """Whether two arrays share an element; decided from their addresses alone."""
    low, high = byte_bounds(one)
    other_low, other_high = byte_bounds(other)
    if high <= other_low or other_high <= low:
        return False
    try:
        return bool(np.shares_memory(shadow(one), shadow(other), max_work=OVERLAP_EFFORT))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True  # interleaved in a way that is not worth the search: refused to be safe


def byte_bounds(array: Memory) -> tuple[int, int]:
    """The addresses of the first byte and of the first one beyond."""
    low = high = array.address
    if 0 in array.shape:
        return low, low
    for extent, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            low += (extent - 1) * stride
        else:
            high += (extent - 1) * stride
    return low, high + array.item


class Shadow:
    """What NumPy needs to see an array at an address that it will never read."""

    def __init__(self, array: Memory) -> None:
        address, shape, strides, item = array
        self.__array_interface__ = {
            "data": (address, True),
            "shape": shape,
            "strides": strides,
            "typestr": f"|V{item}",
            "version": 3,
        }


def shadow(array: Memory) -> np.ndarray[Any, Any]:
    """A NumPy array of the same memory, wherever that is."""
    return np.asarray(Shadow(array))
