"""Kernels on a CPU: a kernel file is compiled, unchanged, with g++ against a host twin of kernels_cu/ptx.cuh.

    kernel = build("forward_simt", variant.header())
    launch(kernel, grid=8, threads=128, shared_bytes=4096, params=block, arrays=arrays, schedule=Schedule("random"))

What a kernel must not do (see emulator.cpp) raises `EmulatorError` with the emulator's report. The emulator is compiled
once; it and every kernel are kept in a cache that all test processes share.
"""

from emulator.build import BuildError, Kernel, build, kernel_texts, why_no_emulator
from emulator.launch import SCHEDULES, Array, EmulatorError, Schedule, Statistics, launch

__all__ = [
    "SCHEDULES",
    "Array",
    "BuildError",
    "EmulatorError",
    "Kernel",
    "Schedule",
    "Statistics",
    "build",
    "kernel_texts",
    "launch",
    "why_no_emulator",
]
