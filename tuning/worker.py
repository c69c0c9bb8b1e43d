"""The other end of `cuflash.tuning.measure`: a process that compiles candidates, or owns a GPU and runs them.

Requests arrive on standard input and messages leave on standard output, one JSON object a line. A candidate may hang,
crash or corrupt memory, so the process is one that can be killed: it says what it is about to do before it does it,
waits for the GPU by polling, and ends when the GPU's context is lost, when a kernel does not end, or when its parent
has gone.

Before a candidate is timed it is checked: on a small call of odd lengths against float64, and at full size against the
default configuration, each with outputs that hold NaN before and with guard bytes around them.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuflash import timing
from cuflash.backward_launch import BackwardLaunch, make_backward_launch
from cuflash.backward_plan import BackwardChoice
from cuflash.backward_problem import BackwardProblem
from cuflash.compiler import CompileError, Variant, compile_variant, load_functions
from cuflash.config import MmaConfig, SimtConfig, WgmmaConfig
from cuflash.device import DeviceInfo, device_info
from cuflash.launch import Launch, WgmmaLaunch, make_launch
from cuflash.plan import Choice
from cuflash.problem import ITEM_BYTES
from cuflash.tuning.checks import BLOCK_ROWS, LARGEST_DIFFERENCE, Call, allowed, block_errors, why_wrong
from cuflash.tuning.processes import HUNG
from cuflash.tuning.workload import UNALIGNED, Workload
from cuflash.winner import GpuConfig, config_from_json

LOST = 4  # exit code where the GPU's context can no longer be used
COMPILER_NICENESS = 10
POLL_SECONDS = 50e-6
PLACE_BYTES = 17 << 16  # by which, from place to place, an input moves away from the one before it
SCRATCH_BYTES = 1 << 30  # written between runs: more than any L2 holds, and time enough to queue the next launch

COMPARE = r"""
__device__ double read(const void* array, long long i, int item, int is_bfloat16) {
  if (item == 8) return ((const double*)array)[i];
  if (item == 4) return ((const float*)array)[i];
  const unsigned short bits = ((const unsigned short*)array)[i];
  if (is_bfloat16) return __uint_as_float((unsigned int)bits << 16);
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

// The squared difference of `got` and `want`, and the square of `want`, summed over each `size` elements.
extern "C" __global__ void compare(const void* got, const void* want, double* sums, long long size, long long total,
                                   int item, int is_bfloat16) {
  __shared__ double partial[2][256];
  double difference = 0, norm = 0;
  const long long end = min((blockIdx.x + 1) * size, total);
  for (long long i = blockIdx.x * size + threadIdx.x; i < end; i += 256) {
    const double w = read(want, i, item, is_bfloat16), d = read(got, i, item, is_bfloat16) - w;
    difference += d * d;
    norm += w * w;
  }
  partial[0][threadIdx.x] = difference;
  partial[1][threadIdx.x] = norm;
  for (int half = 128; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half)
      for (int k = 0; k < 2; ++k) partial[k][threadIdx.x] += partial[k][threadIdx.x + half];
  }
  if (threadIdx.x < 2) sums[2 * blockIdx.x + threadIdx.x] = partial[threadIdx.x][0];
}
"""

Message = dict[str, Any]
Handlers = Mapping[str, Callable[[Message], Iterator[Message]]]


class Hung(Exception):
    """A kernel did not end in time."""


AnyLaunch = Launch | WgmmaLaunch | BackwardLaunch


class Run(NamedTuple):
    """A candidate that passed its checks."""

    number: int
    config: GpuConfig
    launch: AnyLaunch


# ---- compiling ----


def compile_candidate(request: Message) -> Iterator[Message]:
    """Compile one candidate into the cache of cubins."""
    began = time.perf_counter()
    variant = variant_of(request)
    try:
        cubin = compile_variant(variant).read_bytes()
    except CompileError as error:
        yield {"failed": str(error).splitlines()[0]}
        return
    yield {"done": {"cubin": hashlib.sha256(cubin).hexdigest(), "seconds": time.perf_counter() - began}}


def yield_to_the_gpu(request: Message) -> Iterator[Message]:
    """Let the process that owns the GPU go first: it should never wait for a core."""
    os.nice(COMPILER_NICENESS)
    yield {"done": {}}


def variant_of(request: Message) -> Variant:
    """The Variant that a request names."""
    workload = Workload.from_json(request["workload"])
    config = read_config(workload, request["config"])
    kernel = f"{workload.operation}_{config.family}"
    return Variant(kernel, workload.problem().spec, config, request["architecture"])


def read_config(workload: Workload, document: Mapping[str, Any]) -> GpuConfig:
    """A configuration for `workload` as `cuflash.tuning.measure` sends it."""
    return config_from_json(workload.operation, document["family"], document["config"])


# ---- the GPU ----


class Gpu:
    """One GPU: its memory, a stream, and the calls that are measured on it."""

    def __init__(self, index: int) -> None:
        import cupy

        self.cupy = cupy
        cupy.cuda.Device(index).use()
        self.info: DeviceInfo = device_info(index)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.hang_seconds = 10.0
        free, _ = cupy.cuda.runtime.memGetInfo()
        self._scratch_bytes = min(SCRATCH_BYTES, free // 8)
        self._scratch = self.allocate(self._scratch_bytes)
        self._compare = cupy.RawModule(code=COMPARE).get_function("compare").kernel
        self._forget()

    def _forget(self) -> None:
        """Start with no workload."""
        self._small: Call | None = None
        self._full: Call | None = None
        self._place = 0
        self._step = 0  # bytes by which the next array is moved further than the one before
        self._shift = 0
        self._reference: dict[str, Any] = {}
        self._errors: dict[str, NDArray[Any]] | None = None
        self._verdicts: dict[GpuConfig, str | None] = {}

    # memory

    def allocate(self, size: int) -> Any:
        """Device memory."""
        return self.cupy.cuda.alloc(size)

    def release(self) -> None:
        """Give memory that is not used any more back to the driver."""
        self.cupy.get_default_memory_pool().free_all_blocks()

    def fill(self, address: int, value: int, size: int) -> None:
        """Set bytes."""
        self.cupy.cuda.runtime.memsetAsync(address, value, size, self.stream.ptr)

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy within the GPU, or between it and the host."""
        self.cupy.cuda.runtime.memcpyAsync(target, source, size, 4, self.stream.ptr)  # 4: by the addresses

    def upload(self, part: NDArray[Any], size: int, aligned: bool) -> tuple[Any, int]:
        """Memory that holds `size` elements, those of `part` over and over, and the address of the first."""
        memory = self.allocate((size + UNALIGNED) * part.itemsize + self._shift)
        first = memory.ptr + self._shift + (0 if aligned else UNALIGNED * part.itemsize)
        self._shift += self._step
        self.copy(first, part.ctypes.data, part.nbytes)
        for start in range(part.size, size, part.size):
            count = min(part.size, size - start)
            self.copy(first + start * part.itemsize, first, count * part.itemsize)
        self.wait()
        return memory, first

    def download(self, address: int, size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """A copy of device memory."""
        array = np.empty(size, np.uint8)
        if size:
            self.copy(array.ctypes.data, address, size)
            self.wait()
        return array.view(dtype)

    def wait(self, event: Any = None) -> None:
        """Wait for `event`, by default for everything so far.

        Raises
        ------
        Hung
            When it does not come.
        """
        if event is None:
            event = self.cupy.cuda.Event(disable_timing=True)
            event.record(self.stream)
        end = time.monotonic() + self.hang_seconds
        while not event.done:
            if time.monotonic() > end:
                raise Hung
            time.sleep(POLL_SECONDS)

    # candidates

    def load(self, workload: Workload, forward: GpuConfig | None = None, place: int = 0) -> None:
        """Make the arrays of `workload`, and forget those of the one before. Gradients need O and LSE by `forward`.

        How arrays lie to each other decides in which parts of the L2 cache and of the memory they meet: `place` numbers
        ways to lie.
        """
        if self._full is None or self._full.workload != workload or self._place != place:
            self._full = None
            self._reference = {}
            self.release()
            self._place = place
            small = workload.ragged()
            if self._small is None or self._small.workload != small:
                self._small = self._call(small, 1, forward)
                self._errors = None
                self._verdicts.clear()
            self._step, self._shift = place * PLACE_BYTES, 0
            self._full = self._call(workload, 2, forward)
            self._step = self._shift = 0

    def _call(self, workload: Workload, seed: int, forward: GpuConfig | None) -> Call:
        call = Call(workload, self, seed)
        if call.forward is not None and forward is not None:
            self.launch_of(call.forward, forward)(call.forward.addresses(forward), self.stream)
            self.wait()
        return call

    def launch_of(self, call: Call, config: GpuConfig) -> AnyLaunch:
        """`config` compiled, loaded and ready to run on the arrays of `call`."""
        if isinstance(call.problem, BackwardProblem):
            if isinstance(config, (SimtConfig, MmaConfig, WgmmaConfig)):
                raise TypeError(f"config must be one of the backward pass, got {config!r}")
            return make_backward_launch(call.problem, BackwardChoice(config.family, config, "the tuner"), self.info)
        return make_launch(call.problem, Choice(config.family, config, "the tuner"), self.info)

    def check(self, config: GpuConfig) -> tuple[str | None, AnyLaunch]:
        """What is wrong with the results of `config`, if anything. Later ones must equal the first at full size."""
        small, full = self._small, self._full
        if small is None or full is None:
            raise RuntimeError("check needs a workload")
        if config not in self._verdicts:
            small.poison(config)
            self.launch_of(small, config)(small.addresses(config), self.stream)
            self.wait()
            self._verdicts[config] = why_wrong(small, config, self._errors)
            if self._errors is None:
                self._errors = block_errors(small)
        launch = self.launch_of(full, config)
        if self._verdicts[config] is not None:
            return self._verdicts[config], launch
        full.poison(config)
        for lse in (True, False):  # as it is timed comes last: without LSE, and with what the run before has left
            launch(full.addresses(config, lse), self.stream)
            self.wait()
        if name := full.broken_guard(config):
            return f"it writes beyond {name}", launch
        for name in full.matrices():
            address, size = full.output(name)
            if name not in self._reference:
                self._reference[name] = self.allocate(size)
                self.copy(self._reference[name].ptr, address, size)
                self.wait()
            error = self.largest_difference(full, name)
            if not error <= allowed(LARGEST_DIFFERENCE, full.workload):
                return f"at full size {name} differs from the default's by {error:.2g}", launch
        return None, launch

    def largest_difference(self, call: Call, name: str) -> float:
        """Of a result from the reference: the largest relative L2 of blocks of 32 rows."""
        shape, dtype = call.outputs()[name]
        (address, size_bytes), item = call.output(name), ITEM_BYTES[dtype]
        size, total = BLOCK_ROWS * shape[-1], size_bytes // item
        blocks = -(-total // size)
        sums = self.allocate(16 * blocks)
        arrays = (np.uint64(place) for place in (address, self._reference[name].ptr, sums.ptr))
        sizes = np.int64(size), np.int64(total), np.int32(item), np.int32(dtype == "bfloat16")
        self._compare((blocks,), (256,), (*arrays, *sizes), 0, self.stream)
        difference, norm = self.download(sums.ptr, 16 * blocks, np.dtype(np.float64)).reshape(-1, 2).T
        with np.errstate(divide="ignore", invalid="ignore"):
            return float(np.sqrt(np.where(difference == 0, 0.0, difference / norm)).max())

    def time_in_turn(self, runs: Sequence[Run]) -> dict[int, float]:
        """Milliseconds of one run of each, in this order, each with a cold L2."""
        if self._full is None:
            raise RuntimeError("time_in_turn needs a workload")
        addresses = [self._full.addresses(run.config, lse=False) for run in runs]

        def flush() -> None:
            self.fill(self._scratch.ptr, 0, self._scratch_bytes)

        runs[-1].launch(addresses[-1], self.stream)  # the first is not to find a GPU that has rested
        taken = []
        for run, own in zip(runs, addresses, strict=True):
            start, end = timing.queue(functools.partial(run.launch, own, self.stream), flush, self.stream)
            taken.append((run.number, start, end))
        for number, _, end in taken:
            try:
                self.wait(end)
            except Hung:
                emit({"hung": number})
                raise
        return {number: float(self.cupy.cuda.get_elapsed_time(start, end)) for number, start, end in taken}

    def resources(self, launch: AnyLaunch) -> tuple[int, int]:
        """The most registers of a thread, and bytes of its local memory, of all kernels."""
        from cupy.cuda import driver

        registers, local = 4, 3  # CU_FUNC_ATTRIBUTE_NUM_REGS, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
        functions = [launch.function] if not isinstance(launch, BackwardLaunch) else []
        if isinstance(launch, BackwardLaunch):
            for _, part in launch.parts:
                functions += load_functions(part.variant, [stage.entry for stage in part.stages])
        used = [[driver.funcGetAttribute(what, f.ptr) for f in functions] for what in (registers, local)]
        return max(used[0]), max(used[1])

    def is_lost(self) -> bool:
        """Whether an error has left the context unusable."""
        try:
            self.wait()
        except Hung:
            raise
        except Exception:
            return True
        return False


def measure(gpu: Gpu, request: Message) -> Iterator[Message]:
    """Check and time the candidates of a request beside the anchor, which is number 0."""
    gpu.hang_seconds = float(request["hang_seconds"])
    workload = Workload.from_json(request["workload"])
    forward = request.get("forward")
    of_forward = forward and read_config(workload._replace(backward=False), forward)
    gpu.load(workload, of_forward, request["place"])
    runs: list[Run] = []
    for number, document in enumerate([request["anchor"], *request["candidates"]]):
        yield {"begin": number}
        try:
            config = read_config(workload, document)
            wrong, launch = gpu.check(config)
        except Hung:
            yield {"hung": number}
            raise
        except (RuntimeError, ValueError) as error:  # CUDA errors and CompileError are RuntimeErrors
            lost = gpu.is_lost()
            yield {"checked": number, "status": "crash" if lost else "launch", "error": str(error).splitlines()[0]}
            if lost:
                raise
            continue
        if wrong is not None:
            yield {"checked": number, "status": "wrong", "error": wrong}
            continue
        runs.append(Run(number, config, launch))
        registers, spilled = gpu.resources(launch)
        yield {"checked": number, "status": "ok", "registers": registers, "spill_bytes": spilled}
    if not runs or runs[0].number != 0:
        yield {"done": {}}
        return
    # One run of each to warm up; those that are hopelessly slow are not run again.
    first = gpu.time_in_turn(runs)
    slowest = request.get("give_up", float("inf")) * first[0]
    times = {number: [ms] for number, ms in first.items()}
    kept = [run for run in runs if run.number == 0 or first[run.number] <= slowest]
    order = random.Random(len(kept))
    for turn in range(request["rounds"]):
        yield {"round": turn}
        order.shuffle(kept)
        for number, ms in gpu.time_in_turn(kept).items():
            times[number].append(ms)
    measured = {run.number for run in kept}
    yield {"done": {number: ms[1:] if number in measured and ms[1:] else ms for number, ms in times.items()}}


# ---- the loop ----


_output: Any = None


def emit(message: Message) -> None:
    """Send one message."""
    _output.write(json.dumps(message) + "\n")
    _output.flush()


def serve(handlers: Handlers, lines: Iterator[str]) -> int:
    """Answer requests until there are no more; the exit code says why it ended."""
    for line in lines:
        request = json.loads(line)
        try:
            for message in handlers[request["do"]](request):
                emit(message)
        except Hung:
            return HUNG
        except BrokenPipeError:
            return 0
        except Exception as error:
            emit({"fatal": f"{type(error).__name__}: {error}"})
            return LOST
    return 0


def gpu_handlers(make_gpu: Callable[[int], Gpu] = Gpu) -> Handlers:
    """What a process that compiles, or owns a GPU, can be asked for."""
    gpus: list[Gpu] = []

    def hello(request: Message) -> Iterator[Message]:
        gpus.append(make_gpu(request["gpu"]))
        yield {"done": asdict(gpus[0].info)}

    def measure_here(request: Message) -> Iterator[Message]:
        return measure(gpus[0], request)

    return {"hello": hello, "measure": measure_here, "yield": yield_to_the_gpu, "compile": compile_candidate}


def main(handlers: Handlers) -> None:
    """Serve, with whatever else is printed on standard error."""
    global _output
    _output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    code = serve(handlers, itertools.chain(sys.stdin))
    with suppress(BrokenPipeError):
        _output.flush()
    os._exit(code)  # a kernel that hangs would keep the process


if __name__ == "__main__":
    main(gpu_handlers())
