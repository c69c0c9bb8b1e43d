"""What the CUDA driver makes of bad cubins, and of the shared memory that a configuration asks for."""

import dataclasses

import pytest

from cuflash import compiler, cubins
from cuflash.compiler import Variant, compile_cubin, compile_variant, load_function
from cuflash.device import device_info
from cuflash.plan import simt_default
from cuflash.problem import Spec

cupy = pytest.importorskip("cupy")


@pytest.fixture
def variant(tmp_path, monkeypatch):
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path / "cubins"))
    monkeypatch.setattr(compiler, "_functions", {})
    device = device_info(cupy.cuda.runtime.getDevice())
    spec = Spec("float32", 64, 64)
    return Variant("forward_simt", spec, simt_default(spec, device), device.architecture)


BAD = {
    "empty": lambda variant, cubin: b"",
    "text": lambda variant, cubin: b"not a cubin\0",
    "for-another-gpu": lambda variant, cubin: compile_cubin(dataclasses.replace(variant, architecture="sm_75")).cubin,
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_cubin_with_a_right_hash_is_compiled_again(variant, bad):
    path = compile_variant(variant)
    whole = path.read_bytes()
    path.unlink()
    planted = cubins.store(compiler._key(variant), BAD[bad](variant, whole))
    function = load_function(variant)
    assert function.ptr
    assert not planted.exists()


def test_the_function_may_use_the_shared_memory_of_its_configuration(variant):
    function = load_function(variant)
    driver = cupy.cuda.driver
    granted = driver.funcGetAttribute(driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, function.ptr)
    assert granted >= variant.config.shared_bytes(variant.spec)
