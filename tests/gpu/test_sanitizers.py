"""compute-sanitizer finds nothing in the kernels, and finds a fault that is put there."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = {"forward": "sanitized.py", "backward": "sanitized_backward.py"}
SECONDS = 520  # several of them, side by side on one GPU, take more than half of that
SANITIZER = shutil.which("compute-sanitizer", path=f"{os.environ.get('PATH', '')}:/usr/local/cuda/bin")

pytestmark = [
    pytest.mark.skipif(SANITIZER is None, reason="compute-sanitizer is not installed"),
    pytest.mark.timeout(SECONDS + 20),
]

TOOLS = ("memcheck", "racecheck", "synccheck")
BACKWARD_BARRIER = "__syncthreads();  // every warp is done with the tiles"
BACKWARD_MMA_BARRIER = "__syncthreads();       // for every thread"
SIMT_BARRIER = "__syncthreads();  // every warp is done with K"
MMA_BARRIER = "__syncthreads();                // for every thread"
# Where no block or warp waits for another any more, as they do in the main loop: for ever, if the tool ends threads.
END_OF_BACKWARD_MMA = "__syncthreads();\n  Element* const dq_out"
DIVERGENT = "if (threadIdx.x % 2) { __syncthreads(); } else { __syncthreads(); __nanosleep(1); } //"
FAULTS = [  # tool, file, text, replacement
    ("memcheck", "tile.cuh", "if (row < rows_live && column < columns_live)", "if (true)"),
    ("racecheck", "forward_simt.cu", SIMT_BARRIER, ""),
    ("synccheck", "forward_simt.cu", SIMT_BARRIER, DIVERGENT),
    ("memcheck", "forward_mma.cu", "see.key_length - tile * kBc, p.d_v)", "kBc, p.d_v)"),
    ("racecheck", "forward_mma.cu", MMA_BARRIER, "//"),
    ("synccheck", "forward_mma.cu", MMA_BARRIER, DIVERGENT),
    ("memcheck", "backward_simt.cu", "own.row(i) >= rows_live", "false"),
    ("racecheck", "backward_simt.cu", BACKWARD_BARRIER, ""),
    ("synccheck", "backward_simt.cu", BACKWARD_BARRIER, DIVERGENT),
    ("memcheck", "backward_mma.cu", "if (row < rows_live && column < columns_live)", "if (true)"),
    ("racecheck", "backward_mma.cu", BACKWARD_MMA_BARRIER, "//"),
    ("synccheck", "backward_mma.cu", END_OF_BACKWARD_MMA, END_OF_BACKWARD_MMA.replace("__syncthreads();", DIVERGENT)),
]


def sanitize(tool, direction, *fault):
    kernels = f"kernel_substring={direction}_"
    script = Path(__file__).with_name(SCRIPTS[direction])
    command = [
        SANITIZER,
        "--tool",
        tool,
        "--error-exitcode",
        "9",
        "--kernel-name",
        kernels,
        sys.executable,
        str(script),
    ]
    done = subprocess.run([*command, *fault], capture_output=True, text=True, timeout=SECONDS, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("direction", SCRIPTS)
@pytest.mark.parametrize("tool", TOOLS)
def test_kernels_are_clean(tool, direction):
    code, log = sanitize(tool, direction)
    assert code == 0, log[-20_000:]
    assert "finished" in log


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[0]}-{fault[1].partition('.')[0]}")
def test_a_seeded_fault_is_found(fault):
    tool, *where = fault
    code, log = sanitize(tool, "backward" if where[0].startswith("backward_") else "forward", *where)
    assert code == 9, log[-20_000:]
