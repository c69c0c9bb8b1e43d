"""Every kernel compiles, at its default tiles, for every generation of GPU: without one."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

pytest.importorskip("cupy")

from cupy.cuda import nvrtc

from cuflash.compiler import Variant, compile_cubin, kernel_sources, resource_usage
from cuflash.config import why_not_wgmma
from cuflash.device import KNOWN_DEVICES, known_device
from cuflash.plan import (
    MMA_DEFAULTS,
    WGMMA_DEFAULTS,
    WINDOW_TILES,
    mma_default,
    simt_default,
    wgmma_default,
    why_not_mma_by_default,
)
from cuflash.problem import DTYPES, ITEM_BYTES, Spec

CONFIG_OF = {"forward_simt": simt_default, "forward_mma": mma_default, "forward_wgmma": wgmma_default}
WHY_NOT = {
    "forward_simt": lambda spec, device: None,
    "forward_mma": why_not_mma_by_default,
    "forward_wgmma": why_not_wgmma,
}
CROWDED_BYTES = 64  # of local memory, a thread: of tiles that were timed to be the fastest all the same
HEAD_DIMS = (64, 128, 256)
ARCHITECTURES = tuple(KNOWN_DEVICES)
ALIKE = ("sm_86", "sm_89", "sm_120")  # with as much shared memory, and so the same tiles
CASES = [
    pytest.param(kernel, architecture, dtype, id=f"{kernel}-{architecture}-{dtype}")
    for kernel in CONFIG_OF
    for architecture in ARCHITECTURES
    for dtype in DTYPES
    if WHY_NOT[kernel](Spec(dtype, 64, 64), known_device(architecture)) is None
]


def features(dtype):
    """What may be on besides plain attention: nothing, the causal mask, everything."""
    everything = dict.fromkeys(("left", "right", "softcap", "mask", "q_lengths", "kv_lengths"), True)
    return {}, {"right": True}, {**everything, "bias": dtype}


def specs(kernel, architecture, dtype, all_of_them):
    """Each head dim with each of the features; by default with one of them, the features rotating.

    They rotate so that any three of architecture, dtype, head dim and features meet in every combination, at a third of
    the compilations of all four. Architectures that are alike share out the head dims. Of the kernel on CUDA cores,
    whose instructions are the same everywhere, any two meet, at a ninth of the compilations.
    """
    offset = ARCHITECTURES.index(architecture) + DTYPES.index(dtype)
    if kernel == "forward_simt" and not all_of_them:
        d, some = HEAD_DIMS[offset % len(HEAD_DIMS)], features(dtype)
        yield Spec(dtype, d, d, **some[(offset + DTYPES.index(dtype)) % len(some)])
        return
    for number, d in enumerate(HEAD_DIMS):
        if architecture in ALIKE and not all_of_them and (ALIKE.index(architecture) + DTYPES.index(dtype) - number) % 3:
            continue
        some = features(dtype)
        for chosen in some if all_of_them else [some[(offset + number) % len(some)]]:
            yield Spec(dtype, d, d, **chosen)


def is_crowded(kernel, spec, config, device):
    """Whether default tiles are of a row that is."""
    if kernel == "forward_mma":
        rows = [row for row in MMA_DEFAULTS[ITEM_BYTES[spec.dtype]] if row.serves(spec, device)]
    else:
        rows = WGMMA_DEFAULTS if kernel == "forward_wgmma" else ()
    return any(row.crowded for row in rows if row.config == config)


def expect_clean(kernel, architecture, wanted, **sizes):
    """Compile the default tiles of each spec: they spill nothing, crowded ones next to nothing."""
    if int(architecture.removeprefix("sm_")) not in nvrtc.getSupportedArchs():
        pytest.skip(f"NVRTC {nvrtc.getVersion()} does not know {architecture}")
    device = known_device(architecture)
    chosen = [Variant(kernel, spec, CONFIG_OF[kernel](spec, device, **sizes), architecture) for spec in wanted]
    with ThreadPoolExecutor(2) as threads:  # NVRTC runs without the GIL
        logs = [compiled.log for compiled in threads.map(compile_cubin, chosen)]
    usage = {variant: resource_usage(log) for variant, log in zip(chosen, logs, strict=True)}
    spilling = {variant: use.stack_bytes for variant, use in usage.items() if use.spill_bytes}
    allowed = {
        variant: CROWDED_BYTES if is_crowded(kernel, variant.spec, variant.config, device) else 0
        for variant in spilling
    }
    assert {str(variant): most for variant, most in spilling.items() if most > allowed[variant]} == {}
    assert {str(variant): use.advisories for variant, use in usage.items() if use.advisories} == {}
    assert [log for log in logs if ": warning " in log] == []


def test_every_kernel_is_compiled_here():
    kernels = {name.removesuffix(".cu") for name in kernel_sources() if name.endswith(".cu")}
    assert {kernel for kernel in kernels if kernel.startswith("forward_")} == CONFIG_OF.keys()


@pytest.mark.parametrize(("kernel", "architecture", "dtype"), CASES)
def test_default_tiles_compile_without_advisories_warnings_or_spills_to_speak_of(kernel, architecture, dtype, request):
    device = known_device(architecture)
    every = specs(kernel, architecture, dtype, request.config.getoption("--all-variants"))
    expect_clean(kernel, architecture, [spec for spec in every if WHY_NOT[kernel](spec, device) is None])


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_crowded_tiles_of_one_feature_spill_next_to_nothing(architecture):
    device = known_device(architecture)
    every = [Spec("bfloat16", 128, 128, right=True, softcap=True), Spec("bfloat16", 128, 128, bias="bfloat16")]
    wanted = [spec for spec in every if is_crowded("forward_mma", spec, mma_default(spec, device), device)]
    assert wanted
    expect_clean("forward_mma", architecture, wanted)


@pytest.mark.parametrize("sizes", [{}, {"n_q": 1}], ids=["many-queries", "few-queries"])
def test_hopper_tiles_for_a_bias_of_keys_compile_clean(sizes):
    device = known_device("sm_90")
    wanted = [Spec("bfloat16", d, d, right=d == 64, bias="float32", bias_of_keys=True) for d in (64, 128)]
    without = Spec("bfloat16", 128, 128)
    assert wgmma_default(wanted[1], device, **sizes) == wgmma_default(without, device, **sizes)
    expect_clean("forward_wgmma", "sm_90", wanted, **sizes)


def test_hopper_tiles_for_windows_compile_clean():
    device = known_device("sm_90")
    windows = [Spec("bfloat16", 128, 128, left=True, right=True), Spec("float16", 80, 80, left=True, kv_lengths=True)]
    assert {wgmma_default(spec, device) for spec in windows} == {WINDOW_TILES}
    assert WINDOW_TILES not in {wgmma_default(replace(spec, left=False), device) for spec in windows}
    assert WINDOW_TILES not in {wgmma_default(spec, device, n_q=1) for spec in windows}
    expect_clean("forward_wgmma", "sm_90", windows)


@pytest.mark.parametrize("sizes", [{"n_q": 1}, {"n_k": 4096}], ids=["few-queries", "many-keys"])
def test_hopper_tiles_for_some_sizes_compile_clean(sizes, request):
    """With and without the mask; by default one of both, in turns."""
    masks = (False, True) if request.config.getoption("--all-variants") else (False,)
    dims = enumerate((64, 80, 128, 256))
    every = [Spec("bfloat16", d, d, right=(number % 2 == 1) != right) for number, d in dims for right in masks]
    usual = {spec: wgmma_default(spec, known_device("sm_90")) for spec in every}
    wanted = [spec for spec in every if wgmma_default(spec, known_device("sm_90"), **sizes) != usual[spec]]
    assert wanted
    expect_clean("forward_wgmma", "sm_90", wanted, **sizes)
