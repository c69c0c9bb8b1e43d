"""What this machine has: driver, CuPy, GPUs, caches; or what is missing, and the extra that brings it."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from importlib import metadata

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

import cuflash
from cuflash import cubins, device, tuned


def driver_cuda_version() -> tuple[int, int] | None:
    """The newest CUDA version that the NVIDIA driver serves, or None where there is no driver. Needs no CuPy."""
    try:
        driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
        version = ctypes.c_int()
        if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return version.value // 1000, version.value % 1000 // 10


def install_command() -> str:
    """The command that installs CuPy for the driver at hand."""
    driver = driver_cuda_version()
    return f"pip install 'cuflash[{'cuda12' if driver is not None and driver[0] == 12 else 'cuda13'}]'"


def why_no_gpu() -> str | None:
    """None where CuPy sees a GPU, else what is missing."""
    driver = driver_cuda_version()
    if driver is None:
        return "no NVIDIA driver is installed"
    try:
        import cupy
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "cupy":
            return f"CuPy is not installed: {install_command()}"
        return f"CuPy cannot be imported: {error}"
    try:
        if cupy.cuda.runtime.getDeviceCount() > 0:
            return None
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"CuPy cannot use the GPU: {error}"
    return "the driver shows no GPU"


def describe_cpu() -> str:
    """The processor in a few words."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return f"{platform.machine()}, {cores} cores"


def describe_gpu(index: int) -> str:
    """GPU `index` in a few words, or why it cannot be used."""
    try:
        gpu = device.device_info(index)
    except RuntimeError as error:
        return str(error)
    return f"{gpu.name} ({gpu.architecture}, {gpu.multiprocessors} multiprocessors)"


def print_whole(console: Console, part: Table | str) -> None:
    """Print with lines as long as they need, where the output is a file or a narrow terminal too."""
    if isinstance(part, str):
        console.print(part, soft_wrap=True)
        return
    needed = Measurement.get(console, console.options.update(max_width=10_000), part).maximum
    console.width = max(console.width, needed)
    console.print(part)


def format_bytes(size: float) -> str:
    """A size in memory for people to read, ``"1.5 MiB"`` say.

    Examples
    --------
    >>> from cuflash.machine import format_bytes
    >>> format_bytes(512), format_bytes(1.5 * 2**20)
    ('512 B', '1.5 MiB')
    """
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1000 and len(units) > 1:
        size /= 1024
        del units[0]
    return f"{size:.3g} {units[0]}"


def describe_machine() -> Table:
    """Everything above, as `cuflash info` prints it."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    table.add_row("cuflash", cuflash.__version__)
    table.add_row("Python", platform.python_version())
    table.add_row("NumPy", metadata.version("numpy"))
    table.add_row("CuPy", _cupy_version())
    table.add_row("NVRTC", _nvrtc_version())
    driver = driver_cuda_version()
    table.add_row("NVIDIA driver", "none" if driver is None else f"for CUDA up to {driver[0]}.{driver[1]}")
    why = why_no_gpu()
    if why is None:
        import cupy

        for index in range(cupy.cuda.runtime.getDeviceCount()):
            table.add_row(f"GPU {index}", describe_gpu(index))
    else:
        table.add_row("GPU", f"none that can be used ({why}); NumPy arrays and other CPU arrays are served by the CPU")
    table.add_row("CPU", describe_cpu())
    cache = cubins.cache_info()
    table.add_row("compiled kernels", f"{cache.directory} ({cache.files} files, {format_bytes(cache.bytes)})")
    if cache.why_unused is not None:
        table.add_row("", f"not used: {cache.why_unused}")
    own = sum(len(store.paths()) for store in tuned.own_stores())
    shipped = sum(found.source == "shipped" for found in tuned.winners())
    table.add_row("tuned configurations", f"{tuned.user_directory()} ({own} files), and {shipped} that are shipped")
    return table


def _cupy_version() -> str:
    try:
        import cupy
    except ImportError as error:
        return f"not there ({error}); on a machine with an NVIDIA GPU: {install_command()}"
    return str(cupy.__version__)


def _nvrtc_version() -> str:
    try:
        from cupy.cuda import nvrtc

        major, minor = nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        return f"not there ({error})"
    return f"{major}.{minor}"
