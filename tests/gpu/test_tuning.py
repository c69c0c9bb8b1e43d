"""The tuner on a GPU: candidates are compiled, checked, timed, and the winner is used."""

import json

import pytest
from winners import own_folders

from cuflash import plan, tuned
from cuflash.backward_plan import choose_backward
from cuflash.device import device_info
from cuflash.tuning import Workload, space, tune
from cuflash.tuning.record import NAME, folder

pytest.importorskip("cupy")

FEW = {  # values of every family's axes, so that compiling takes seconds
    "forward_wgmma": {"b_c": (32, 48, 64), "section_mb": (16, 32)},
    "forward_mma": {"b_c": (32, 48, 64), "stages": (1, 2)},
    "backward_wgmma": {"k_stages": (1, 2), "waves": (1, 2)},
    "backward_mma": {"stages": (1, 2), "swizzle": (False, True)},
}


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_candidate_is_right_and_timed_and_the_winner_is_used(dtype, backward, tmp_path, monkeypatch):
    own_folders(monkeypatch, tmp_path)
    monkeypatch.setattr(space, "AXES", {**space.AXES, **FEW})
    workload = Workload(dtype, 2, (4, 2), (600, 700), (64, 64), "bottom-right", backward=backward)
    (result,) = tune([workload], budget="5m")
    assert result.state in ("tuned", "default"), result.note
    problem, device = workload.problem(), device_info(0)
    assert result.evaluations == len(space.Space.legal(problem, device).points)
    lines = [json.loads(line) for line in (folder() / NAME).read_text().splitlines()]
    assert {(line["status"], line["error"]) for line in lines} == {("ok", "")}
    assert all(ms > 0 for line in lines for ms in line["times"])
    tuned._change()
    choice = choose_backward(problem, device) if backward else plan.choose(problem, device)
    assert (choice.config, choice.source, choice.stale) == (result.config, "tuned", None)
