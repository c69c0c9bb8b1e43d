# make demo    run attention on real and on long input, and show error, time and memory beside the plain formula
# make test    run the tests; those that need a GPU skip where there is none
# make test-storage   test tuning studies in a PostgreSQL server, which must be installed (Debian: postgresql)
# make bench   time the kernels on the GPU of this machine, beside every other attention that is installed
# make check   format, lint and types, as a change must pass them
#
# Each sets up what it needs in .venv, on its first run and again whenever pyproject.toml changes. It needs Python 3.10 or
# newer; the tests also want g++. PYTHON=… names the interpreter, CUDA_EXTRA=… the build of CuPy: cuda12, cuda13 or nothing.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && echo $$p && break; done)
endif

# The extra that suits the driver, "cuda13" say, or nothing where there is no GPU that CuPy can use.
FIND_CUDA_EXTRA := import ctypes; \
	cuda, count, version = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_int(); \
	failed = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)) \
		or cuda.cuDriverGetVersion(ctypes.byref(version)); \
	major = min(version.value // 1000, 13); \
	print(f"cuda{major}" if not failed and count.value and major >= 12 else "")
ifeq ($(origin CUDA_EXTRA),undefined)
CUDA_EXTRA := $(shell $(PYTHON) -c '$(FIND_CUDA_EXTRA)' 2>/dev/null)
endif

# Without a GPU the tests still compile every kernel for every architecture, which CuPy and NVRTC do on any Linux machine.
TEST_EXTRA := $(or $(CUDA_EXTRA),$(if $(filter Linux,$(shell uname -s)),cuda13))

BIN := .venv/bin
# Python compiles what is imported, when it is: to compile all that is installed would take half a minute.
INSTALL := $(BIN)/python -m pip --disable-pip-version-check install --no-compile --quiet
DEMO_READY := .venv/ready-demo-$(or $(CUDA_EXTRA),cpu)
TEST_READY := .venv/ready-test-$(or $(TEST_EXTRA),cpu)
CHECK_READY := .venv/ready-check
NVRTC_13_0 := $(if $(filter cuda13,$(TEST_EXTRA)),.venv/nvrtc-13.0)
comma := ,

.PHONY: help demo test test-storage bench check clean
help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(DEMO_READY)
	$(BIN)/cuflash demo

test: $(TEST_READY) $(NVRTC_13_0)
	@command -v $(firstword $(CXX)) >/dev/null || echo "make: no C++ compiler ($(CXX)): the tests of emulated kernels" \
		"will skip; install g++ to run them (Debian, Ubuntu: apt-get install g++)" >&2
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST)

test-storage: $(TEST_READY)
	$(INSTALL) --editable '.[storage]'
	$(BIN)/python -m pytest --postgresql tests/test_tuning_postgresql.py

bench: $(DEMO_READY)
	@[ -n "$(CUDA_EXTRA)" ] || { echo "make: the benchmarks need an NVIDIA GPU, and this machine shows none" >&2; exit 1; }
	$(BIN)/cuflash bench --budget 300
	$(BIN)/python benchmarks/forward_simt.py
	$(BIN)/python benchmarks/host_time.py

check: $(CHECK_READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf .venv build dist cuflash.egg-info .mypy_cache .pytest_cache .ruff_cache

.venv/bin/python:
	@[ -n "$(PYTHON)" ] || { echo "make: no Python 3.10 or newer found; name one with PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; echo "make: $(PYTHON) -m venv failed" \
		"(Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 1; }

# The plain formula that the demo compares with is CuPy's matmul, which needs cuBLAS; cuflash does not.
$(DEMO_READY): pyproject.toml | .venv/bin/python
	$(INSTALL) --editable $(if $(CUDA_EXTRA),'.[$(CUDA_EXTRA)]' 'cuda-toolkit[cublas]==$(CUDA_EXTRA:cuda%=%).*',.)
	@touch $@

# PyTorch from PyPI is a CUDA build of several gigabytes. Where pip knows a folder of wheels with a CPU build (--no-index
# looks nowhere else) that is taken, and PyTorch's CPU tensors are tested too. Elsewhere those tests skip.
$(TEST_READY): pyproject.toml | .venv/bin/python
	$(INSTALL) --editable '.[test$(if $(TEST_EXTRA),$(comma)$(TEST_EXTRA))]'
	@$(INSTALL) --no-index --no-deps torch >/dev/null 2>&1 && $(INSTALL) torch || true
	@touch $@

# Kernels compile with this NVRTC too, which many have. Where it is not to be had, the folder is empty and those tests skip.
.venv/nvrtc-13.0: | .venv/bin/python
	@$(INSTALL) --no-deps --target $@ 'nvidia-cuda-nvrtc==13.0.*' >/dev/null 2>&1 || mkdir -p $@

$(CHECK_READY): pyproject.toml | .venv/bin/python
	$(INSTALL) --editable '.[dev]'
	@touch $@
