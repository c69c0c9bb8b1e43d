"""What may be tuned: the spaces of the kernel families, and workloads."""

import numpy as np
import pytest

from cuflash import backward_plan, plan
from cuflash.device import KNOWN_DEVICES, known_device
from cuflash.tuning import Workload, like, preset
from cuflash.tuning.space import Space, section_of
from cuflash.tuning.workload import PRESETS

CAUSAL = "bottom-right"
HOPPER = known_device("sm_90")
WORKLOADS = [
    (Workload("bfloat16", 4, (16, 16), (4096, 4096), (128, 128), CAUSAL), "sm_90", "wgmma"),
    (Workload("float16", 4, (32, 8), (1000, 1000), (64, 64), softcap=True, mask=True), "sm_90", "wgmma"),
    (Workload("bfloat16", 1, (16, 16), (2048, 2048), (128, 128)), "sm_80", "mma"),
    (Workload("float16", 1, (16, 16), (2048, 2048), (256, 64)), "sm_75", "mma"),
    (Workload("float32", 1, (16, 16), (2048, 2048), (128, 128)), "sm_89", "mma"),
    (Workload("float64", 1, (4, 4), (2048, 2048), (64, 64)), "sm_120", "simt"),
    (Workload("bfloat16", 4, (32, 8), (4096, 4096), (128, 128), CAUSAL, backward=True), "sm_80", "mma"),
    (Workload("float32", 1, (16, 16), (2048, 2048), (64, 64), softcap=True, backward=True), "sm_90", "mma"),
    (Workload("float64", 1, (4, 4), (2048, 2048), (64, 64), backward=True), "sm_75", "simt"),
]


@pytest.fixture(params=WORKLOADS, ids=lambda case: f"{case[0]} on {case[1]}")
def case(request):
    workload, architecture, family = request.param
    return Space.legal(workload.problem(), known_device(architecture)), family


def test_the_default_is_the_first_point(case):
    space, family = case
    assert space.family == family
    choose = plan.default_choice if space.operation == "forward" else backward_plan.default_backward_choice
    assert space.default == choose(space.problem, space.device).config
    assert space.config(space.points[0]) == space.default
    assert space.point(space.default) == space.points[0]


def test_every_point_is_legal_and_there_are_some(case):
    space, _ = case
    assert len(space.points) > 10
    for point in space.points:
        assert space.config(point).why_illegal(space.problem.spec, space.device) is None


def test_no_two_points_are_the_same_kernel_launched_the_same_way(case):
    space, _ = case
    effects = [
        (*space.config(point).constants().items(), section_of(space.problem, space.config(point), space.device))
        for point in space.points
    ]
    assert len(set(effects)) == len(space.points)


def test_neighbours_differ_in_one_axis_the_nearest_first(case):
    space, _ = case
    for point in space.points[::50]:
        near = space.neighbours(point)
        distances = [space.distance(point, other) for other in near]
        assert {axes for axes, _ in distances} <= {1}
        assert distances == sorted(distances)
        assert set(near) <= space.known


def test_what_is_no_point_is_none(case):
    space, family = case
    assert space.point(object()) is None
    other = plan.simt_default(space.problem.spec, space.device) if family != "simt" else object()
    assert space.point(other) is None


def test_tiles_of_the_gradients_are_no_point_of_the_forward_pass():
    space = Space.legal(Workload("float64", 1, (4, 4), (512, 512), (64, 64)).problem(), HOPPER)
    assert space.point(backward_plan.backward_simt_default(space.problem.spec, HOPPER)) is None


def test_sections_count_only_where_rows_see_different_numbers_of_keys():
    full, causal = (
        Space.legal(Workload("bfloat16", 4, (16, 16), (4096, 4096), (128, 128), mask).problem(), HOPPER)
        for mask in (None, CAUSAL)
    )
    assert {point[-1] for point in full.points} == {full.default.section_mb}
    assert len({point[-1] for point in causal.points}) > 1


def test_hopper_family_of_the_gradients_has_a_space():
    problem = Workload("bfloat16", 4, (16, 16), (4096, 4096), (128, 128), CAUSAL, backward=True).problem()
    space = Space.legal(problem, HOPPER, "wgmma")
    assert space.kernel == "backward_wgmma"
    assert space.config(space.points[0]) == space.default == backward_plan.backward_wgmma_default(problem.spec, HOPPER)
    assert len({section_of(problem, space.config(point), HOPPER) for point in space.points}) > 1


def test_the_fingerprint_tells_spaces_apart():
    prints = {
        Space.legal(workload.problem(), known_device(architecture)).fingerprint
        for workload, architecture, _ in WORKLOADS
    }
    assert len(prints) == len(WORKLOADS)
    workload = WORKLOADS[0][0]
    assert Space.legal(workload.problem(), HOPPER).fingerprint == Space.legal(workload.problem(), HOPPER).fingerprint


def test_ties_are_broken_by_the_default_then_shared_memory():
    space = Space.legal(WORKLOADS[0][0].problem(), HOPPER)
    ordered = sorted(space.points, key=space.cost)
    assert ordered[0] == space.points[0]
    sizes = [space.config(point).shared_bytes(space.problem.spec) for point in ordered[1:]]
    assert sizes == sorted(sizes)


# ---- workloads ----


def test_llm_has_at_most_24_workloads():
    assert len(preset("llm")) <= 24


@pytest.mark.parametrize("name", [*PRESETS, "all"])
@pytest.mark.parametrize("architecture", KNOWN_DEVICES)
def test_every_workload_of_a_preset_has_a_space(name, architecture):
    workloads = preset(name)
    assert len(set(workloads)) == len(workloads)
    for workload in workloads:
        if workload.seqlen[0] <= 4096:
            problem = workload.problem()
            assert plan.default_choice(problem, known_device(architecture)).config is not None


def test_an_unknown_preset_is_refused():
    with pytest.raises(ValueError, match="must be one of llm, vit, long, papers or all"):
        preset("bert")


def test_workloads_survive_json():
    for workload in preset("all"):
        assert Workload.from_json(eval(repr(workload.as_json()))) == workload


def test_a_workload_says_what_it_is():
    full = Workload(
        "float16", 2, (8, 2), (1, 100), (64, 32), None, (10, None), True, True, "float32", True, True, False, True, True
    )
    assert str(full) == (
        "float16 2x8/2x1/100x64/32 window 10,none softcap mask q_lengths kv_lengths"
        " bias float32 of keys unaligned backward"
    )


def save(folder, dtype, *shapes):
    paths = [folder / f"{name}.npy" for name in "qkv"]
    for path, shape in zip(paths, shapes, strict=True):
        np.save(path, np.zeros(shape, dtype))
    return paths


def test_like_reads_the_shapes_of_files(tmp_path):
    paths = save(tmp_path, np.float16, (2, 8, 100, 64), (2, 2, 120, 64), (2, 2, 120, 32))
    assert like(paths, causal=CAUSAL) == Workload("float16", 2, (8, 2), (100, 120), (64, 32), CAUSAL)


def test_like_takes_arrays_without_batch_or_heads(tmp_path):
    paths = save(tmp_path, np.float32, (100, 64), (100, 64), (100, 64))
    assert like(paths) == Workload("float32", 1, (1, 1), (100, 100), (64, 64))


def test_like_needs_a_dtype_for_bit_patterns(tmp_path):
    paths = save(tmp_path, np.uint16, (3, 100, 64), (3, 100, 64), (3, 100, 64))
    assert like(paths, "bfloat16").dtype == "bfloat16"
    with pytest.raises(TypeError, match="must hold one of"):
        like(paths)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((3, 100, 64), (3, 100, 32), (3, 100, 64)), "of one call"),
        (((3, 100, 64), (2, 100, 64), (2, 100, 64)), "multiple"),
        (((100,), (100,), (100,)), "2 to 4 axes"),
    ],
)
def test_like_refuses_what_is_no_call(shapes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        like(save(tmp_path, np.float32, *shapes))


def test_like_refuses_files_of_other_kinds(tmp_path):
    paths = save(tmp_path, np.float32, (10, 8), (10, 8), (10, 8))
    paths[1].write_text("text")
    with pytest.raises(ValueError, match=r"not a \.npy file"):
        like(paths)
