"""Winners for the tests of the store, and a store of a test's own."""

import tempfile

from cuflash import store, tuned
from cuflash.backward_config import BackwardMmaConfig
from cuflash.backward_problem import read_backward_problem
from cuflash.config import MmaConfig
from cuflash.device import known_device
from cuflash.problem import Operand, contiguous_strides, read_problem
from cuflash.winner import Measurement, Winner, key_of

AMPERE = known_device("sm_80")
HOPPER = known_device("sm_90")
CONFIG = MmaConfig(b_r=64, b_c=64, warps=4)
OTHER = MmaConfig(b_r=64, b_c=32, warps=4)
BACKWARD_CONFIG = BackwardMmaConfig(b_r=64, b_c=64, warps=4, key_warps=4, vector_adds=False)


def operand(name, *shape, dtype="float16"):
    return Operand(name, shape, contiguous_strides(shape), dtype)


def make_problem(n=1000, h_q=8, h_kv=8, d=64, batch=1, n_q=None, dtype="float16", **options):
    q = operand("q", batch, h_q, n if n_q is None else n_q, d, dtype=dtype)
    k, v = (operand(name, batch, h_kv, n, d, dtype=dtype) for name in "kv")
    return read_problem(q, k, v, **options)


def make_gradients(n=1000, h_q=8, h_kv=8, d=64, batch=1, n_q=None, dtype="float16", **options):
    n_q = n if n_q is None else n_q
    q, dout, out = (operand(name, batch, h_q, n_q, d, dtype=dtype) for name in ("q", "dout", "out"))
    k, v = (operand(name, batch, h_kv, n, d, dtype=dtype) for name in "kv")
    lse = operand("lse", batch, h_q, n_q, dtype="float64" if dtype in ("float32", "float64") else "float32")
    return read_backward_problem(dout, q, k, v, out, lse, **options)


DAMAGE = {
    "empty": lambda text: b"",
    "truncated": lambda text: text[: len(text) // 2],
    "one bit flipped": lambda text: text.replace(b'"b_c": 64', b'"b_c": 65'),
    "zeros": lambda text: bytes(len(text)),
    "not UTF-8": lambda text: b"\xff" + text,
    "another JSON value": lambda text: b"[1, 2]",
    "nested without end": lambda text: b"[" * 100000,
}
PROBLEM = make_problem()
KEY = key_of(PROBLEM, AMPERE)
GRADIENTS = make_gradients()
BACKWARD_KEY = key_of(GRADIENTS, AMPERE)


def make_winner(config=CONFIG, key=KEY, date="2026-01-01T00:00:00Z", provenance=None, **details):
    provenance = provenance or tuned.current_provenance(f"{key.operation}_{config.family}")
    return Winner(key, config, provenance, Measurement(10.0, 12.5, 100, date, details))


def stale(winner):
    return winner._replace(provenance=winner.provenance._replace(source="of an earlier version"))


def start_process(patch):
    """Forget what this process has looked up, as a new process would not know it."""
    for name in ("_known", "_loaded"):
        patch.setattr(tuned, name, {})
    patch.setattr(tuned, "_told", set())
    patch.setattr(tuned, "_required", None)
    store._warn_once.cache_clear()


def own_folders(patch, folder):
    """The user's, the site's and the temporary directory below `folder`; nothing shipped; a new process."""
    patch.setenv("CUFLASH_CACHE_DIR", str(folder / "user"))
    patch.setattr(tempfile, "tempdir", str(folder / "temporary"))
    patch.setattr(tuned, "site_directory", lambda: folder / "site")
    patch.setattr(tuned, "_shipped", lambda: {})
    (folder / "temporary").mkdir()
    start_process(patch)


def found(key=KEY):
    return [(one.winner.config, one.source) for one in tuned.candidates(key)]
