"""A worker of the tuner whose GPU is the CPU: same processes, pipes, checks and recovery, and faults on demand.

Nothing is compiled; the launch of a configuration computes with NumPy, and its time is made up from b_c. The
environment variable FAULTS is JSON that names the fault of each b_c that has one.
"""

import ctypes
import json
import os
import signal
import time

import numpy as np

import cuflash
from cuflash import backward_launch, launch, reference
from cuflash.arrays import DTYPE_OF
from cuflash.device import KNOWN_DEVICES
from cuflash.problem import ITEM_BYTES
from cuflash.tuning import worker

FAULTS = json.loads(os.environ.get("FAULTS", "{}"))


class Memory:
    def __init__(self, size):
        self.bytes = np.empty(max(size, 1), np.uint8)
        self.ptr = self.bytes.ctypes.data


class HostGpu(worker.Gpu):
    def __init__(self, index):
        self.info = KNOWN_DEVICES["sm_90"]
        self.stream = None
        self.lost = False
        self.launched = []
        self._forget()

    def allocate(self, size):
        return Memory(size)

    def release(self):
        pass

    def fill(self, address, value, size):
        ctypes.memset(address, value, size)

    def copy(self, target, source, size):
        ctypes.memmove(target, source, size)

    def wait(self, event=None):
        if self.lost:
            raise RuntimeError("an illegal memory access was encountered")

    def resources(self, launch):
        return 100, 0

    def largest_difference(self, call, name):
        item = DTYPE_OF[call.workload.dtype]
        address, size = call.output(name)
        got, want = (self.download(p, size, item).astype(float) for p in (address, self._reference[name].ptr))
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))

    def time_in_turn(self, runs):
        for run in runs:
            if run.launch.fault == "hang later" or (run.launch.fault == "hang elsewhere" and self._place == 1):
                worker.emit({"hung": run.number})
                raise worker.Hung
        lucky = {run.number for run in runs if run.launch.fault == "lucky" and self._place == 0}
        return {run.number: 0.5 if run.number in lucky else 1.0 + run.launch.config.b_c / 1000 for run in runs}

    def launch_of(self, call, config):
        fault = FAULTS.get(str(config.b_c))
        if fault == "refused":
            raise RuntimeError("too many resources requested for launch\nin detail")
        return HostLaunch(self, call, config, fault)


class HostLaunch:
    def __init__(self, gpu, call, config, fault):
        self.gpu, self.call, self.config, self.fault = gpu, call, config, fault

    def __call__(self, addresses, stream):
        call, problem = self.call, self.call.problem
        if self.fault == "hang":
            raise worker.Hung
        if self.fault == "silent":
            time.sleep(3600)
        if self.fault == "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.fault == "sticky":
            self.gpu.lost = True
            return
        names = launch.ADDRESSES if not call.workload.backward else backward_launch.ADDRESSES
        address = dict(zip(names, addresses, strict=not call.workload.backward))  # behind them is what one family knows

        def at(name, shape, dtype):
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return np.frombuffer((ctypes.c_char * size).from_address(address[name]), dtype).reshape(shape)

        written = {name: at(name, *facts) for name, facts in call.outputs().items() if address[name]}
        shapes = problem.shapes()
        given = {name: at(name, shapes[name], problem.spec.dtype) for name in ("q", "k", "v")}
        options = call.workload.options()
        if call.workload.backward:
            given |= {name: at(name, shapes[name], problem.spec.dtype) for name in ("out", "dout")}
            given["lse"] = at("lse", shapes["lse"], problem.spec.lse_dtype)
            results = dict(zip(call.outputs(), cuflash.attention_backward(**given, **options), strict=True))
        else:
            group = problem.h_q // problem.h_kv
            q, k, v = (x if name == "q" else x.repeat(group, 1) for name, x in given.items())
            out, lse = reference.standard_attention(q, k, v, **options, return_lse=True, dtype=problem.spec.accumulator)
            results = {"out": out, "lse": lse}
        for name, array in written.items():
            array[...] = results[name].astype(array.dtype)
        first = next(iter(written))
        result = written[first]
        if self.fault == "wrong":
            result[0, 0, 5] += 1
        if self.fault == "wrong at full size" and call.workload.seqlen[0] > 333:
            result[-1, -1, -1] += 1
        if self.fault == "unwritten":
            result[-1, -1, -3:] = np.nan
        if self.fault == "overrun":
            ctypes.memset(address[first] + result.nbytes, 0, ITEM_BYTES[problem.spec.dtype])
        if self.fault == "overrun of the workspace":
            start, size = call.written(self.config)["workspace"]
            ctypes.memset(start + size, 0, 4)


def compile_nothing(request):
    config = request["config"]["config"]
    fault = FAULTS.get(str(config["b_c"]))
    if fault == "does not compile":
        yield {"failed": "forward_simt.cu:7: too clever"}
        return
    if fault == "kills the compiler":
        os.kill(os.getpid(), signal.SIGSEGV)
    yield {"done": {"cubin": repr(config), "seconds": 1.5}}


if __name__ == "__main__":
    worker.main({**worker.gpu_handlers(HostGpu), "compile": compile_nothing})
