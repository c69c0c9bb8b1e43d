"""From a `Variant` to a kernel that can be launched: NVRTC, the cache of cubins on disk, the CUDA driver.

A Variant is everything that a kernel knows at compile time. It is rendered in one place, `Variant.header`, to the text
of ``variant.cuh``: the kernel includes it, the key of the disk cache hashes it, and the message of a failed compilation
prints it.

NVRTC is called directly rather than through ``cupy.RawModule(code=...)``, which would add an ``-arch`` of its own and
leaves the contents of included headers out of its cache key. Compiling needs no GPU; only `load_function` does.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from cuflash import cubins
from cuflash.backward_config import BackwardConfig, BackwardWgmmaConfig
from cuflash.config import MmaConfig, SimtConfig, WgmmaConfig
from cuflash.problem import Spec
from cuflash.sources import kernel_sources
from cuflash.wgmma import WGMMA_HEADER, wgmma_header

if TYPE_CHECKING:
    from cupy.cuda.function import Function

VARIANT_HEADER = "variant.cuh"

# The C++ type of each dtype; ptx.cuh declares the 16-bit ones.
ELEMENT_TYPES = {"float16": "half_t", "bfloat16": "bf16_t", "float32": "float", "float64": "double"}

# Kernels whose instructions exist on a single architecture, such as wgmma on sm_90a. Their cubins run on no newer GPU.
ARCHITECTURE_SPECIFIC = frozenset({"forward_wgmma", "backward_wgmma"})

DEFAULT_SHARED_BYTES = 48 * 1024  # a block that wants more must be granted it, once per function and device

# The driver's answers (CUresult) to a cubin that is not what it should be: invalid image, no binary for the GPU,
# invalid PTX, unsupported PTX version, invalid source, file not found, entry not found.
BAD_CUBIN = frozenset({200, 209, 218, 222, 300, 301, 500})

_log = logging.getLogger("cuflash")


@dataclass(frozen=True)
class Variant:
    """One compiled form of a kernel.

    Attributes
    ----------
    kernel : str
        Name of its file, such as ``forward_simt``, and of the entry function where there is one only.
    spec : Spec
    config : SimtConfig, MmaConfig, WgmmaConfig or one of the backward pass
    architecture : str
        The GPU's, such as ``sm_90``.
    deterministic : bool
        Whether sums are added up in the same order on every run. Kernels that have no other form take no notice.
    """

    kernel: str
    spec: Spec
    config: SimtConfig | MmaConfig | WgmmaConfig | BackwardConfig
    architecture: str
    deterministic: bool = True

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", self.kernel):
            raise ValueError(f"kernel must be a lower-case identifier, got {self.kernel!r}")
        if not re.fullmatch(r"sm_[1-9][0-9]{1,2}", self.architecture):
            raise ValueError(f"architecture must have the form sm_90, got {self.architecture!r}")

    def constants(self) -> dict[str, str | int]:
        """The names that ``variant.cuh`` declares: C++ types as str, flags as bool, sizes as int."""
        spec = self.spec
        return {
            "Element": ELEMENT_TYPES[spec.dtype],
            "BiasElement": ELEMENT_TYPES[spec.bias or spec.dtype],
            "kD": spec.d,
            "kDv": spec.d_v,
            "kLeft": spec.left,
            "kRight": spec.right,
            "kSoftcap": spec.softcap,
            "kMask": spec.mask,
            "kBias": spec.bias is not None,
            "kBiasOfKeys": spec.bias_of_keys and self.kernel == "forward_wgmma",  # to others it is a bias
            "kQLengths": spec.q_lengths,
            "kKvLengths": spec.kv_lengths,
            "kAligned": spec.aligned,
            **({"kDeterministic": self.deterministic} if self.kernel == "backward_wgmma" else {}),
            **self.config.constants(),
            **self._shared_memory(),
        }

    def _shared_memory(self) -> dict[str, int]:
        """How much there is of what follows from the spec and the configuration together."""
        if not isinstance(self.config, WgmmaConfig):
            return {}
        panels, shared_bytes = self.config.stage_panels(self.spec), self.config.shared_bytes(self.spec)
        return {"kStagePanels": panels, "kSharedBytes": shared_bytes}

    def header(self) -> str:
        """The text of ``variant.cuh``."""
        lines = [_declaration(name, value) for name, value in self.constants().items()]
        return "\n".join([f"// {self.kernel} for {self.architecture}", *lines, ""])

    def __str__(self) -> str:
        set_ones = {name: value for name, value in self.constants().items() if value is not False}
        shown = ", ".join(name if value is True else f"{name}={value}" for name, value in set_ones.items())
        return f"{self.kernel} for {self.architecture} ({shown})"


def _declaration(name: str, value: str | int) -> str:
    if isinstance(value, str):
        return f"using {name} = {value};"
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};"
    if not isinstance(value, int):
        raise TypeError(f"a constant of a kernel must be a type, a bool or an int, got {name} = {value!r}")
    return f"constexpr int {name} = {value};"


class CompileError(RuntimeError):
    """No kernel could be made of a Variant.

    Attributes
    ----------
    kernel : str
    file, line : str or None, int or None
        Where the first error stands.
    log : str
        What NVRTC had to say.
    configuration : str
        The text of ``variant.cuh``.
    """

    def __init__(
        self, variant: Variant, message: str, *, file: str | None = None, line: int | None = None, log: str = ""
    ) -> None:
        self.kernel = variant.kernel
        self.file = file
        self.line = line
        self.log = log
        self.configuration = variant.header()
        super().__init__("\n\n".join(filter(None, [message, log, f"{VARIANT_HEADER}:\n{self.configuration}"])))


class Compiled(NamedTuple):
    """A cubin and the compiler's log."""

    cubin: bytes
    log: str


class ResourceUsage(NamedTuple):
    """What a kernel takes of a GPU, and what the assembler found to say about it.

    Attributes
    ----------
    registers : int
        Of a thread.
    spill_bytes, stack_bytes : int
        Local memory of a thread: written and read because registers ran out, and for arrays that are not in registers.
    shared_bytes : int
        Static shared memory of a block.
    advisories : tuple of str
        Lost performance, by ptxas' number: C7508 (setmaxnreg ignored), C7517 (wgmma serialised) ...
    """

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    advisories: tuple[str, ...]


def compile_cubin(variant: Variant) -> Compiled:
    """Compile with NVRTC, past every cache. Needs no GPU.

    Raises
    ------
    CompileError
        When the sources do not compile, or NVRTC does not know the architecture.
    """
    from cupy.cuda import nvrtc

    _require_known_architecture(variant)
    kernel_file, headers = _program(variant)
    names = [name.encode() for name in headers]
    texts = [text.encode() for text in headers.values()]
    program = nvrtc.createProgram(kernel_sources()[kernel_file], kernel_file, texts, names)
    try:
        try:
            nvrtc.compileProgram(program, _options(variant))
        except nvrtc.NVRTCError as error:
            raise _compile_error(variant, nvrtc.getProgramLog(program).strip() or str(error)) from None
        return Compiled(nvrtc.getCUBIN(program) + b"\0", nvrtc.getProgramLog(program))  # CuPy leaves the last byte out
    finally:
        nvrtc.destroyProgram(program)


def compile_variant(variant: Variant) -> Path:
    """Path of the variant's cubin: from disk, or compiled now, once however many threads ask for it together.

    Raises
    ------
    CompileError
        When the sources do not compile, or NVRTC does not know the architecture.
    """
    key = _key(variant)
    with _lock_of(key):
        path = cubins.find(key)
        if path is None:
            start = time.perf_counter()
            compiled = compile_cubin(variant)
            _log.info("compiled %s in %.1f s", variant, time.perf_counter() - start)
            path = cubins.store(key, compiled.cubin)
        return path


def load_function(variant: Variant) -> Function:
    """The kernel of a variant that is named like its file, as of `load_functions`."""
    return load_functions(variant, (variant.kernel,))[0]


def load_functions(variant: Variant, entries: Sequence[str]) -> tuple[Function, ...]:
    """The kernels `entries` of a variant on CuPy's current device, loaded once per device and then looked up.

    Raises
    ------
    CompileError
        When it does not compile, or the driver refuses a cubin that was compiled a moment ago.
    """
    from cupy.cuda import runtime

    device = runtime.getDevice()
    keys = [(device, variant, entry) for entry in entries]
    if any(key not in _functions for key in keys):
        with _lock_of((device, variant)):
            if any(key not in _functions for key in keys):
                _functions.update(zip(keys, _load_or_recompile(variant, entries), strict=True))
    return tuple(_functions[key] for key in keys)


def resource_usage(log: str) -> ResourceUsage:
    """Read a compiler's log: the most of any entry or function in it, and the sum of what is spilled."""

    def numbers(pattern: str) -> list[int]:
        return [int(number) for number in re.findall(pattern, log)]

    return ResourceUsage(
        registers=max(numbers(r"Used (\d+) registers"), default=0),
        spill_bytes=sum(numbers(r"(\d+) bytes spill (?:stores|loads)")),
        stack_bytes=max(numbers(r"(\d+) bytes stack frame"), default=0),
        shared_bytes=max(numbers(r"(\d+) bytes smem"), default=0),
        advisories=tuple(line.strip() for line in log.splitlines() if re.search(r"\(C7\d+\)", line)),
    )


def _load_or_recompile(variant: Variant, entries: Sequence[str]) -> list[Function]:
    from cupy.cuda import driver

    for _ in range(2):  # a cubin from disk may be bad though intact, or another process may just have removed it
        path = compile_variant(variant)
        try:
            return _load(variant, path, entries)
        except driver.CUDADriverError as error:
            if error.status not in BAD_CUBIN:
                raise
            _log.info("removed %s: the CUDA driver refused it: %s", path, error)
            cubins.discard(path)
            refusal = error
    message = (
        f"the CUDA driver refuses {variant.kernel} for {variant.architecture} as NVRTC {_nvrtc_version()} compiles it: "
        f"{refusal}. A driver older than NVRTC's CUDA version does: update it, or install the CuPy that fits it"
    )
    raise CompileError(variant, message) from refusal


def _load(variant: Variant, path: Path, entries: Sequence[str]) -> list[Function]:
    import cupy

    module = cupy.RawModule(path=str(path))
    kernels = [module.get_function(entry) for entry in entries]
    shared_bytes = variant.config.shared_bytes(variant.spec)
    if shared_bytes > DEFAULT_SHARED_BYTES:
        for kernel in kernels:
            kernel.max_dynamic_shared_size_bytes = shared_bytes
    return [kernel.kernel for kernel in kernels]


def _program(variant: Variant) -> tuple[str, dict[str, str]]:
    """The file of the variant's kernel, and the text of every header that it may include."""
    sources = kernel_sources()
    kernel_file = f"{variant.kernel}.cu"
    if kernel_file not in sources:
        kernels = ", ".join(sorted(name.removesuffix(".cu") for name in sources if name.endswith(".cu")))
        raise ValueError(f"kernel must be one of {kernels}, got {variant.kernel!r}")
    headers = {name: text for name, text in sorted(sources.items()) if name.endswith(".cuh")}
    headers[VARIANT_HEADER] = variant.header()
    if isinstance(variant.config, (WgmmaConfig, BackwardWgmmaConfig)):
        headers[WGMMA_HEADER] = wgmma_header(variant.spec.dtype, variant.config.products(variant.spec))
    return kernel_file, headers


def _options(variant: Variant) -> tuple[str, ...]:
    suffix = "a" if variant.kernel in ARCHITECTURE_SPECIFIC else ""
    return ("--std=c++17", f"-arch={variant.architecture}{suffix}", "-Xptxas=-v")


def _key(variant: Variant) -> str:
    """Hash of everything that decides what a cubin holds."""
    kernel_file, headers = _program(variant)
    parts = [_nvrtc_version(), *_options(variant), kernel_file, kernel_sources()[kernel_file], headers]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _nvrtc_version() -> str:
    from cupy.cuda import nvrtc

    try:
        major, minor = nvrtc.getVersion()
    except RuntimeError as error:
        remedy = "Install cuflash[cuda12] or cuflash[cuda13]"
        raise RuntimeError(f"NVRTC, CUDA's run-time compiler, cannot be loaded: {error}. {remedy}") from error
    return f"{major}.{minor}"


def _require_known_architecture(variant: Variant) -> None:
    from cupy.cuda import nvrtc

    supported = sorted(nvrtc.getSupportedArchs())
    number = int(variant.architecture.removeprefix("sm_"))
    if number in supported:
        return
    if number > supported[-1]:
        known = f"which knows GPUs up to sm_{supported[-1]}: update CUDA"
        raise CompileError(variant, f"{variant.architecture} is newer than NVRTC {_nvrtc_version()}, {known}")
    names = ", ".join(f"sm_{known}" for known in supported)
    raise CompileError(variant, f"NVRTC {_nvrtc_version()} compiles for {names}, got {variant.architecture}")


def _compile_error(variant: Variant, log: str) -> CompileError:
    located = re.search(r"^(\S+)\((\d+)\): (?:catastrophic )?error(?: #\S+)?: (.*)$", log, re.MULTILINE)
    if located is not None:
        file, line, what = located.groups()
        return CompileError(variant, f"{file}:{line}: {what}", file=file, line=int(line), log=log)
    assembler = re.search(r"ptxas.*\b(?:error|fatal)\s*: (.*)$", log, re.MULTILINE)
    file = f"{variant.kernel}.cu"
    what = assembler[1] if assembler is not None else "NVRTC does not compile it"
    return CompileError(variant, f"{file}: {what}", file=file, log=log)


_functions: dict[tuple[int, Variant, str], Function] = {}
_locks: dict[Hashable, threading.Lock] = {}
_locks_guard = threading.Lock()


def _lock_of(key: Hashable) -> threading.Lock:
    with _locks_guard:
        return _locks.setdefault(key, threading.Lock())
