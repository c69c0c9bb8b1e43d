"""What a kernel's legality and defaults depend on of a GPU, also for GPUs that are not here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

MINIMUM_COMPUTE_CAPABILITY = (7, 5)


@dataclass(frozen=True)
class DeviceInfo:
    """One GPU.

    Attributes
    ----------
    name : str
    compute_capability : (int, int)
    multiprocessors : int
    shared_bytes : int
        The most shared memory that one block may ask for, in bytes.
    """

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int

    @property
    def architecture(self) -> str:
        """The compiler's name for it, ``sm_90`` for compute capability 9.0."""
        major, minor = self.compute_capability
        return f"sm_{major}{minor}"


# Shared memory per block (opt-in) by architecture: CUDA C++ Programming Guide, "Technical Specifications per Compute
# Capability". Multiprocessor counts are those of the card named.
KNOWN_DEVICES = {
    "sm_75": DeviceInfo("Tesla T4", (7, 5), 40, 64 * 1024),
    "sm_80": DeviceInfo("A100", (8, 0), 108, 163 * 1024),
    "sm_86": DeviceInfo("GeForce RTX 3090", (8, 6), 82, 99 * 1024),
    "sm_89": DeviceInfo("GeForce RTX 4090", (8, 9), 128, 99 * 1024),
    "sm_90": DeviceInfo("H200", (9, 0), 132, 227 * 1024),
    "sm_100": DeviceInfo("B200", (10, 0), 148, 227 * 1024),
    "sm_120": DeviceInfo("GeForce RTX 5090", (12, 0), 170, 99 * 1024),
}


def known_device(architecture: str) -> DeviceInfo:
    """A typical GPU of `architecture`, for compiling and planning where it is not at hand."""
    if architecture not in KNOWN_DEVICES:
        raise ValueError(f"architecture must be one of {', '.join(KNOWN_DEVICES)}, got {architecture!r}")
    return KNOWN_DEVICES[architecture]


@cache
def device_info(index: int) -> DeviceInfo:
    """The GPU with CUDA's device number `index`.

    Raises
    ------
    RuntimeError
        When its compute capability is below 7.5.
    """
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(index)
    name = properties["name"].decode()
    capability = (properties["major"], properties["minor"])
    if capability < MINIMUM_COMPUTE_CAPABILITY:
        raise RuntimeError(
            f"cuflash needs a GPU of compute capability 7.5 or newer, got {name} with {capability[0]}.{capability[1]}"
        )
    return DeviceInfo(name, capability, properties["multiProcessorCount"], properties["sharedMemPerBlockOptin"])
