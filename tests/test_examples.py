"""The training example: its gradients, and that both ways to attend train alike."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "train_char_gpt.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("train_char_gpt", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.mark.parametrize("attention", ["cuflash", "formula"])
def test_gradients_of_every_weight_are_the_limit_of_differences(example, attention):
    size = example.Size(layers=2, heads=2, head_dim=4, context=6, batch=2, learning_rate=0.0)
    rng = np.random.default_rng(0)
    weights = {
        name: 20 * x.astype(np.float64) for name, x in example.initial_weights(np, size, symbols=7, seed=1).items()
    }
    tokens, targets = rng.integers(7, size=(2, 2, 6))

    def loss(w):
        return example.loss_and_gradients(w, size, tokens, targets, example.ATTENTIONS[attention])

    grads = loss(weights)[1]
    assert grads.keys() == weights.keys()
    for name, weight in weights.items():
        direction = rng.standard_normal(weight.shape)
        ahead, behind = (loss({**weights, name: weight + step * direction})[0] for step in (1e-5, -1e-5))
        np.testing.assert_allclose((grads[name] * direction).sum(), (ahead - behind) / 2e-5, rtol=1e-5, atol=1e-7)


def test_the_example_trains_and_its_two_curves_lie_on_one_another(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "loss.png"
    command = [sys.executable, str(EXAMPLE), "--steps", "12", "--plot", str(picture)]
    path = os.pathsep.join(filter(None, [str(EXAMPLE.parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines() if " -> " in line}
    assert float(lines["cuflash"][-1]) < float(lines["cuflash"][2]) - 0.3
    apart = next(float(line.split()[-2]) for line in done.stdout.splitlines() if line.endswith("apart"))
    assert apart < 1e-4
    assert picture.read_bytes().startswith(b"\x89PNG")
