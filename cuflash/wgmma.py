"""The one generated header: the shapes of `wgmma` that a kernel uses, which are too many to write down.

An instruction for N columns of 16-bit elements names N / 2 registers of its accumulator, and N is any multiple of 16 up
to 256.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

WGMMA_HEADER = "wgmma.cuh"

PREAMBLE = """\
// The shapes of wgmma for this variant: m64 nN k16, float accumulators d[0 .. N/2), element type {element}.
#pragma once

// D = A B, plus D if `accumulate`; A and B in shared memory, the columns of both contiguous there
template <i32 n> __device__ __forceinline__ void wgmma_ss(float* d, u64 a, u64 b, bool accumulate);
// Without D, which so need not exist before
template <i32 n> __device__ __forceinline__ void wgmma_ss_first(float* d, u64 a, u64 b);
// D = A B, plus D if `accumulate`; A in four registers, B in shared memory with its rows contiguous
template <i32 n> __device__ __forceinline__ void wgmma_rs(float* d, const u32* a, u64 b, bool accumulate = true);
// D += A^T B, and without D; A and B in shared memory, the rows of both contiguous there
template <i32 n> __device__ __forceinline__ void wgmma_ts(float* d, u64 a, u64 b);
template <i32 n> __device__ __forceinline__ void wgmma_ts_first(float* d, u64 a, u64 b);
"""

FORMS = {
    "wgmma_ss": """
template <> __device__ __forceinline__ void wgmma_ss<{n}>(float* d, u64 a, u64 b, bool accumulate) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{2}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{type}.{type} {{{d}}}, %{0}, %{1}, p, 1, 1, 0, 0;\\n}}"
      : {in_out}
      : "l"(a), "l"(b), "r"(static_cast<u32>(accumulate)));
}}
""",
    "wgmma_ss_first": """
template <> __device__ __forceinline__ void wgmma_ss_first<{n}>(float* d, u64 a, u64 b) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{type}.{type} {{{d}}}, %{0}, %{1}, 0, 1, 1, 0, 0;"
               : {out}
               : "l"(a), "l"(b));
}}
""",
    "wgmma_rs": """
template <> __device__ __forceinline__ void wgmma_rs<{n}>(float* d, const u32* a, u64 b, bool accumulate) {{
  asm volatile(
      "{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{5}, 0;\\n"
      "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{type}.{type} "
      "{{{d}}}, {{%{0}, %{1}, %{2}, %{3}}}, %{4}, p, 1, 1, 1;\\n}}"
      : {in_out}
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(accumulate)));
}}
""",
    "wgmma_ts": """
template <> __device__ __forceinline__ void wgmma_ts<{n}>(float* d, u64 a, u64 b) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{type}.{type} {{{d}}}, %{0}, %{1}, 1, 1, 1, 1, 1;"
               : {in_out}
               : "l"(a), "l"(b));
}}
""",
    "wgmma_ts_first": """
template <> __device__ __forceinline__ void wgmma_ts_first<{n}>(float* d, u64 a, u64 b) {{
  asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{type}.{type} {{{d}}}, %{0}, %{1}, 0, 1, 1, 1, 1;"
               : {out}
               : "l"(a), "l"(b));
}}
""",
}

PTX_TYPES = {"float16": "f16", "bfloat16": "bf16"}


def wgmma_header(dtype: str, shapes: Mapping[str, Iterable[int]]) -> str:
    """The text of ``wgmma.cuh`` for the N that are used of each form, by its name in `FORMS`."""

    def shape(form: str, n: int) -> str:
        registers = range(n // 2)

        def operands(constraint: str) -> str:
            return ", ".join(f'"{constraint}"(d[{i}])' for i in registers)

        return FORMS[form].format(
            *range(n // 2, n // 2 + 6),
            n=n,
            type=PTX_TYPES[dtype],
            d=", ".join(f"%{i}" for i in registers),
            out=operands("=f"),
            in_out=operands("+f"),
        )

    used = [shape(form, n) for form, columns in shapes.items() for n in sorted(set(columns))]
    return "".join([PREAMBLE.format(element=dtype), *used])
