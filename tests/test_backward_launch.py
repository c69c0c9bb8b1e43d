"""What the kernels of the backward pass are launched with: without a GPU."""

import struct

import pytest

from cuflash import backward_plan
from cuflash.backward_config import BackwardWgmmaConfig
from cuflash.backward_launch import make_parts, wgmma_heads_of_part, wgmma_scratch
from cuflash.backward_problem import read_backward_problem
from cuflash.device import KNOWN_DEVICES, known_device
from cuflash.problem import DTYPES, Operand, contiguous_strides
from cuflash.tuning import Workload
from cuflash.tuning.space import Space
from cuflash.winner import key_of

DEFAULTS = {
    "simt": (lambda spec, device: None, backward_plan.backward_simt_default),
    "mma": (backward_plan.why_not_backward_mma_by_default, backward_plan.backward_mma_default),
    "wgmma": (backward_plan.why_not_backward_wgmma_by_default, backward_plan.backward_wgmma_default),
}
HEAD_DIMS = [(d, d) for d in range(16, 257, 16)] + [(192, 128), (64, 256), (256, 16)]
FEATURES = (
    {},
    {"causal": "bottom-right"},
    {"window": (100, 20), "softcap": True},
    {"mask": True, "bias": "float32", "q_lengths": True, "kv_lengths": True},
)


def problem_of(dtype, head_dim, n=(300, 500), deterministic=True, batch=2, heads=(4, 2), **features):
    """A call that asks for every gradient."""
    workload = Workload(dtype, batch, heads, n, head_dim, **features, backward=True)
    shapes, dtypes = workload.shapes(), workload.dtypes()
    given = {name: Operand(name, shape, contiguous_strides(shape), dtypes[name]) for name, shape in shapes.items()}
    given["out"] = given["dout"]._replace(name="out")
    rows = shapes["dout"][:-1]
    given["lse"] = Operand("lse", rows, contiguous_strides(rows), "float32")
    return read_backward_problem(
        **given, **workload.options(), return_dbias="bias" in given, deterministic=deterministic
    )


def expect_shared_memory_for_all(problem, config, device):
    """A module's kernels may take what its configuration says (compiler.py), and one of them takes just that."""
    for part in make_parts(problem, config, device):
        most = max(stage.shared_bytes for stage in part.stages)
        only_statistics = all(stage.entry.endswith("_statistics") for stage in part.stages)
        allowed = part.variant.config.shared_bytes(part.variant.spec)
        assert most == (0 if only_statistics else allowed), f"{part.variant}: {part.stages}"
        assert most <= device.shared_bytes


@pytest.mark.parametrize("architecture", KNOWN_DEVICES)
@pytest.mark.parametrize("family", DEFAULTS)
def test_kernels_of_default_tiles_ask_for_the_shared_memory_that_they_may_have(family, architecture):
    device, (why_not, default) = known_device(architecture), DEFAULTS[family]
    for dtype in DTYPES:
        for head_dim in HEAD_DIMS:
            for features in FEATURES:
                problem = problem_of(dtype, head_dim, **features)
                if why_not(problem.spec, device) is None:
                    expect_shared_memory_for_all(problem, default(problem.spec, device), device)


@pytest.mark.parametrize("features", FEATURES, ids=lambda features: "-".join(features) or "plain")
@pytest.mark.parametrize("head_dim", [(32, 32), (64, 64), (80, 80), (128, 128), (192, 128), (256, 256)], ids=str)
def test_kernels_of_whatever_is_tuned_ask_for_the_shared_memory_that_they_may_have(head_dim, features):
    device = known_device("sm_90")
    problem = problem_of("bfloat16", head_dim, **features)
    for family, (why_not, _) in DEFAULTS.items():
        if why_not(problem.spec, device) is None:
            space = Space.legal(problem, device, family)
            for point in space.points:
                expect_shared_memory_for_all(problem, space.config(point), device)


H200, A100 = known_device("sm_90"), known_device("sm_80")
LONG = {"n": (300, 2048), "deterministic": False}
IN_ANY_ORDER = {
    "hopper": (H200, "bfloat16", 128, LONG, False),
    "hopper-float16-causal": (H200, "float16", 64, LONG | {"causal": "bottom-right"}, False),
    "asked-for": (H200, "bfloat16", 128, LONG | {"deterministic": True}, True),
    "few-keys": (H200, "bfloat16", 128, LONG | {"n": (3000, 2047)}, True),
    "rows-of-their-own": (H200, "bfloat16", 256, LONG, True),
    "cuda-cores": (H200, "float32", 64, LONG, True),
    "ampere": (A100, "bfloat16", 128, LONG, True),
}


@pytest.mark.parametrize(("device", "dtype", "d", "call", "expected"), IN_ANY_ORDER.values(), ids=IN_ANY_ORDER)
def test_the_order_is_given_up_where_that_is_allowed_and_gains(device, dtype, d, call, expected):
    problem = problem_of(dtype, (d, d), **call)
    config = backward_plan.default_backward_choice(problem, device).config
    assert backward_plan.is_deterministic(problem, config) == expected
    assert all(part.variant.deterministic == expected for part in make_parts(problem, config, device))


def test_whatever_order_is_asked_for_the_same_configuration_is_looked_up():
    one, other = (problem_of("bfloat16", (128, 128), **LONG | {"deterministic": asked}) for asked in (True, False))
    assert key_of(one, H200) == key_of(other, H200)


def test_either_of_the_hopper_kernels_may_take_most():
    takes_most = set()
    for d in (64, 256):
        spec = problem_of("bfloat16", (d, d)).spec
        tiles = backward_plan.backward_wgmma_default(spec, known_device("sm_90"))
        takes_most.add("rows" if tiles.row_shared_bytes(spec) > tiles.key_shared_bytes(spec) else "keys")
    assert takes_most == {"keys", "rows"}


ROWS_64, ROWS_128, SPLIT = BackwardWgmmaConfig(64), BackwardWgmmaConfig(128), BackwardWgmmaConfig(64, 64)
CAUSAL = {"causal": "bottom-right"}


@pytest.mark.parametrize(
    ("group", "n", "features", "config", "expected"),
    [
        (1, 4096, CAUSAL, ROWS_64, 1),
        (4, 4096, CAUSAL, ROWS_64, 4),
        (5, 4096, CAUSAL, ROWS_64, 2),
        (8, 4096, CAUSAL, ROWS_128, 4),
        (8, 1024, CAUSAL, ROWS_64, 2),
        (8, 960, CAUSAL, ROWS_64, 8),
        (8, 1024, CAUSAL, ROWS_128, 8),
        (32, 512, CAUSAL, ROWS_64, 8),
        (32, 256, CAUSAL, ROWS_64, 32),
        (8, 4096, {"window": (None, 20)}, ROWS_64, 2),
        (8, 4096, {"window": (100, 20)}, ROWS_64, 8),
        (16, 4096, {}, ROWS_64, 16),
        (17, 4096, {}, ROWS_64, 8),
        (17, 512, {}, ROWS_64, 8),
        (17, 448, {}, ROWS_64, 17),
        (17, 512, {}, ROWS_128, 17),
        (32, 4096, CAUSAL, SPLIT, 32),
    ],
)
@pytest.mark.parametrize("batch", [1, 16])
def test_so_many_query_heads_that_share_keys_go_into_one_ticket_whatever_the_batch(
    group, n, features, config, expected, batch
):
    problem = problem_of("bfloat16", (64, 64), (n, n), batch=batch, heads=(2 * group, 2), **features)
    assert wgmma_heads_of_part(problem, config) == expected
    tiles = batch * 2 * -(-n // config.b_c) if expected < group else 0
    assert wgmma_scratch(problem, config)["key_sums"] == ((tiles, config.b_c, 128), "float32")


def test_so_many_tiles_of_keys_that_no_32_bits_count_them_are_refused():
    many = problem_of("bfloat16", (16, 16), (512, 2**18), batch=16, heads=(2**20, 1))
    with pytest.raises(ValueError, match=r"split the batch"):
        make_parts(many, ROWS_64, known_device("sm_90"))


def test_no_more_heads_are_worked_on_together_than_there_are():
    # Else the number of their tiles of keys might not fit into 32 bits.
    (part,) = make_parts(problem_of("bfloat16", (64, 64), (512, 300), heads=(40, 1)), ROWS_64, known_device("sm_90"))
    tickets, parts, heads_of_part, section, _ = struct.unpack_from("<5i", part.tail)
    assert (tickets, parts, heads_of_part, section) == (2 * 3 * 5, 5, 8, 2)
