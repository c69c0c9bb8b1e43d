"""What a warm call on CuPy arrays does on the host: what it remembers and checks, and what it hands to the driver.

The arrays are CuPy's, over memory of the host that nobody reads; the driver is faked. No GPU is needed.
"""

import contextlib
import ctypes
import struct
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import cuflash
from cuflash import arrays, backward, backward_launch, call, driver, launch
from cuflash.arrays import CUPY
from cuflash.backward_config import BackwardSimtConfig
from cuflash.call import Call, Options
from cuflash.config import SimtConfig, WgmmaConfig
from cuflash.device import known_device
from cuflash.launch import ADDRESSES, NO_OFFSET, SIZE_BLOCK, Launch, WgmmaLaunch, wgmma_block
from cuflash.tensor_maps import MAP_BYTES, MAX_KNOWN_ADDRESSES, MapLayout, TensorMaps

cupy = pytest.importorskip("cupy")

OWNER = object()
FIRST = 1 << 40  # where the arrays seem to lie


def at(address, shape=(2, 4, 64, 32), dtype=np.float16, strides=None):
    """A CuPy array that seems to lie at an address of device 0."""
    memory = cupy.cuda.memory.UnownedMemory(address, 1 << 30, OWNER, 0)
    return cupy.ndarray(shape, dtype, cupy.cuda.memory.MemoryPointer(memory, 0), strides)


Q, K, V = (at(FIRST + number * (1 << 24)) for number in range(3))
NEW = at(FIRST + (1 << 30))


class FakeDriver:
    """CuPy's driver and runtime modules, of which one launch is kept as (parameters, stream)."""

    def __init__(self):
        self.launches = []
        self.failures = []
        self.contexts = 0
        self.size = 0

    class Error(Exception):
        def __init__(self, status):
            super().__init__(status)
            self.status = status

    def launch_kernel(self, function, *arguments):
        *self.shape, stream, pointers, _ = arguments
        if self.failures:
            raise self.Error(self.failures.pop())
        block = ctypes.c_void_p.from_address(pointers).value
        self.launches.append((ctypes.string_at(block, self.size), stream))

    def make_context(self):
        self.contexts += 1


@pytest.fixture
def fake(monkeypatch):
    fake = FakeDriver()
    modules = SimpleNamespace(
        driver=SimpleNamespace(launchKernel=fake.launch_kernel, CUDADriverError=fake.Error),
        runtime=SimpleNamespace(memGetInfo=fake.make_context, getDevice=lambda: 0),
        get_current_stream=lambda device: SimpleNamespace(ptr=70 + device),
    )
    monkeypatch.setattr(cupy, "cuda", modules)
    return fake


FUNCTION = SimpleNamespace(ptr=5)
STREAM = SimpleNamespace(ptr=9)
SIZES = bytes(i % 256 for i in range(SIZE_BLOCK.size))
GIVEN = [101, 102, 103, 104, 0, 106, 0, 0, 0]


# what the driver is handed


def test_block_is_the_addresses_and_the_sizes(fake):
    fake.size = launch.ADDRESS_BLOCK.size + len(SIZES)
    Launch(FUNCTION, 17, 128, 4096, SIZES, (NO_OFFSET,))(GIVEN, STREAM)
    assert fake.launches == [(launch.ADDRESS_BLOCK.pack(*GIVEN) + SIZES, 9)]
    assert fake.shape == [17, 1, 1, 128, 1, 1, 4096]


def test_every_launch_of_unmergeable_batch_axes_has_its_own_addresses(fake):
    fake.size = launch.ADDRESS_BLOCK.size
    Launch(FUNCTION, 1, 32, 0, SIZES, ((0,) * 9, (8,) * 9))(GIVEN, STREAM)
    blocks = [launch.ADDRESS_BLOCK.unpack(block) for block, _ in fake.launches]
    assert blocks == [tuple(GIVEN), (109, 110, 111, 112, 0, 114, 0, 0, 0)]


def test_launch_without_a_stream_is_on_the_current_one_of_the_device(fake):
    Launch(FUNCTION, 1, 32, 0, SIZES, (NO_OFFSET,))(GIVEN)
    assert [stream for _, stream in fake.launches] == [70]


def test_block_of_hopper_has_maps_and_a_counter_of_its_own(fake, monkeypatch):
    monkeypatch.setattr("cuflash.tensor_maps.encode", lambda layout, address: layout * 64 + bytes([address]) * 64)
    numbers = iter([1000, 2000])
    counters = SimpleNamespace(next=lambda stream: next(numbers) + stream)
    maps = tuple(TensorMaps(letter) for letter in (b"q", b"k", b"v", b"o"))
    made = WgmmaLaunch(FUNCTION, 132, 384, 4096, SIZES, (NO_OFFSET,), maps, tiles=64, section=4, counters=counters)
    expected = [letter * 64 + bytes([101 + i]) * 64 for i, letter in enumerate((b"q", b"k", b"v", b"o"))]
    blocks = [wgmma_block(expected, GIVEN, SIZES, number, 64, 4) for number in (1009, 2009)]
    fake.size = len(blocks[0])
    for _ in range(2):
        made(GIVEN, STREAM)
    assert fake.launches == [(block, 9) for block in blocks]


def test_block_is_used_again_and_never_by_two_launches_at_once(fake):
    kernel = driver.Kernel(FUNCTION, 1, 32, 0, bytes(8))
    one, other = kernel.take(), kernel.take()
    assert one is not other
    kernel.launch(one, 0)
    assert kernel.take() is one


def test_threads_do_not_mix_their_parameters(fake):
    fake.size = launch.ADDRESS_BLOCK.size
    made = Launch(FUNCTION, 1, 32, 0, SIZES, (NO_OFFSET,))

    def work(number):
        for _ in range(500):
            made([number] * 9, SimpleNamespace(ptr=number))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake.launches) == 2000
    assert all(launch.ADDRESS_BLOCK.unpack(block) == (stream,) * 9 for block, stream in fake.launches)


def test_thread_that_has_not_used_the_gpu_gets_a_context(fake):
    fake.failures = [driver.NO_CONTEXT]
    Launch(FUNCTION, 1, 32, 0, SIZES, (NO_OFFSET,))(GIVEN, STREAM)
    assert (len(fake.launches), fake.contexts) == (1, 1)


def test_other_failure_of_a_launch_is_the_callers(fake):
    fake.failures = [1]
    with pytest.raises(FakeDriver.Error):
        Launch(FUNCTION, 1, 32, 0, SIZES, (NO_OFFSET,))(GIVEN, STREAM)
    assert not fake.launches


def test_tensor_maps_are_made_once_an_address_and_bounded(monkeypatch):
    made = []
    monkeypatch.setattr("cuflash.tensor_maps.encode", lambda layout, address: made.append(address) or bytes(MAP_BYTES))
    maps = TensorMaps(MapLayout("float16", (64, 8, 1, 1), (128, 1024, 1024), (64, 64, 1, 1)))
    for address in (16, 32, 16):
        maps.at(address)
    assert made == [16, 32]
    for address in range(0, 64 * MAX_KNOWN_ADDRESSES, 16):
        maps.at(address)
        assert len(maps) <= MAX_KNOWN_ADDRESSES


# what a warm call remembers and checks


@pytest.fixture
def planned(monkeypatch):
    """What is launched: (addresses, stream) of each call; and `made`, the problem of each launch that was made."""
    launches, made = [], []

    def make_launch(problem, choice, device):
        made.append(problem)
        return lambda addresses, stream: launches.append((list(addresses), stream))

    monkeypatch.setattr(call.CALLS, "known", {})
    monkeypatch.setattr(call, "make_launch", make_launch)
    monkeypatch.setattr(call, "device_info", lambda index: known_device("sm_90"))
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(arrays.CupyKind, "current", lambda self, like: contextlib.nullcontext())
    monkeypatch.setattr(
        arrays.CupyKind, "maker", lambda self, shape, dtype, q: lambda like: at(NEW.data.ptr, shape, dtype)
    )
    return SimpleNamespace(launches=launches, made=made)


def address(array):
    return 0 if array is None else array.data.ptr


def test_cupy_tells_whether_an_array_is_contiguous():
    assert at(FIRST)._c_contiguous
    assert not at(FIRST).swapaxes(0, 1)._c_contiguous


def test_pytorch_tensors_are_read_as_cupy_arrays_are():
    torch = pytest.importorskip("torch")
    contiguous, swapped = torch.zeros(2, 3, 8), torch.zeros(3, 2, 8).transpose(0, 1)
    key, addresses = arrays.TORCH["cuda"].read([contiguous, None, swapped])
    rests = [x.data_ptr() & 15 for x in (contiguous, swapped)]
    assert addresses == [contiguous.data_ptr(), 0, swapped.data_ptr()]
    assert key[:6] == [(2, 3, 8), None, torch.float32, -1, rests[0], None]
    assert key[6:] == [(2, 3, 8), (8, 16, 1), torch.float32, -1, rests[1]]


def test_pytorch_tensors_that_need_a_derivative_are_not_read():
    torch = pytest.importorskip("torch")
    cuda, x = arrays.TORCH["cuda"], torch.zeros(2, 8)
    with pytest.raises(TypeError, match="requires grad"):
        cuda.read([x, x.clone().requires_grad_()])
    with torch.no_grad():
        assert len(cuda.read([x.clone().requires_grad_()])[1]) == 1
    with torch.autograd.forward_ad.dual_level(), pytest.raises(TypeError, match="tangents"):
        cuda.read([x])
    with pytest.raises(RuntimeError):
        torch.func.vmap(lambda row: cuda.read([row])[1])(x)


@pytest.mark.parametrize("shape", [(2, 3, 8), (2, 3, 4)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("swapped", [False, True])
def test_new_pytorch_tensor_has_the_shape_and_dtype_that_are_asked_for(shape, dtype, swapped):
    torch = pytest.importorskip("torch")
    like = torch.zeros(3, 2, 8).transpose(0, 1) if swapped else torch.zeros(2, 3, 8)
    made = arrays.TORCH["cuda"].new(shape, dtype, like)
    assert (tuple(made.shape), made.dtype) == (shape, getattr(torch, dtype))
    assert made.is_contiguous()


def test_addresses_are_in_the_order_of_the_kernel(planned):
    bias = at(FIRST + (1 << 26), (64, 64))
    lengths = at(FIRST + (1 << 27), (2,), np.int32)
    mask = at(FIRST + (1 << 28), (64, 64), np.bool_)
    out = at(FIRST + (1 << 29))
    given = {"bias": bias, "kv_lengths": lengths, "mask": mask, "out": out}
    result, lse = cuflash.attention(Q, K, V, return_lse=True, **given)
    assert result is out
    assert (lse.shape, lse.dtype) == ((2, 4, 64), np.float32)
    by_name = {"q": Q, "k": K, "v": V, "lse": lse, **given}
    assert planned.launches == [([address(by_name.get(name)) for name in ADDRESSES], None)]


def test_result_is_made_where_none_is_given(planned):
    result = cuflash.attention(Q, K, V)
    assert (result.shape, result.dtype) == (Q.shape, Q.dtype)
    assert planned.launches[0][0] == [*map(address, (Q, K, V, result)), 0, 0, 0, 0, 0]


def test_lse_has_an_address_where_it_is_wanted(planned):
    for want_lse in False, True, False:
        cuflash.attention(Q, K, V, return_lse=want_lse)
    assert [addresses[ADDRESSES.index("lse")] != 0 for addresses, _ in planned.launches] == [False, True, False]


def test_kernel_is_chosen_for_the_contiguous_result_that_stands_in_for_a_strided_one(planned):
    out = at(FIRST + (1 << 26), strides=(32768, 8192, -128, 4))  # rows backwards, every second column
    problem, choice, _ = call.plan_call(Call(Q, K, V, out), Options(), WgmmaConfig(2, 64))
    assert (problem.strides["out"], choice.family) == ((8192, 2048, 32, 1), "wgmma")
    repeating = at(FIRST + (1 << 26), strides=(32768, 8192, 4, 4))
    with pytest.raises(ValueError, match="out must not repeat elements"):
        call.plan_call(Call(Q, K, V, repeating), Options(), None)


def test_second_call_is_not_checked_again_and_has_its_own_addresses(planned):
    other = at(FIRST + (1 << 26))
    cuflash.attention(Q, K, V)
    cuflash.attention(other, K, V)
    assert len(planned.made) == 1
    assert planned.launches[1][0][:3] == [*map(address, (other, K, V))]


DIFFERENT = {
    "shape": ((at(FIRST, (2, 4, 65, 32)), K, V), {}),
    "strides": ((Q, at(address(K), strides=(32768, 8192, 128, 2)), V), {}),
    "alignment": ((at(FIRST + 2), K, V), {}),
    "dtype": (tuple(at(address(x), dtype=np.float32) for x in (Q, K, V)), {}),
    "causal": ((Q, K, V), {"causal": True}),
    "scale": ((Q, K, V), {"scale": 0.5}),
    "softcap": ((Q, K, V), {"softcap": 2.0}),
    "window": ((Q, K, V), {"window": (3, 0)}),
    "log-sum-exp": ((Q, K, V), {"return_lse": True}),
    "configuration": ((Q, K, V), {"config": SimtConfig(64, 64, 128, 16)}),
    "layout": ((Q, K, V), {"layout": "bnhd"}),
    "out": ((Q, K, V), {"out": NEW}),
}


@pytest.mark.parametrize(("qkv", "options"), DIFFERENT.values(), ids=DIFFERENT)
def test_call_that_differs_is_checked_anew(planned, qkv, options):
    cuflash.attention(Q, K, V)
    cuflash.attention(*qkv, **options)
    cuflash.attention(*qkv, **options)
    assert len(planned.made) == 2


def test_strides_of_an_axis_of_one_element_do_not_matter(planned):
    one = at(FIRST, (1, 4, 64, 32))
    odd = at(FIRST, (1, 4, 64, 32), strides=(48, 4096, 64, 2))
    assert odd._c_contiguous
    cuflash.attention(one, one, one)
    first = planned.made[0]
    cuflash.attention(odd, one, one)
    assert len(planned.made) == 1
    call.CALLS.known.clear()
    cuflash.attention(odd, one, one)
    assert planned.made[1] == first


EQUAL_AS_KEYS = {
    "scale": ({"scale": 1.0}, {"scale": True}, "scale"),
    "causal": ({"causal": False}, {"causal": 0}, "causal"),
    "softcap": ({"softcap": 1.0}, {"softcap": True}, "softcap"),
    "window": ({"window": (1, 0)}, {"window": (True, 0)}, "window"),
    "window of float": ({"window": (1, 0)}, {"window": (1.0, 0)}, "window"),
    "window of keys": ({"window": (1, 0)}, {"window": {1: 2, 0: 3}}, "window"),
}


@pytest.mark.parametrize(("good", "bad", "name"), EQUAL_AS_KEYS.values(), ids=EQUAL_AS_KEYS)
def test_remembered_call_does_not_let_an_equal_value_of_another_type_pass(planned, good, bad, name):
    cuflash.attention(Q, K, V, **good)
    with pytest.raises((TypeError, ValueError), match=name):
        cuflash.attention(Q, K, V, **bad)
    assert len(planned.launches) == 1


def test_window_may_be_a_list(planned):
    cuflash.attention(Q, K, V, window=[3, 0])
    cuflash.attention(Q, K, V, window=[3, 0])
    assert len(planned.made) == 1


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("other", [np.zeros((2, 4, 64, 32), np.float16), [1.0], 7], ids=["NumPy", "list", "int"])
def test_arrays_of_other_kinds_are_refused_after_a_good_call_too(planned, place, other):
    qkv = [Q, K, V]
    cuflash.attention(*qkv)
    qkv[place] = other
    with pytest.raises(TypeError, match=r"must be of one kind|must be a NumPy"):
        cuflash.attention(*qkv)
    assert len(planned.launches) == 1


def test_unhashable_option_is_refused_by_name(planned):
    with pytest.raises(ValueError, match="layout"):
        cuflash.attention(Q, K, V, layout=["bhnd"])


@pytest.mark.parametrize("place", range(3))
def test_out_that_overlaps_an_input_is_refused_after_a_good_call_too(planned, place):
    good = at(FIRST + (1 << 29))
    cuflash.attention(Q, K, V, out=good)
    with pytest.raises(ValueError, match=f"memory with {'qkv'[place]}"):
        cuflash.attention(Q, K, V, out=at(address((Q, K, V)[place]) + 64))
    assert len(planned.launches) == 1


def test_out_between_the_rows_of_an_input_is_not_refused(planned):
    q = at(FIRST, strides=(32768, 8192, 128, 2))
    out = at(FIRST + 64, strides=q.strides)
    for _ in range(2):
        cuflash.attention(q, K, V, out=out)
    assert len(planned.launches) == 2


def test_call_on_another_current_device_goes_to_the_device_of_the_arrays(planned, monkeypatch):
    cuflash.attention(Q, K, V)
    entered, current = [], [1]

    @contextlib.contextmanager
    def enter(self, like):
        entered.append(like)
        current[0] = 0
        yield
        current[0] = 1

    monkeypatch.setattr(arrays.CupyKind, "current", enter)
    moved = {key: replace(known, current_device=lambda: current[0]) for key, known in call.CALLS.known.items()}
    call.CALLS.known.update(moved)
    cuflash.attention(Q, K, V)
    assert len(entered) == 1
    assert entered[0] is Q
    assert len(planned.launches) == 2


def test_remembered_calls_are_bounded(planned, monkeypatch):
    monkeypatch.setattr(call, "MAX_REMEMBERED_CALLS", 4)
    for n in range(1, 12):
        cuflash.attention(at(FIRST, (n, 32)), K[0, 0], V[0, 0])
        assert len(call.CALLS.known) <= 4


def test_ready_says_what_a_prepared_call_needs(planned):
    known, addresses = call.CALLS.ready(CUPY, Call(Q, K, V), Options(), False, None)
    assert addresses == [*map(address, (Q, K, V)), 0, 0, 0, 0, 0]
    assert not known.strided
    assert call.CALLS.ready(CUPY, Call(Q, K, V), Options(), False, None)[0] is known


# the backward pass

OUT, DOUT = (at(FIRST + number * (1 << 24)) for number in (4, 5))
ROWS = at(FIRST + (6 << 24), (2, 4, 64), np.float32)
WORKSPACE = 1 << 50


@pytest.fixture
def gradients(monkeypatch):
    """As `planned`, of the backward pass; the gradients that are made are those in `new`."""
    launches, made, new = [], [], []

    def make_launch(problem, choice, device):
        made.append(problem)
        return lambda addresses, stream: launches.append((list(addresses), stream))

    def maker(self, shape, dtype, q):
        new.append(at(FIRST + (8 + len(new) << 24), shape, arrays.DTYPE_OF[dtype]))
        return lambda like, array=new[-1]: array

    monkeypatch.setattr(backward.CALLS, "known", {})
    monkeypatch.setattr(backward, "make_backward_launch", make_launch)
    monkeypatch.setattr(backward, "device_info", lambda index: known_device("sm_90"))
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(arrays.CupyKind, "current", lambda self, like: contextlib.nullcontext())
    monkeypatch.setattr(arrays.CupyKind, "maker", maker)
    monkeypatch.setattr(arrays.CupyKind, "memory_maker", lambda self, size: lambda like: (None, WORKSPACE))
    return SimpleNamespace(launches=launches, made=made, new=new)


def test_addresses_of_the_backward_pass_are_in_the_order_of_the_kernels(gradients):
    dlse = at(FIRST + (7 << 24), ROWS.shape, np.float32)
    results = cuflash.attention_backward(
        DOUT, Q, K, V, OUT, ROWS, dlse=dlse, config=BackwardSimtConfig(32, 32, 128, 16)
    )
    assert all(result is made for result, made in zip(results, gradients.new, strict=False))
    offsets, _ = backward.workspace_layout(gradients.made[0], BackwardSimtConfig(32, 32, 128, 16))
    given = {"q": Q, "k": K, "v": V, "out": OUT, "dout": DOUT, "lse": ROWS, "dlse": dlse}
    by_name = given | dict(zip(backward_launch.OUTPUTS, results, strict=False))
    names = (*backward_launch.INPUTS, *backward_launch.OUTPUTS)
    expected = [address(by_name.get(name)) for name in names] + [WORKSPACE + offset for offset in offsets]
    assert gradients.launches == [(expected, None)]


def test_second_call_of_the_backward_pass_is_not_checked_again(gradients):
    for _ in range(2):
        cuflash.attention_backward(DOUT, Q, K, V, OUT, ROWS, causal=True)
    assert (len(gradients.made), len(gradients.launches)) == (1, 2)


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"scale": 0.5}, {"return_dbias": True}, {"softcap": 2.0}, {"deterministic": False}]
)
def test_call_of_the_backward_pass_that_differs_is_checked_anew(gradients, options):
    given = {"bias": at(FIRST + (30 << 24), (64, 64))}
    for more in ({}, options, options):
        cuflash.attention_backward(DOUT, Q, K, V, OUT, ROWS, **given, **more)
    assert len(gradients.made) == 2


@pytest.mark.parametrize(("good", "bad", "name"), EQUAL_AS_KEYS.values(), ids=EQUAL_AS_KEYS)
def test_remembered_backward_call_does_not_let_an_equal_value_of_another_type_pass(gradients, good, bad, name):
    cuflash.attention_backward(DOUT, Q, K, V, OUT, ROWS, **good)
    with pytest.raises((TypeError, ValueError), match=name):
        cuflash.attention_backward(DOUT, Q, K, V, OUT, ROWS, **bad)
    assert len(gradients.launches) == 1


def test_remembered_backward_call_takes_no_number_for_deterministic(gradients):
    cuflash.attention_backward(DOUT, Q, K, V, OUT, ROWS)
    with pytest.raises(TypeError, match="deterministic must be True or False, got 1"):
        cuflash.attention_backward(DOUT, Q, K, V, OUT, ROWS, deterministic=1)
    assert len(gradients.launches) == 1


@pytest.mark.parametrize("place", range(6))
def test_missing_or_foreign_array_of_the_backward_pass_is_refused_after_a_good_call_too(gradients, place):
    given = [DOUT, Q, K, V, OUT, ROWS]
    cuflash.attention_backward(*given)
    for other in (None, np.zeros((2, 4, 64, 32), np.float16)):
        with pytest.raises(TypeError, match=r"must be of one kind|must be a NumPy"):
            cuflash.attention_backward(*given[:place], other, *given[place + 1 :])
    assert len(gradients.launches) == 1


def test_kernels_of_a_part_are_launched_with_one_block(fake):
    sizes = bytes(i % 256 for i in range(backward_launch.SIZE_BLOCK.size))
    none = (0,) * len(backward_launch.ADDRESSES)
    part = backward_launch.Part(None, (), ((none, sizes),), tail=b"tail")
    kernels = tuple(driver.Kernel(SimpleNamespace(ptr=i), 1, 32, 0) for i in range(3))
    given = [*range(101, 101 + len(none)), 7, 8]
    fake.size = len(backward_launch.ADDRESSES) * 8 + len(sizes) + 16 + 4
    backward_launch.BackwardLaunch(((kernels, part),))(given, STREAM)
    block = backward_launch.ADDRESS_BLOCK.pack(*given[:-2]) + sizes + struct.pack("<2Q", 7, 8) + b"tail"
    assert fake.launches == [(block, 9)] * 3


@pytest.mark.parametrize(("launches", "expected"), [(1, 2), (backward_launch.MOST_KNOWN_LAUNCHES + 1, 15)])
def test_parameters_of_a_backward_call_are_packed_once_an_address_where_they_are_few(
    fake, monkeypatch, launches, expected
):
    sizes = bytes(backward_launch.SIZE_BLOCK.size)
    none = (0,) * len(backward_launch.ADDRESSES)
    part = backward_launch.Part(None, (), ((none, sizes),) * launches)
    packed = []
    pack = backward_launch.Part.block
    monkeypatch.setattr(backward_launch.Part, "block", lambda self, *given: packed.append(given) or pack(self, *given))
    launch = backward_launch.BackwardLaunch((((driver.Kernel(SimpleNamespace(ptr=1), 1, 32, 0),), part),))
    fake.size = len(backward_launch.ADDRESSES) * 8 + len(sizes)
    for first in (100, 200, 100):
        launch([first, *none[1:]], STREAM)
    assert len(packed) == expected
    firsts = [struct.unpack_from("<Q", block)[0] for block, _ in fake.launches]
    assert firsts == [first for first in (100, 200, 100) for _ in range(launches)]
