"""Train a small GPT on the first chapter of "Alice's Adventures in Wonderland", in CuPy alone, or NumPy without a GPU.

python examples/train_char_gpt.py [--steps 300] [--plot loss.png]

The model is trained twice from the same start on the same batches: with cuflash, forward and backward, and with the
plain formula for attention. The two loss curves lie on one another. The text (Lewis Carroll, 1865) is in the public
domain.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import cuflash

TEXT = Path(__file__).with_name("alice.txt")
BETAS, EPSILON, WARM_UP = (0.9, 0.95), 1e-8, 20
NORM_EPSILON = 1e-5

Array = Any  # of CuPy or NumPy
# q, k, v (batch, position, head, head dim) -> output, and the function from its gradient to those of q, k and v
Attention = Callable[[Array, Array, Array], tuple[Array, Callable[[Array], tuple[Array, Array, Array]]]]


@dataclass(frozen=True)
class Size:
    """The model and its batches."""

    layers: int
    heads: int
    head_dim: int
    context: int
    batch: int
    learning_rate: float

    @property
    def width(self) -> int:
        """Features of a token."""
        return self.heads * self.head_dim


ON_GPU = Size(layers=6, heads=6, head_dim=64, context=256, batch=32, learning_rate=1e-3)
ON_CPU = Size(layers=2, heads=2, head_dim=32, context=64, batch=8, learning_rate=3e-3)


def array_library() -> Any:
    """CuPy where it has a GPU, else NumPy."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception:  # no CuPy, no driver, no GPU: all the same here
        return np
    return cupy


# ---- the two ways to attend ----


def cuflash_attention(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
    """Causal attention by cuflash: what is kept for the backward pass grows linearly with the context."""
    out, lse = cuflash.attention_forward(q, k, v, causal=True, layout="bnhd")

    def backward(dout: Array) -> Any:
        return cuflash.attention_backward(dout, q, k, v, out, lse, causal=True, layout="bnhd")

    return out, backward


def formula_attention(q: Array, k: Array, v: Array) -> tuple[Array, Any]:
    """The same by the plain formula, with its matrices of context x context."""
    xp = array_library() if type(q).__module__.startswith("cupy") else np
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    scale = q.dtype.type(q.shape[-1] ** -0.5)
    s = scale * (q @ k.swapaxes(-1, -2))
    s = xp.where(xp.tri(s.shape[-2], dtype=bool), s, s.dtype.type(-np.inf))
    p = xp.exp(s - s.max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)

    def backward(dout: Array) -> Any:
        dout = dout.swapaxes(1, 2)
        dp = dout @ v.swapaxes(-1, -2)
        ds = scale * p * (dp - (dp * p).sum(axis=-1, keepdims=True))
        grads = ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ dout
        return tuple(x.swapaxes(1, 2) for x in grads)

    return (p @ v).swapaxes(1, 2), backward


ATTENTIONS: dict[str, Attention] = {"cuflash": cuflash_attention, "formula": formula_attention}


# ---- the model: embeddings, blocks of attention and MLP around a residual stream, and the embeddings again ----


def initial_weights(xp: Any, size: Size, symbols: int, seed: int) -> dict[str, Array]:
    """Weights by name, the same on every device."""
    rng = np.random.default_rng(seed)
    d = size.width
    shapes = {"tokens": (symbols, d), "positions": (size.context, d)}
    for layer in range(size.layers):
        shapes |= {
            f"{layer}.qkv": (d, 3 * d),
            f"{layer}.out": (d, d),
            f"{layer}.up": (d, 4 * d),
            f"{layer}.down": (4 * d, d),
        }
    last = {"out", "down"}  # what is added to the residual stream starts small

    def draw(name: str, shape: tuple[int, ...]) -> Array:
        spread = 0.02 / (2 * size.layers) ** 0.5 if name.partition(".")[2] in last else 0.02
        return xp.asarray((spread * rng.standard_normal(shape)).astype(np.float32))

    return {name: draw(name, shape) for name, shape in shapes.items()}


def normalized(x: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Every token's features divided by their root mean square."""
    inverse = ((x * x).mean(axis=-1, keepdims=True) + x.dtype.type(NORM_EPSILON)) ** x.dtype.type(-0.5)
    y = x * inverse

    def backward(dy: Array) -> Array:
        return inverse * (dy - y * (dy * y).mean(axis=-1, keepdims=True))

    return y, backward


def loss_and_gradients(
    w: dict[str, Array], size: Size, tokens: Array, targets: Array, attend: Attention
) -> tuple[Array, dict[str, Array]]:
    """Mean cross-entropy of the next symbol, and its gradient by every weight."""
    xp = array_library() if type(tokens).__module__.startswith("cupy") else np
    batch, context = tokens.shape
    grads: dict[str, Array] = {}
    undo: list[Callable[[Array], Array]] = []  # of every layer: from the gradient of its output to that of its input
    x = w["tokens"][tokens] + w["positions"]

    def matmul(x: Array, name: str) -> tuple[Array, Callable[[Array], Array]]:
        def backward(dy: Array) -> Array:
            grads[name] = x.reshape(-1, x.shape[-1]).T @ dy.reshape(-1, dy.shape[-1])
            return dy @ w[name].T

        return x @ w[name], backward

    def attention_layer(x: Array, layer: int) -> tuple[Array, Callable[[Array], Array]]:
        h, undo_norm = normalized(x)
        qkv, undo_qkv = matmul(h, f"{layer}.qkv")
        q, k, v = (qkv.reshape(batch, context, 3, size.heads, size.head_dim)[:, :, i] for i in range(3))  # views
        out, undo_attention = attend(q, k, v)
        y, undo_out = matmul(out.reshape(batch, context, -1), f"{layer}.out")

        def backward(dy: Array) -> Array:
            dout = undo_out(dy).reshape(out.shape)
            dqkv = xp.stack(undo_attention(dout), axis=2).reshape(qkv.shape)
            return dy + undo_norm(undo_qkv(dqkv))

        return x + y, backward

    def mlp_layer(x: Array, layer: int) -> tuple[Array, Callable[[Array], Array]]:
        h, undo_norm = normalized(x)
        up, undo_up = matmul(h, f"{layer}.up")
        positive = xp.maximum(up, 0)
        y, undo_down = matmul(positive * positive, f"{layer}.down")

        def backward(dy: Array) -> Array:
            return dy + undo_norm(undo_up(2 * positive * undo_down(dy)))

        return x + y, backward

    for layer in range(size.layers):
        for each in (attention_layer, mlp_layer):
            x, backward = each(x, layer)
            undo.append(backward)
    h, undo_norm = normalized(x)
    logits = h @ w["tokens"].T
    logits -= logits.max(axis=-1, keepdims=True)
    p = xp.exp(logits)
    total = p.sum(axis=-1, keepdims=True)
    rows = xp.arange(batch)[:, None], xp.arange(context), targets
    loss = (xp.log(total[..., 0]) - logits[rows]).mean()

    dlogits = p / total
    dlogits[rows] -= 1
    dlogits /= targets.size
    dx = undo_norm(dlogits @ w["tokens"])
    for backward in reversed(undo):
        dx = backward(dx)
    grads["positions"] = dx.sum(axis=0)
    grads["tokens"] = dlogits.reshape(-1, dlogits.shape[-1]).T @ h.reshape(-1, size.width)
    one_hot = (tokens.reshape(-1, 1) == xp.arange(len(w["tokens"]))).astype(dx.dtype)
    grads["tokens"] += one_hot.T @ dx.reshape(-1, size.width)
    return loss, grads


class Adam:
    """Adam (Kingma, Ba 2015) with a warm-up and a linear decay of the learning rate."""

    def __init__(self, weights: dict[str, Array], learning_rate: float, steps: int) -> None:
        self.weights, self.learning_rate, self.steps, self.step = weights, learning_rate, steps, 0
        self.moments = {name: (x * 0, x * 0) for name, x in weights.items()}

    def update(self, grads: dict[str, Array]) -> None:
        """One step down the gradient."""
        self.step += 1
        rate = self.learning_rate * min(self.step / WARM_UP, 1 - (self.step - 1) / self.steps)
        corrections = [1 - beta**self.step for beta in BETAS]
        for name, w in self.weights.items():
            first, second = self.moments[name]
            first += (1 - BETAS[0]) * (grads[name] - first)
            second += (1 - BETAS[1]) * (grads[name] ** 2 - second)
            w -= rate / corrections[0] * first / ((second / corrections[1]) ** 0.5 + EPSILON)


# ---- training ----


def train(xp: Any, size: Size, data: Array, symbols: int, steps: int, seed: int, name: str) -> list[float]:
    """The loss of every step."""
    weights = initial_weights(xp, size, symbols, seed)
    optimizer = Adam(weights, size.learning_rate, steps)
    rng = np.random.default_rng(seed)
    losses: list[Array] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s")) as progress:
        task = progress.add_task(f"{name:8}", total=steps, loss=float("nan"), speed=0.0)
        began, shown = time.perf_counter(), 0
        for step in range(1, steps + 1):
            starts = rng.integers(len(data) - size.context, size=(size.batch, 1))
            window = xp.asarray(starts + np.arange(size.context))
            loss, grads = loss_and_gradients(weights, size, data[window], data[window + 1], ATTENTIONS[name])
            optimizer.update(grads)
            losses.append(loss)
            if step % 10 == 0 or step == steps:  # asking for the loss waits for the GPU
                speed = (step - shown) * size.batch * size.context / (time.perf_counter() - began)
                progress.update(task, completed=step, loss=float(loss), speed=speed)
                began, shown = time.perf_counter(), step
    return [float(loss) for loss in losses]


def plot(curves: dict[str, list[float]], path: Path) -> None:
    """The loss curves, one over the other."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for (name, losses), style in zip(curves.items(), ("-", "--"), strict=True):
        axes.plot(range(1, len(losses) + 1), losses, style, linewidth=3 if style == "-" else 1.5, label=name)
    axes.set(
        xlabel="step", ylabel="loss (nats per character)", title="A small GPT, attention by cuflash and by the formula"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Train with both, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("train_char_gpt.png"), help="where the loss curves are drawn")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")

    xp = array_library()
    size = ON_CPU if xp is np else ON_GPU
    text = TEXT.read_text("utf-8")
    symbols = sorted(set(text))
    data = xp.asarray([symbols.index(symbol) for symbol in text])
    print(f"{len(text):,} characters, {len(symbols)} different ones, on {'the CPU' if xp is np else 'the GPU'}: {size}")

    curves = {name: train(xp, size, data, len(symbols), options.steps, options.seed, name) for name in ATTENTIONS}
    apart = max(abs(a - b) for a, b in zip(*curves.values(), strict=True))
    for name, losses in curves.items():
        print(f"{name:8} loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"the curves are at most {apart:.1e} apart")
    try:
        plot(curves, options.plot)
        print(f"drawn in {options.plot}")
    except ImportError:
        print("pip install 'cuflash[plot]' to have them drawn")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
