"""What all tests share: a cubin cache of their own, and the reason for which tests that need a GPU skip."""

import functools
import gc
import os
import shutil
import tempfile

import pytest

# On a GPU, JAX would take most of the memory for itself.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

CACHE = pytest.StashKey[str]()


def pytest_addoption(parser):
    parser.addoption(
        "--all-variants", action="store_true", help="compile every kernel for every combination, which takes minutes"
    )
    parser.addoption("--postgresql", action="store_true", help="test studies in a PostgreSQL server of the tests' own")


def pytest_configure(config):
    """Give the run an empty cache, shared by the workers of pytest-xdist, which inherit the variable."""
    if not hasattr(config, "workerinput"):
        config.stash[CACHE] = tempfile.mkdtemp(prefix="cuflash-tests-")
        os.environ["CUFLASH_CACHE_DIR"] = config.stash[CACHE]


def pytest_unconfigure(config):
    if CACHE in config.stash:
        shutil.rmtree(config.stash[CACHE], ignore_errors=True)


class ModuleForGpu(pytest.Module):
    """A file of tests/gpu: imported everywhere, so that it is known to be sound; its tests exist where a GPU is."""

    def collect(self):
        if self.obj and (why := why_no_gpu()):
            pytest.skip(f"needs a GPU: {why}", allow_module_level=True)
        return super().collect()


def pytest_pycollect_makemodule(module_path, parent):
    if module_path.parent.name != "gpu":
        return None
    module = ModuleForGpu.from_parent(parent, path=module_path)
    module.add_marker(pytest.mark.gpu)
    return module


def pytest_collection_finish():
    gc.freeze()  # thousands of tests, which every collection of garbage would look through


@functools.cache
def why_no_gpu():
    from cuflash.machine import why_no_gpu

    return why_no_gpu()
