"""Compile the emulator once and each kernel against it; both are cached by a hash of what they are made from."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
KERNELS = HERE.parent.parent / "kernels_cu"
TWINS = ("ptx.cuh", "wgmma.cuh")  # the headers that exist twice: it is those of this folder that a kernel gets

CORE_FLAGS = ("-shared", "-std=c++17", "-O2", "-fPIC")
KERNEL_FLAGS = (
    *("-shared", "-std=c++17", "-g1", "-gdwarf-4", "-fPIC", "-w", "-Wno-psabi", "-fno-exceptions"),
    *("-fno-strict-aliasing", "-ffp-contract=off"),  # as CUDA has it; and the same numbers on every processor
    # A call before every access to memory, which memory.h takes. The run-time library for it is left out.
    *("-fsanitize=thread", "-nostdlib"),
)
OPTIMIZED = ("-O1", "-fno-var-tracking", "-fno-tree-loop-optimize")  # half the time of -O1 to compile, the same to run
NOT_OPTIMIZED = ("-O0",)
LIBRARIES = ("-lm", "-lc", "-lgcc", "-Wl,-z,defs")
INCLUDE = re.compile(r'^#include "(.+)"', re.MULTILINE)
ENTRY = "EMULATED_KERNEL"
MOST_FILES = 2000  # of the cache; beyond it, those that were not used for longest go


class BuildError(Exception):
    """A kernel does not compile for the CPU; the message is the compiler's."""


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: its library, and the address of what `EMULATED_KERNEL` put into it."""

    name: str
    path: Path
    entry: int
    core: ctypes.CDLL


def compiler() -> list[str]:
    """The command that runs the C++ compiler."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def why_no_emulator() -> str | None:
    """Why kernels cannot be emulated on this machine; None where they can."""
    if sys.platform != "linux":
        return f"kernels are emulated on Linux only, not on {sys.platform}"
    if shutil.which(compiler()[0]) is None:
        return f"no C++ compiler: {compiler()[0]} is not installed"
    if "Free Software Foundation" not in compiler_version():
        return f"kernels are emulated with g++ only, and {compiler()[0]} is another compiler"
    return None


@functools.cache
def compiler_version() -> str:
    return subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=True).stdout


@functools.cache
def cache() -> Path:
    """A folder of this user's own, as it holds code that will be run; a temporary one where that cannot be."""
    folder = Path(tempfile.gettempdir()) / f"cuflash-emulator-{os.getuid()}"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077:
            remove_oldest(folder)
            return folder
    folder = Path(tempfile.mkdtemp(prefix="cuflash-emulator-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def remove_oldest(folder: Path) -> None:
    with contextlib.suppress(OSError):
        files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
        for file in files[MOST_FILES:]:
            file.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(name: str) -> Iterator[None]:
    """Keep other processes from making the same file at the same time."""
    import fcntl

    with open(cache() / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cached(suffix: str, parts: Mapping[str, str], make: Callable[[Path], None]) -> Path:
    """The file made from `parts`: from the cache, or by `make`."""
    text = "\0".join(f"{name}\0{part}" for name, part in (*sorted(parts.items()), ("compiler", compiler_version())))
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    path = cache() / (key + suffix)
    while not is_touched(path):
        with locked(key[:2]):
            if not path.exists():
                fresh = path.with_name(f"{key}.{os.getpid()}.new")
                make(fresh)
                fresh.replace(path)
    return path


def is_touched(path: Path) -> bool:
    """Whether the file is there, and by now the last that would go: other processes remove the oldest."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def run(*command: str | Path, folder: Path | None = None) -> None:
    done = subprocess.run([*compiler(), *map(str, command)], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(done.stderr[:6000])


@functools.cache
def own_texts() -> dict[str, str]:
    """The C++ of the emulator."""
    return {file.name: file.read_text() for file in HERE.iterdir() if file.suffix in (".h", ".cpp", ".cuh")}


@functools.cache
def core_path() -> Path:
    def make(path: Path) -> None:
        run(*CORE_FLAGS, HERE / "emulator.cpp", "-Wl,-z,defs", "-o", path)

    parts = {name: text for name, text in own_texts().items() if name not in (*TWINS, "cuda.h")}
    return cached(".so", parts | {"flags": repr(CORE_FLAGS)}, make)


@functools.cache
def kernel_texts() -> Mapping[str, str]:
    """The text of every file in kernels_cu by name."""
    return {file.name: file.read_text() for file in KERNELS.iterdir() if file.suffix in (".cu", ".cuh")}


def included(file: str, texts: Mapping[str, str]) -> dict[str, str]:
    """`file` and what it includes, but for the headers that have twins."""
    found: dict[str, str] = {}
    wanted = [file]
    while wanted:
        name = wanted.pop()
        if name not in found and name not in TWINS:
            found[name] = texts[name]
            wanted += INCLUDE.findall(texts[name])
    return found


def build(
    file: str,
    variant: str = "",
    texts: Mapping[str, str] | None = None,
    kernel: str | None = None,
    optimized: bool = True,
    entries: Sequence[str] = (),
) -> Kernel:
    """Compile the kernel file `file`.cu, unless the cache has it.

    `variant` is the text of variant.cuh, and `texts` all other files by name, by default those of kernels_cu. The
    kernel has the name of the file, or is `kernel` of the `entries` of the file, or where the file itself says
    EMULATED_KERNEL for each of its own. One that runs for a moment need not be `optimized`: it takes half the time to
    compile, and twice the time to run.
    """
    texts = kernel_texts() if texts is None else texts
    source = f"{file}.cu"
    files = included(source, {**texts, "variant.cuh": variant})
    names = () if ENTRY in texts[source] else entries or (file,)
    entry = "".join(f"{ENTRY}({name});\n" for name in names)
    files["main.cpp"] = f'#include "{source}"\n#include "cuda.h"\n{entry}'
    core = core_path()
    flags = (*KERNEL_FLAGS, *(OPTIMIZED if optimized else NOT_OPTIMIZED))

    def make(path: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="cuflash-emulator-build-") as temporary:
            folder = Path(temporary)
            for each, text in files.items():
                (folder / each).write_text(text)
            run(*flags, "main.cpp", "-I", HERE, core, *LIBRARIES, "-o", path, folder=folder)

    twins = {f"emulator/{each}": own_texts()[each] for each in (*TWINS, "cuda.h", "emulator.h")}
    path = cached(".so", files | twins | {"flags": repr((flags, LIBRARIES)), "core": core.name}, make)
    return load(kernel or file, path, core)


@functools.cache
def load(name: str, path: Path, core: Path) -> Kernel:
    library = ctypes.CDLL(str(core))
    entry = ctypes.addressof(ctypes.c_byte.in_dll(ctypes.CDLL(str(path)), f"emulated_{name}"))
    return Kernel(name, path, entry, library)
