"""The text of the kernels and their headers, and what identifies the sources of one kernel."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
import re
from collections.abc import Mapping
from types import MappingProxyType

SOURCE_HASH_DIGITS = 16


@functools.cache
def kernel_sources() -> Mapping[str, str]:
    """The text of every kernel (``.cu``) and header (``.cuh``), by file name."""
    folder = importlib.resources.files("cuflash.kernels_cu")
    files = [file for file in folder.iterdir() if file.name.endswith((".cu", ".cuh"))]
    return MappingProxyType({file.name: file.read_text("utf-8") for file in files})


@functools.cache
def source_hash(kernel: str) -> str:
    """Hash of the file of `kernel`, ``"forward_mma"`` say, and of every header that it includes.

    Examples
    --------
    >>> from cuflash.sources import source_hash
    >>> len(source_hash("forward_mma")), source_hash("forward_mma") == source_hash("forward_simt")
    (16, False)
    """
    sources = kernel_sources()
    found: set[str] = set()
    wanted = [f"{kernel}.cu"]
    while wanted:
        name = wanted.pop()
        if name in sources and name not in found:  # generated headers are not among them
            found.add(name)
            wanted += re.findall(r'^#include "(\w+\.cuh)"', sources[name], re.MULTILINE)
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(f"{name}\0{sources[name]}\0".encode())
    return digest.hexdigest()[:SOURCE_HASH_DIGITS]
