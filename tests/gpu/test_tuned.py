"""Tuned configurations on a GPU: found, used, and forgotten when others take their place."""

from dataclasses import replace

import numpy as np
import pytest
from winners import own_folders

import cuflash
from cuflash import tuned
from cuflash.device import device_info
from cuflash.tuning import Workload
from cuflash.winner import Measurement, Winner, key_of

cupy = pytest.importorskip("cupy")


@pytest.fixture
def arrays(tmp_path, monkeypatch):
    """q, k and v on the GPU, in a process that has tuned nothing."""
    own_folders(monkeypatch, tmp_path)
    tuned._change()
    rng = np.random.default_rng(0)
    yield tuple(cupy.asarray(rng.standard_normal((2, 4, 300, 64)).astype(np.float16)) for _ in range(3))
    tuned._change()


def narrower(config):
    """Another legal configuration: half the keys a tile."""
    return replace(config, b_c=config.b_c // 2)


def make_winner(arrays):
    explanation = cuflash.explain(*arrays)
    device = device_info(cupy.cuda.Device().id)
    config = narrower(explanation.config)
    measurement = Measurement(1.0, 2.0, 2, "2026-01-01T00:00:00Z", {})
    provenance = tuned.current_provenance(f"forward_{config.family}")
    return Winner(key_of(explanation.problem, device), config, provenance, measurement)


def error(arrays):
    gold = cuflash.reference.standard_attention(*(cupy.asnumpy(x).astype(np.float64) for x in arrays))
    return np.linalg.norm(cupy.asnumpy(cuflash.attention(*arrays)) - gold) / np.linalg.norm(gold)


def test_new_winner_serves_a_call_that_was_remembered(arrays):
    assert error(arrays) < 6e-4
    assert cuflash.explain(*arrays).source == "default"
    winner = make_winner(arrays)
    tuned.put(winner)
    explanation = cuflash.explain(*arrays)
    assert (explanation.config, explanation.source, explanation.stale) == (winner.config, "tuned", None)
    assert error(arrays) < 6e-4


def test_new_winner_of_gradients_serves_a_call_that_was_remembered(arrays):
    q, k, v = arrays
    given = (v, q, k, v, *cuflash.attention_forward(q, k, v))
    before = cuflash.attention_backward(*given)
    default = cuflash.explain_backward(*given).config
    config = replace(default, **{"mma": {"stages": 1}, "wgmma": {"waves": 2}}[default.family])
    key = key_of(
        Workload("float16", 2, (4, 4), (300, 300), (64, 64), backward=True).problem(),
        device_info(cupy.cuda.Device().id),
    )
    provenance = tuned.current_provenance(f"backward_{config.family}")
    tuned.put(Winner(key, config, provenance, Measurement(1.0, 2.0, 2, "2026-01-01T00:00:00Z", {})))
    explanation = cuflash.explain_backward(*given)
    assert (explanation.config, explanation.source, explanation.stale) == (config, "tuned", None)
    for x, y in zip(cuflash.attention_backward(*given), before, strict=True):
        assert cupy.linalg.norm((x - y).astype("float64")) < 1e-3 * cupy.linalg.norm(y.astype("float64"))


def test_strict_mode_refuses_a_call_that_was_remembered(arrays):
    cuflash.attention(*arrays)
    cuflash.require_tuned()
    with pytest.raises(
        cuflash.UntunedError, match="cuflash tune --dtype float16 --batch 2 --heads 4 4 --seqlen 300 300"
    ):
        cuflash.attention(*arrays)
    tuned.put(make_tuned(arrays))
    assert error(arrays) < 6e-4


def make_tuned(arrays):
    """A winner of a call that is refused as long as it is not tuned."""
    cuflash.require_tuned(False)
    winner = make_winner(arrays)
    cuflash.require_tuned()
    return winner


def test_provenance_of_this_machine_is_known(arrays):
    assert tuned.UNKNOWN not in tuned.current_provenance("forward_mma")


def test_strided_arrays_are_planned_as_the_copies_that_are_made_of_them(arrays):
    tuned.put(make_winner(arrays))
    q, k, v = arrays
    strided = cupy.ascontiguousarray(q.swapaxes(-1, -2)).swapaxes(-1, -2)
    assert cuflash.explain(strided, k, v).source == "tuned"
    assert (cuflash.attention(strided, k, v) == cuflash.attention(q, k, v)).all()
