"""The one generated header: the shapes of `wgmma` that a kernel uses, which are too many to write down.

An instruction for N columns of 16-bit elements names N / 2 registers of its accumulator, and N is any multiple of 16 up
to 256.
"""

from __future__ import annotations

WGMMA_HEADER = "wgmma.cuh"

PREAMBLE = """\
// The shapes of wgmma for this variant: m64 nN k16, float accumulators d[0 .. N/2), element type {element}.
#pragma once

// D = A B, plus D if `accumulate`; A and B in shared memory, the columns of both contiguous there
template <i32 n> __device__ __forceinline__ void wgmma_ss(float* d, u64 a, u64 b, bool accumulate);
// D += A B; A in four registers, B in shared memory with its rows contiguous
template <i32 n> __device__ __forceinline__ void wgmma_rs(float* d, const u32* a, u64 b);
"""

FROM_SHARED = """
template <> __device__ __forceinline__ void wgmma_ss<{n}>(float* d, u64 a, u64 b, bool accumulate) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{2}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{type}.{type} {{{d}}}, %{0}, %{1}, p, 1, 1, 0, 0;\\n}}"
      : {outputs}
      : "l"(a), "l"(b), "r"(static_cast<u32>(accumulate)));
}}
"""

FROM_REGISTERS = """
template <> __device__ __forceinline__ void wgmma_rs<{n}>(float* d, const u32* a, u64 b) {{
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{type}.{type} {{{d}}}, {{%{0}, %{1}, %{2}, %{3}}}, %{4}, 1, 1, 1, 1;"
      : {outputs}
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}}
"""

PTX_TYPES = {"float16": "f16", "bfloat16": "bf16"}


def wgmma_header(dtype: str, from_shared: int, from_registers: int) -> str:
    """The text of ``wgmma.cuh`` for one N of each form."""

    def shape(template: str, n: int) -> str:
        registers = range(n // 2)
        return template.format(
            *range(n // 2, n // 2 + 5),
            n=n,
            type=PTX_TYPES[dtype],
            d=", ".join(f"%{i}" for i in registers),
            outputs=", ".join(f'"+f"(d[{i}])' for i in registers),
        )

    preamble = PREAMBLE.format(element=dtype)
    return preamble + shape(FROM_SHARED, from_shared) + shape(FROM_REGISTERS, from_registers)
