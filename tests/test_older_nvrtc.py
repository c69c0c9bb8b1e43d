"""Every kernel compiles with NVRTC 13.0 too, which many have, and which refuses some C++ that later ones take.

`make test` puts that NVRTC into .venv/nvrtc-13.0, beside the one that CuPy finds for itself.
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("cupy")

from cupy.cuda import nvrtc

from cuflash.backward_plan import backward_mma_default, backward_simt_default, backward_wgmma_default
from cuflash.compiler import Variant, kernel_sources, resource_usage
from cuflash.device import known_device
from cuflash.plan import mma_default, simt_default, wgmma_default
from cuflash.problem import Spec

VERSION = (13, 0)
FOLDER = Path(sys.prefix, "nvrtc-13.0")
LIBRARIES = [*FOLDER.rglob("libnvrtc-builtins.so.13.0"), *FOLDER.rglob("libnvrtc.so.13")]
pytestmark = [
    pytest.mark.skipif(len(LIBRARIES) != 2, reason=f"there is no NVRTC 13.0 in {FOLDER}: make test installs it"),
    pytest.mark.skipif(nvrtc.getVersion()[0] != 13, reason="CuPy is for another CUDA than 13"),
]

CAUSAL = {"right": True}
EVERYTHING = {**dict.fromkeys(("left", "right", "softcap", "mask", "q_lengths", "kv_lengths"), True), "bias": "float32"}
CASES = [
    ("forward_simt", "float32", EVERYTHING, simt_default),
    ("forward_mma", "bfloat16", EVERYTHING, mma_default),
    ("forward_mma", "float32", {}, mma_default),
    ("forward_wgmma", "bfloat16", CAUSAL, wgmma_default),
    ("forward_wgmma", "float16", {"bias": "float32"}, wgmma_default),
    ("forward_wgmma", "bfloat16", {"bias": "float32", "bias_of_keys": True}, wgmma_default),
    ("backward_simt", "float32", EVERYTHING, backward_simt_default),
    ("backward_bias", "float32", EVERYTHING, backward_simt_default),
    ("backward_mma", "bfloat16", EVERYTHING, backward_mma_default),
    ("backward_mma", "float32", EVERYTHING, backward_mma_default),
    ("backward_wgmma", "bfloat16", CAUSAL, backward_wgmma_default),
]
COMPILE = """
import ctypes, pickle, sys
for library in sys.argv[1:]:
    ctypes.CDLL(library, ctypes.RTLD_GLOBAL)  # what has its name is not loaded again
from cupy.cuda import nvrtc
from cuflash.compiler import compile_cubin
print(*nvrtc.getVersion())
print(compile_cubin(pickle.load(sys.stdin.buffer)).log)
"""


def test_every_kernel_is_compiled_here():
    assert {f"{kernel}.cu" for kernel, *_ in CASES} == {name for name in kernel_sources() if name.endswith(".cu")}


@pytest.mark.parametrize(
    ("kernel", "dtype", "features", "default"),
    CASES,
    ids=[f"{kernel}-{dtype}-{'-'.join(features)}" for kernel, dtype, features, _ in CASES],
)
def test_default_tiles_compile_without_spills_advisories_or_warnings(kernel, dtype, features, default):
    spec, device = Spec(dtype, 32, 32, **features), known_device("sm_90")
    variant = Variant(kernel, spec, default(spec, device), device.architecture)
    run = subprocess.run(
        [sys.executable, "-c", COMPILE, *map(str, LIBRARIES)],
        input=pickle.dumps(variant),
        capture_output=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        check=False,
    )
    assert run.returncode == 0, run.stderr.decode()
    version, _, log = run.stdout.decode().partition("\n")
    assert version == "{} {}".format(*VERSION)
    usage = resource_usage(log)
    assert usage.registers > 0
    assert (usage.spill_bytes, usage.advisories) == (0, ())
    assert ": warning " not in log
