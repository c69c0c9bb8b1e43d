"""What one call of the backward pass asks for: the forward's `Problem`, and how dO, O, LSE and the gradients lie."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from cuflash.problem import (
    Operand,
    Problem,
    Spec,
    broadcast_strides,
    canonical,
    contiguous_strides,
    is_aligned,
    read_problem,
)

LSE_DTYPES = ("float32", "float64")


class Gradient(NamedTuple):
    """Where the gradient of an input goes.

    Attributes
    ----------
    shape : tuple of int
        Of the input, in the caller's layout.
    full_shape : tuple of int
        Of the contiguous array that is computed: with all batch axes of the call.
    strides : tuple of int
        Canonical ones of that array.
    summed_axes : tuple of int
        Axes of it over which the input was broadcast.
    """

    shape: tuple[int, ...]
    full_shape: tuple[int, ...]
    strides: tuple[int, ...]
    summed_axes: tuple[int, ...]


@dataclass(frozen=True)
class BackwardProblem:
    """One checked call of the backward pass.

    Attributes
    ----------
    forward : Problem
    spec : Spec
        That of `forward`, with the alignment of dO, O and the gradients.
    strides : mapping of str to tuple of int
        Canonical strides in elements of every array of the call: (batch…, head, row) of q, k, v, out, dout, dq, dk, dv,
        lse and dlse, (batch…, head, row, column) of mask, bias and dbias, (batch…) of q_lengths and kv_lengths.
    gradients : mapping of str to Gradient
        Of dq, dk, dv, and dbias where it is asked for.
    lse_dtype, dlse_dtype : str
        As they came; what is computed with is `spec.lse_dtype`.
    deterministic : bool
        Whether the same bits are asked for on every run.
    """

    forward: Problem
    spec: Spec
    strides: Mapping[str, tuple[int, ...]]
    gradients: Mapping[str, Gradient]
    lse_dtype: str
    dlse_dtype: str | None
    deterministic: bool = True

    @property
    def batch(self) -> tuple[int, ...]:
        """The broadcast batch axes."""
        return self.forward.batch

    @property
    def converts(self) -> bool:
        """Whether LSE or its gradient must first be brought to the dtype that is computed with."""
        return self.lse_dtype != self.spec.lse_dtype or self.dlse_dtype not in (None, self.spec.lse_dtype)

    def is_empty(self) -> bool:
        """Whether no gradient has an element to compute."""
        return all(math.prod(gradient.full_shape) == 0 for gradient in self.gradients.values())

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The canonical shape of every array of the call, broadcast axes written out."""
        shapes = self.forward.shapes()
        rows = shapes["q"][:-1]
        grads = {f"d{name}": shapes[name] for name in ("q", "k", "v", "bias")}
        return {**shapes, **grads, "dout": shapes["out"], "lse": rows, "dlse": rows}


def read_backward_problem(
    dout: Operand,
    q: Operand,
    k: Operand,
    v: Operand,
    out: Operand,
    lse: Operand,
    *,
    dlse: Operand | None = None,
    return_dbias: bool = False,
    deterministic: bool = True,
    **options: Any,
) -> BackwardProblem:
    """Check one call of the backward pass and bring it into canonical form; `options` are those of `read_problem`.

    Raises
    ------
    TypeError, ValueError
        Naming the argument, what came and what is allowed.
    """
    problem = read_problem(q, k, v, **options)
    layout: str = options.get("layout", "bhnd")
    bias: Operand | None = options.get("bias")
    natural = (*problem.batch, problem.h_q, problem.n_q, problem.d_v)
    strides = {name: steps for name, steps in problem.strides.items() if name != "out"}
    aligned = problem.spec.aligned
    for operand in (out, dout):
        if operand.dtype != q.dtype:
            raise TypeError(f"{operand.name} must have the dtype of q, {q.dtype}, got {operand.dtype}")
        if operand.shape != problem.out_shape:
            raise ValueError(f"{operand.name} must have shape {problem.out_shape}, got {operand.shape}")
        steps = broadcast_strides(canonical(operand, layout), natural, "(*batch, H_q, N_q, D_v)")
        strides[operand.name] = steps
        aligned &= is_aligned(operand, steps, problem.d_v)
    for rows in (lse, dlse):
        if rows is None:
            continue
        if rows.dtype not in LSE_DTYPES:
            raise TypeError(f"{rows.name} must be of dtype float32 or float64, got {rows.dtype}")
        if rows.shape != problem.lse_shape:
            raise ValueError(f"{rows.name} must have shape {problem.lse_shape}, got {rows.shape}")
        strides[rows.name] = broadcast_strides(rows, natural[:-1], "(*batch, H_q, N_q)")
    gradients = {f"d{operand.name}": read_gradient(operand, problem.batch, layout) for operand in (q, k, v)}
    if return_dbias:
        if bias is None:
            raise ValueError("return_dbias asks for the gradient of bias, and there is no bias")
        own = bias._replace(strides=contiguous_strides(bias.shape))
        steps = broadcast_strides(own, (*natural[:-1], problem.n_k), "(*batch, H_q, N_q, N_k)")
        gradients["dbias"] = Gradient(bias.shape, bias.shape, steps, ())
    for name, columns in (("dq", problem.d), ("dk", problem.d), ("dv", problem.d_v)):
        aligned &= is_aligned(Operand(name, (), (), q.dtype), gradients[name].strides, columns)
    strides |= {name: gradient.strides for name, gradient in gradients.items()}
    return BackwardProblem(
        forward=problem,
        spec=replace(problem.spec, aligned=aligned),
        strides=strides,
        gradients=gradients,
        lse_dtype=lse.dtype,
        dlse_dtype=None if dlse is None else dlse.dtype,
        deterministic=deterministic,
    )


def read_gradient(operand: Operand, batch: tuple[int, ...], layout: str) -> Gradient:
    """Where the gradient of q, k or v goes."""
    own = operand.shape
    matrix = own[-3:] if len(own) > 2 else (1, *own)
    own_batch = (*(1,) * (len(batch) - len(own[:-3])), *own[:-3])
    full = (*batch, *matrix)
    summed = tuple(axis for axis, (have, want) in enumerate(zip(own_batch, batch, strict=True)) if have != want)
    laid_out = Operand(f"d{operand.name}", full, contiguous_strides(full), operand.dtype)
    target = canonical(laid_out, layout if len(own) > 2 else "bhnd")
    return Gradient(own, full, broadcast_strides(target, target.shape, "itself"), summed)
