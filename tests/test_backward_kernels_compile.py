"""Every kernel of the backward pass compiles, at its default tiles, for every generation of GPU: without one."""

from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("cupy")

from cupy.cuda import nvrtc

from cuflash.backward_plan import (
    backward_mma_default,
    backward_simt_default,
    backward_wgmma_default,
    why_not_backward_mma_by_default,
    why_not_backward_wgmma_by_default,
)
from cuflash.compiler import Variant, compile_cubin, kernel_sources, resource_usage
from cuflash.device import KNOWN_DEVICES, known_device
from cuflash.problem import DTYPES, Spec

CONFIG_OF = {
    "backward_simt": backward_simt_default,
    "backward_bias": backward_simt_default,
    "backward_mma": backward_mma_default,
    "backward_wgmma": backward_wgmma_default,
}
WHY_NOT = {
    "backward_simt": lambda spec, device: None,
    "backward_bias": lambda spec, device: None if spec.bias else "there is no bias",
    "backward_mma": why_not_backward_mma_by_default,
    "backward_wgmma": why_not_backward_wgmma_by_default,
}
HEAD_DIMS = (64, 128, 256)
ARCHITECTURES = tuple(KNOWN_DEVICES)


def dtypes_of(kernel, architecture):
    """Of the bias' kernel, which is much like another, one for each architecture."""
    return DTYPES if kernel != "backward_bias" else (DTYPES[ARCHITECTURES.index(architecture) % len(DTYPES)],)


CASES = [
    pytest.param(kernel, architecture, dtype, id=f"{kernel}-{architecture}-{dtype}")
    for kernel in CONFIG_OF
    for architecture in ARCHITECTURES
    for dtype in dtypes_of(kernel, architecture)
    if WHY_NOT[kernel](Spec(dtype, 64, 64, bias=dtype), known_device(architecture)) is None
]


def features(dtype):
    """What may be on besides plain attention: nothing, the causal mask, everything."""
    everything = dict.fromkeys(("left", "right", "softcap", "mask", "q_lengths", "kv_lengths"), True)
    return {}, {"right": True}, {**everything, "bias": dtype}


def specs(kernel, architecture, dtype, all_of_them):
    """Each head dim with each of the features; by default one of these, both rotating.

    They rotate so that any two of architecture, dtype, head dim and features meet, at a ninth of the compilations.
    """
    some = features(dtype)[-1:] if kernel == "backward_bias" else features(dtype)
    every = [(d, chosen) for d in HEAD_DIMS for chosen in some]
    if not all_of_them:
        one, other = ARCHITECTURES.index(architecture), DTYPES.index(dtype)
        every = [(HEAD_DIMS[(one + other) % len(HEAD_DIMS)], some[(one + 2 * other) % len(some)])]
    return [Spec(dtype, d, d, **chosen) for d, chosen in every]


def test_every_kernel_is_compiled_here():
    kernels = {name.removesuffix(".cu") for name in kernel_sources() if name.endswith(".cu")}
    assert {kernel for kernel in kernels if kernel.startswith("backward_")} == CONFIG_OF.keys()


def expect_nothing_to_complain_of(variants):
    with ThreadPoolExecutor(2) as threads:  # NVRTC runs without the GIL
        logs = [compiled.log for compiled in threads.map(compile_cubin, variants)]
    usage = {str(variant): resource_usage(log) for variant, log in zip(variants, logs, strict=True)}
    assert {name: use.spill_bytes for name, use in usage.items() if use.spill_bytes} == {}
    assert {name: use.advisories for name, use in usage.items() if use.advisories} == {}
    assert [log for log in logs if ": warning " in log] == []


@pytest.mark.parametrize(("kernel", "architecture", "dtype"), CASES)
def test_default_tiles_compile_without_spills_advisories_or_warnings(kernel, architecture, dtype, request):
    if int(architecture.removeprefix("sm_")) not in nvrtc.getSupportedArchs():
        pytest.skip(f"NVRTC {nvrtc.getVersion()} does not know {architecture}")
    device = known_device(architecture)
    every = specs(kernel, architecture, dtype, request.config.getoption("--all-variants"))
    wanted = [spec for spec in every if WHY_NOT[kernel](spec, device) is None]
    chosen = [Variant(kernel, spec, CONFIG_OF[kernel](spec, device), architecture) for spec in wanted]
    expect_nothing_to_complain_of(chosen)


@pytest.mark.parametrize(
    ("dtype", "d", "chosen"),
    [
        ("bfloat16", 64, {"right": True}),
        ("bfloat16", 128, {}),
        ("bfloat16", 128, {"right": True}),
        ("float16", 64, {}),
        ("float16", 128, {"q_lengths": True, "kv_lengths": True}),
    ],
    ids=str,
)
def test_kernels_that_add_in_any_order_compile_without_spills_advisories_or_warnings(dtype, d, chosen):
    spec, device = Spec(dtype, d, d, **chosen), known_device("sm_90")
    variant = Variant("backward_wgmma", spec, backward_wgmma_default(spec, device), "sm_90", deterministic=False)
    expect_nothing_to_complain_of([variant])
