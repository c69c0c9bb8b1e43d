"""The CUDA C++ sources, installed as `cuflash.kernels_cu`: package data, read when a kernel has to be compiled."""
