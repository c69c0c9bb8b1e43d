import dataclasses
import logging
import re
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("cupy")

import cupy
from cupy.cuda import driver, nvrtc

from cuflash import compiler, cubins
from cuflash.compiler import CompileError, Variant, compile_cubin, compile_variant, load_function
from cuflash.config import SimtConfig
from cuflash.problem import DTYPES, Spec

SPEC = Spec("float32", 64, 32)
CONFIG = SimtConfig(b_r=64, b_c=32, threads=128, lanes_per_row=8)
VARIANT = Variant("tiny", SPEC, CONFIG, "sm_86")
LARGE = dataclasses.replace(VARIANT, config=SimtConfig(b_r=128, b_c=128, threads=128, lanes_per_row=8))

TINY = """#include "ptx.cuh"
#include "variant.cuh"
#include "twice.cuh"
extern "C" __global__ void __launch_bounds__(kThreads) tiny(int* out) {
  out[threadIdx.x] = twice(kD);
}
"""
SOURCES = {
    "ptx.cuh": "struct half_t { unsigned short bits; };\nstruct bf16_t { unsigned short bits; };\n",
    "twice.cuh": "__device__ int twice(int x) { return 2 * x; }\n",
    "tiny.cu": TINY,
    "other.cu": "",
}


@pytest.fixture
def sources(monkeypatch):
    """The kernel sources, to change as a test likes: here those of one tiny kernel."""
    own = dict(SOURCES)
    monkeypatch.setattr(compiler, "kernel_sources", lambda: own)
    return own


@pytest.fixture
def compilations(sources, tmp_path, monkeypatch):
    """The variants that NVRTC is given, in a process that has loaded none and with an empty cache on disk."""
    given = []

    def counted(variant):
        given.append(variant)
        return compile_cubin(variant)

    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cubins"))
    monkeypatch.setattr(compiler, "compile_cubin", counted)
    monkeypatch.setattr(compiler, "_functions", {})
    monkeypatch.setattr(cubins, "_private", {})
    monkeypatch.setattr(cubins, "_warned", set())
    return given


# ---- the variant ----


def test_the_header_declares_every_constant():
    spec = Spec("float16", 64, 32, right=True, mask=True, bias="float32", kv_lengths=True, aligned=False)
    assert Variant("forward_simt", spec, CONFIG, "sm_86").header() == (
        "// forward_simt for sm_86\n"
        "using Element = half_t;\n"
        "using BiasElement = float;\n"
        "constexpr int kD = 64;\n"
        "constexpr int kDv = 32;\n"
        "constexpr bool kLeft = false;\n"
        "constexpr bool kRight = true;\n"
        "constexpr bool kSoftcap = false;\n"
        "constexpr bool kMask = true;\n"
        "constexpr bool kBias = true;\n"
        "constexpr bool kBiasOfKeys = false;\n"
        "constexpr bool kQLengths = false;\n"
        "constexpr bool kKvLengths = true;\n"
        "constexpr bool kAligned = false;\n"
        "constexpr int kBr = 64;\n"
        "constexpr int kBc = 32;\n"
        "constexpr int kThreads = 128;\n"
        "constexpr int kLanesPerRow = 8;\n"
    )


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Spec)])
def test_every_field_of_a_spec_is_compiled_in(field):
    other = {"dtype": "float64", "d": 128, "d_v": 128, "bias": "float32"}.get(field, not getattr(SPEC, field))
    variant = dataclasses.replace(VARIANT, kernel="forward_wgmma")
    changed = dataclasses.replace(variant, spec=dataclasses.replace(SPEC, **{field: other}))
    assert changed.header() != variant.header()


def test_that_a_bias_is_one_of_keys_is_compiled_into_the_kernel_alone_that_makes_use_of_it():
    of_keys = dataclasses.replace(VARIANT, spec=dataclasses.replace(SPEC, bias="float32", bias_of_keys=True))
    of_rows = dataclasses.replace(VARIANT, spec=dataclasses.replace(SPEC, bias="float32"))
    assert of_keys.header() == of_rows.header()


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(SimtConfig)])
def test_every_field_of_a_configuration_is_compiled_in(field):
    changed = dataclasses.replace(VARIANT, config=dataclasses.replace(CONFIG, **{field: 16}))
    assert changed.header() != VARIANT.header()


@pytest.mark.parametrize("dtype", DTYPES)
def test_elements_have_the_size_of_their_dtype(sources, dtype):
    size = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}[dtype]
    check = f"static_assert(sizeof(Element) == {size} && sizeof(BiasElement) == {size});\n"
    sources["tiny.cu"] = TINY.replace("extern", check + "extern", 1)
    spec = dataclasses.replace(SPEC, dtype=dtype, bias=dtype)
    assert compile_cubin(dataclasses.replace(VARIANT, spec=spec)).cubin


def test_a_variant_names_what_is_on():
    assert str(dataclasses.replace(VARIANT, spec=dataclasses.replace(SPEC, right=True))) == (
        "tiny for sm_86 (Element=float, BiasElement=float, kD=64, kDv=32, kRight, kAligned, "
        "kBr=64, kBc=32, kThreads=128, kLanesPerRow=8)"
    )


@pytest.mark.parametrize("kernel", ["../tiny", "tiny.cu", "Tiny", ""])
def test_a_kernel_is_a_lower_case_identifier(kernel):
    with pytest.raises(ValueError, match="kernel must be a lower-case identifier"):
        dataclasses.replace(VARIANT, kernel=kernel)


@pytest.mark.parametrize("architecture", ["sm_90a", "90", "sm_9", "sm_90 -G", ""])
def test_an_architecture_is_sm_and_a_number(architecture):
    with pytest.raises(ValueError, match="architecture must have the form sm_90"):
        dataclasses.replace(VARIANT, architecture=architecture)


def test_a_constant_is_a_number_or_a_flag():
    class Injected(SimtConfig):
        def constants(self):
            return {"kBr": 64.5}

    with pytest.raises(TypeError, match=r"kBr = 64\.5"):
        dataclasses.replace(VARIANT, config=Injected(64, 32, 128, 8)).header()


# ---- NVRTC ----


def test_a_cubin_is_whole(sources):
    cubin = compile_cubin(VARIANT).cubin
    sections_at, entry_size, entries = *struct.unpack_from("<Q", cubin, 40), *struct.unpack_from("<HH", cubin, 58)
    segments_at, segment_size, segments = *struct.unpack_from("<Q", cubin, 32), *struct.unpack_from("<HH", cubin, 54)
    assert cubin[:4] == b"\x7fELF"
    assert len(cubin) == max(sections_at + entry_size * entries, segments_at + segment_size * segments)


def test_the_sources_of_the_package_are_found():
    names = compiler.kernel_sources()
    assert {"ptx.cuh", "forward_simt.cu"} <= names.keys()
    assert all(text.strip() for text in names.values())


def test_an_unknown_kernel_is_refused_with_the_names_of_all(sources):
    with pytest.raises(ValueError, match="kernel must be one of other, tiny, got 'none'"):
        compile_variant(dataclasses.replace(VARIANT, kernel="none"))


def compile_and_fail(variant=VARIANT):
    with pytest.raises(CompileError) as caught:
        compile_cubin(variant)
    return caught.value


def test_an_error_names_file_and_line(sources):
    sources["tiny.cu"] = TINY.replace("twice(kD)", "thrice(kD)")
    error = compile_and_fail()
    assert str(error).startswith('tiny.cu:5: identifier "thrice" is undefined\n')
    assert (error.kernel, error.file, error.line) == ("tiny", "tiny.cu", 5)


def test_an_error_in_a_header_names_the_header(sources):
    sources["twice.cuh"] = '\nstatic_assert(kBr == 65, "tiles have 65 rows");\n'
    error = compile_and_fail()
    assert str(error).startswith('twice.cuh:2: static assertion failed with "tiles have 65 rows"\n')
    assert (error.kernel, error.file, error.line) == ("tiny", "twice.cuh", 2)


def test_a_header_that_is_missing_is_named(sources):
    del sources["twice.cuh"]
    assert str(compile_and_fail()).startswith('tiny.cu:3: cannot open source file "twice.cuh"\n')


def test_an_error_of_the_assembler_is_named(sources):
    sources["tiny.cu"] = TINY.replace("out[", "__shared__ int s[20000]; s[out[0]] = out[1]; out[2] = s[out[3]]; out[")
    error = compile_and_fail()
    assert str(error).startswith("tiny.cu: Entry function 'tiny' uses too much shared data")
    assert (error.file, error.line) == ("tiny.cu", None)


def test_an_error_shows_log_and_configuration(sources):
    sources["tiny.cu"] = TINY.replace("twice(kD)", "thrice(kD)")
    error = compile_and_fail()
    assert error.log in str(error)
    assert "1 error detected" in error.log
    assert str(error).endswith(f"variant.cuh:\n{VARIANT.header()}")


def test_an_architecture_newer_than_nvrtc_is_named_with_it(sources, monkeypatch):
    monkeypatch.setattr(nvrtc, "getSupportedArchs", lambda: (50, 80, 90))
    monkeypatch.setattr(nvrtc, "getVersion", lambda: (12, 0))
    error = compile_and_fail(dataclasses.replace(VARIANT, architecture="sm_100"))
    assert str(error).startswith("sm_100 is newer than NVRTC 12.0, which knows GPUs up to sm_90")


def test_an_architecture_that_nvrtc_leaves_out_is_named_with_it(sources):
    error = compile_and_fail(dataclasses.replace(VARIANT, architecture="sm_81"))
    assert str(error).startswith(f"NVRTC {'.'.join(map(str, nvrtc.getVersion()))} compiles for sm_")
    assert "got sm_81" in str(error)


def test_a_missing_nvrtc_is_told_with_the_remedy(sources, monkeypatch):
    def missing():
        raise RuntimeError("CuPy failed to load libnvrtc.so")

    monkeypatch.setattr(nvrtc, "getVersion", missing)
    with pytest.raises(RuntimeError, match=r"failed to load libnvrtc\.so\. Install cuflash\[cuda12\]"):
        compile_variant(VARIANT)


WGMMA = 'asm volatile("wgmma.fence.sync.aligned;"); out['


def test_a_kernel_has_no_instructions_of_one_architecture_only(sources):
    sources["tiny.cu"] = TINY.replace("out[", WGMMA)
    assert "wgmma.fence" in str(compile_and_fail(dataclasses.replace(VARIANT, architecture="sm_90")))


def test_a_kernel_that_asks_for_it_has_the_instructions_of_one_architecture_only(sources, monkeypatch):
    monkeypatch.setattr(compiler, "ARCHITECTURE_SPECIFIC", frozenset({"tiny"}))
    sources["tiny.cu"] = TINY.replace("out[", WGMMA)
    assert compile_cubin(dataclasses.replace(VARIANT, architecture="sm_90")).cubin


# ---- what the log says ----

LOG = """
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored to maintain minimum register requirements.
ptxas info    : 8 bytes gmem, 16 bytes cmem[4]
ptxas info    : Compiling entry function 'forward' for 'sm_90a'
ptxas info    : Function properties for forward
    256 bytes stack frame, 24 bytes spill stores, 40 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 256 bytes cumulative stack size, 1024 bytes smem, 360 bytes cmem[0]
"""


def test_resource_usage_is_read_from_the_log():
    advisory = (
        "ptxas info    : (C7508) Potential Performance Loss: "
        "'setmaxnreg' ignored to maintain minimum register requirements."
    )
    assert compiler.resource_usage(LOG) == (168, 64, 256, 1024, (advisory,))


def test_resource_usage_is_read_from_the_log_of_nvrtc_at_hand(sources):
    usage = compiler.resource_usage(compile_cubin(VARIANT).log)
    assert 0 < usage.registers < 32
    assert usage[1:] == (0, 0, 0, ())


def test_spilled_registers_are_read_from_the_log_of_nvrtc_at_hand(sources):
    sources["tiny.cu"] = """#include "variant.cuh"
extern "C" __global__ void __launch_bounds__(1024) tiny(float* p) {
  float a[128];
#pragma unroll
  for (int i = 0; i < 128; ++i) a[i] = p[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 128; ++i) p[i] = a[i] * a[127 - i] + p[i];
}
"""
    usage = compiler.resource_usage(compile_cubin(VARIANT).log)
    assert usage.registers == 64
    assert usage.spill_bytes > 0
    assert usage.stack_bytes > 0


# ---- cubins on disk ----


def test_a_variant_is_compiled_to_a_cubin_on_disk(compilations):
    path = compile_variant(VARIANT)
    assert path.parent == cubins.user_directory()
    assert path.read_bytes()[:4] == b"\x7fELF"


def test_a_variant_is_compiled_once(compilations):
    assert compile_variant(VARIANT) == compile_variant(VARIANT)
    assert compilations == [VARIANT]


def test_a_warm_cache_compiles_nothing(compilations, monkeypatch):
    path = compile_variant(VARIANT)
    monkeypatch.setattr(nvrtc, "createProgram", None)
    assert compile_variant(VARIANT) == path


def test_each_architecture_has_its_own_cubin(compilations):
    assert compile_variant(VARIANT) != compile_variant(dataclasses.replace(VARIANT, architecture="sm_80"))


def test_each_configuration_has_its_own_cubin(compilations):
    assert compile_variant(VARIANT) != compile_variant(LARGE)


@pytest.mark.parametrize("file", ["tiny.cu", "ptx.cuh", "twice.cuh"])
def test_a_change_of_the_kernel_or_of_a_header_compiles_anew(compilations, sources, file):
    compile_variant(VARIANT)
    sources[file] += "// changed\n"
    compile_variant(VARIANT)
    assert len(compilations) == 2


def test_a_change_of_another_kernel_compiles_nothing(compilations, sources):
    compile_variant(VARIANT)
    sources["other.cu"] += "// changed\n"
    compile_variant(VARIANT)
    assert len(compilations) == 1


def test_another_nvrtc_compiles_anew(compilations, monkeypatch):
    compile_variant(VARIANT)
    monkeypatch.setattr(nvrtc, "getVersion", lambda: (13, 99))
    compile_variant(VARIANT)
    assert len(compilations) == 2


def test_other_options_compile_anew(compilations, monkeypatch):
    compile_variant(VARIANT)
    options = compiler._options
    monkeypatch.setattr(compiler, "_options", lambda variant: (*options(variant), "--use_fast_math"))
    compile_variant(VARIANT)
    assert len(compilations) == 2


def test_a_damaged_cubin_is_compiled_anew(compilations):
    path = compile_variant(VARIANT)
    whole = path.read_bytes()
    path.write_bytes(whole[:1000])
    assert compile_variant(VARIANT).read_bytes()[:4] == b"\x7fELF"
    assert len(compilations) == 2


def test_a_variant_is_compiled_once_where_the_directory_cannot_be_used(compilations):
    cubins.user_directory().write_text("")
    assert compile_variant(VARIANT) == compile_variant(VARIANT)
    assert compilations == [VARIANT]


def test_a_kernel_that_does_not_compile_leaves_no_file(compilations, sources):
    sources["tiny.cu"] = "nonsense"
    with pytest.raises(CompileError):
        compile_variant(VARIANT)
    assert list(cubins.user_directory().iterdir()) == []


def test_threads_that_ask_for_one_variant_compile_it_once(compilations):
    with ThreadPoolExecutor(8) as threads:
        paths = set(threads.map(lambda _: compile_variant(VARIANT), range(32)))
    assert len(paths) == 1
    assert compilations == [VARIANT]


def test_different_variants_compile_at_the_same_time(compilations, monkeypatch):
    both = threading.Barrier(2, timeout=30)

    def meet(variant):
        both.wait()
        return compile_cubin(variant)

    monkeypatch.setattr(compiler, "compile_cubin", meet)
    with ThreadPoolExecutor(2) as threads:
        assert len(set(threads.map(compile_variant, [VARIANT, LARGE]))) == 2


def test_the_first_compilation_is_logged_with_variant_and_seconds(compilations, caplog):
    caplog.set_level(logging.INFO, "cuflash")
    compile_variant(VARIANT)
    compile_variant(VARIANT)
    [message] = caplog.messages
    assert re.fullmatch(rf"compiled {re.escape(str(VARIANT))} in \d+\.\d s", message)


# ---- loading, with a driver that is not there ----


class Refusal(driver.CUDADriverError):
    """What CuPy raises when the driver answers with `status`; made without a driver."""

    def __init__(self, status):
        RuntimeError.__init__(self, f"CUDA error {status}")
        self.status = status


class Kernel:
    """A loaded kernel, before it is taken from CuPy's wrapper."""

    max_dynamic_shared_size_bytes = None

    @property
    def kernel(self):
        return self


class Driver:
    """A CUDA driver: the current device, what was loaded on it, and what it answers to the next loads."""

    def __init__(self):
        self.device = 0
        self.loaded = []
        self.answers = []

    def load(self, *, path):
        with open(path, "rb") as file:
            self.loaded.append((self.device, file.read()))
        if self.answers and (status := self.answers.pop(0)):
            raise Refusal(status)
        return self

    def get_function(self, name):
        assert name == "tiny"
        return Kernel()


@pytest.fixture
def cuda(compilations, monkeypatch):
    """A driver that accepts every cubin until told otherwise."""
    own = Driver()
    monkeypatch.setattr(cupy, "RawModule", own.load)
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: own.device)
    return own


def test_a_function_is_loaded_from_its_cubin(cuda):
    load_function(VARIANT)
    assert cuda.loaded == [(0, compile_variant(VARIANT).read_bytes())]


def test_a_function_is_loaded_once(cuda):
    assert load_function(VARIANT) is load_function(VARIANT)
    assert len(cuda.loaded) == 1


def test_a_function_is_loaded_once_per_device_and_compiled_once(cuda, compilations):
    first = load_function(VARIANT)
    cuda.device = 1
    assert load_function(VARIANT) is not first
    assert [device for device, _ in cuda.loaded] == [0, 1]
    assert compilations == [VARIANT]


def test_threads_that_ask_for_one_function_load_it_once(cuda):
    with ThreadPoolExecutor(8) as threads:
        functions = set(threads.map(lambda _: load_function(VARIANT), range(32)))
    assert len(functions) == len(cuda.loaded) == 1


def test_up_to_48_kilobytes_of_shared_memory_are_not_asked_for(cuda):
    assert CONFIG.shared_bytes(SPEC) <= 48 * 1024
    assert load_function(VARIANT).max_dynamic_shared_size_bytes is None


def test_more_shared_memory_is_asked_for(cuda):
    assert LARGE.config.shared_bytes(SPEC) > 48 * 1024
    assert load_function(LARGE).max_dynamic_shared_size_bytes == LARGE.config.shared_bytes(SPEC)


@pytest.mark.parametrize("status", [200, 209, 301], ids=["invalid-image", "no-binary-for-gpu", "file-not-found"])
def test_a_cubin_that_the_driver_refuses_is_compiled_once_more(cuda, compilations, status):
    cuda.answers = [status]
    assert isinstance(load_function(VARIANT), Kernel)
    assert compilations == [VARIANT, VARIANT]


def test_a_cubin_that_the_driver_refuses_twice_is_an_error(cuda, compilations):
    cuda.answers = [200, 200]
    with pytest.raises(CompileError, match=r"the CUDA driver refuses tiny for sm_86 .*: CUDA error 200"):
        load_function(VARIANT)
    assert compilations == [VARIANT, VARIANT]
    assert cubins.cache_info().files == 0


def test_another_error_of_the_driver_leaves_the_cubin_alone(cuda, compilations):
    out_of_memory = 2
    cuda.answers = [out_of_memory]
    with pytest.raises(Refusal):
        load_function(VARIANT)
    load_function(VARIANT)
    assert compilations == [VARIANT]
