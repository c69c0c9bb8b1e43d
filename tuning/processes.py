"""The child processes of a tuning run, which may hang or crash: one that owns the GPU, and one for each compiler.

The parent watches them: one that says nothing for too long is killed, one that died is started again when it is next
asked. Parent and children (`cuflash.tuning.worker`) speak JSON over pipes.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

from cuflash import cubins
from cuflash.device import DeviceInfo
from cuflash.tuning.workload import Workload
from cuflash.winner import GpuConfig, config_as_json

START_SECONDS = 180.0  # for a process to import CuPy and make a CUDA context
COMPILE_SECONDS = 120.0
HUNG = 3  # exit code of a worker whose kernel did not end
LAST = frozenset({"done", "failed"})  # a message that has one of these ends an answer


class Died(Exception):
    """A worker ended, or said nothing for so long that it was ended; `hung` says which."""

    def __init__(self, message: str, hung: bool) -> None:
        super().__init__(message)
        self.hung = hung


class Worker:
    """A child process that answers requests; started when first asked, and again after it died.

    Parameters
    ----------
    environment : mapping
        Variables that the child has beside the parent's.
    hello : mapping, optional
        A request that each new process gets first; `greeting` is its answer.
    """

    command: tuple[str, ...] = (sys.executable, "-m", "cuflash.tuning.worker")

    def __init__(
        self,
        environment: Mapping[str, str],
        hello: Mapping[str, Any] | None = None,
        command: tuple[str, ...] | None = None,
    ) -> None:
        self.command = command or self.command
        self.greeting: dict[str, Any] = {}
        self._environment = environment
        self._hello = hello
        self._process: subprocess.Popen[str] | None = None
        self._messages: queue.Queue[str | None] = queue.Queue()
        self._errors: IO[bytes] | None = None
        self._is_answering = False

    def start(self) -> None:
        """Start the process, unless it runs.

        Raises
        ------
        Died
            When it does not get as far as its greeting.
        """
        if self._process is not None:
            return
        paths = [str(Path(cubins.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
        self._messages = queue.Queue()
        self._is_answering = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **self._environment},
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        threading.Thread(target=_read, args=(self._process.stdout, self._messages), daemon=True).start()
        if self._hello is not None:
            self.greeting = list(self.ask(self._hello, START_SECONDS))[-1]["done"]

    def ask(self, request: Mapping[str, Any], silence: float) -> Iterator[dict[str, Any]]:
        """The messages that answer `request`, up to the last. The rest of an answer that was interrupted is let pass.

        Raises
        ------
        Died
            When the process ends, or says nothing for `silence` seconds.
        """
        self.start()
        if self._is_answering:
            for _ in self._answer(silence):
                pass
        process = self._process
        if process is None or process.stdin is None:
            raise Died("it was closed", hung=False)
        self._is_answering = True
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except OSError as error:
            self.close()
            raise Died(f"it ended: {error}", hung=False) from error
        yield from self._answer(silence)

    def _answer(self, silence: float) -> Iterator[dict[str, Any]]:
        fatal = ""
        while True:
            try:
                line = self._messages.get(timeout=silence)
            except queue.Empty:
                self.close()
                raise Died(f"it said nothing for {silence:.0f} s", hung=True) from None
            if line is None:
                code = None if self._process is None else self._process.wait()
                reason = fatal or f"it ended with exit code {code}{self._last_words()}"
                self.close()
                raise Died(reason, hung=code == HUNG)
            message: dict[str, Any] = json.loads(line)
            fatal = message.get("fatal", fatal)
            is_last = bool(LAST & message.keys())
            self._is_answering = not is_last
            yield message
            if is_last:
                return

    def interrupt(self) -> None:
        """Do as Ctrl-C does."""
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)

    def _last_words(self) -> str:
        """The last line on its standard error."""
        if self._errors is None:
            return ""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((f": {line}" for line in reversed(lines) if line.strip()), "")

    def close(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout, self._errors):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _read(pipe: Any, messages: queue.Queue[str | None]) -> None:
    """Pass lines on, and None at their end."""
    with contextlib.suppress(OSError, ValueError):
        for line in pipe:
            messages.put(line)
    messages.put(None)


class Compiled(NamedTuple):
    """A candidate's binary, by its hash; `error` where it does not compile."""

    cubin: str
    seconds: float
    error: str = ""


class Machine:
    """The processes of one tuning run on one GPU. Use it in a ``with`` statement, which ends them.

    Parameters
    ----------
    gpu : int
        CUDA's number of the device.
    compilers : int
        How many candidates are compiled at a time.
    folder : str, optional
        Where their binaries are kept meanwhile, which would flood the user's cache; by default a folder of its own.
    """

    def __init__(self, gpu: int, compilers: int, folder: str | None = None) -> None:
        self.compilers = compilers
        self._folder = None if folder is not None else tempfile.TemporaryDirectory(prefix="cuflash-tune-")
        kept_in = folder if self._folder is None else self._folder.name
        environment = {cubins.ENVIRONMENT_VARIABLE: str(kept_in), "OPENBLAS_NUM_THREADS": "1"}
        self.gpu = Worker(environment, {"do": "hello", "gpu": gpu})
        self._compilers = [Worker(environment, {"do": "yield"}) for _ in range(compilers)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._compilers:
            self._idle.put(worker)
        self._pool = ThreadPoolExecutor(compilers)
        self._compiled: dict[tuple[Any, ...], Future[Compiled]] = {}

    def __enter__(self) -> Machine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for worker in (self.gpu, *self._compilers):
            worker.close()  # what it was asked ends with Died
        self._pool.shutdown()
        for worker in self._compilers:  # one that was just being started
            worker.close()
        if self._folder is not None:
            self._folder.cleanup()

    def device(self) -> DeviceInfo:
        """The GPU.

        Raises
        ------
        Died
            When it cannot be used.
        """
        self.gpu.start()
        described = self.gpu.greeting
        return DeviceInfo(**{**described, "compute_capability": tuple(described["compute_capability"])})

    def compile(self, workload: Workload, config: GpuConfig, architecture: str) -> Future[Compiled]:
        """Compile `config` for `workload` in the background, unless what it compiles to is on its way already."""
        binary = (workload.problem().spec, architecture, type(config), *config.constants().items())
        if binary not in self._compiled:
            request = {
                "do": "compile",
                "workload": workload.as_json(),
                "config": as_document(config),
                "architecture": architecture,
            }
            self._compiled[binary] = self._pool.submit(self._compile, request)
        return self._compiled[binary]

    def cancel(self, compiling: Iterable[Future[Compiled]]) -> None:
        """Forget what no compiler has begun with."""
        cancelled = {future for future in compiling if future.cancel()}
        self._compiled = {binary: future for binary, future in self._compiled.items() if future not in cancelled}

    def _compile(self, request: Mapping[str, Any]) -> Compiled:
        worker = self._idle.get()
        try:
            message = list(worker.ask(request, COMPILE_SECONDS))[-1]
        except Died as error:
            return Compiled("", 0.0, f"the compiler failed: {error}")
        finally:
            self._idle.put(worker)
        return Compiled("", 0.0, message["failed"]) if "failed" in message else Compiled(**message["done"])


def as_document(config: GpuConfig) -> dict[str, Any]:
    """A configuration as a worker reads it."""
    return {"family": config.family, "config": config_as_json(config)}
