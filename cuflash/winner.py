"""A winner: the fastest configuration measured for one kind of call on one kind of GPU, and its form as JSON.

What comes from a file is data: every value is checked here for its type and range before anything is made of it, and
the legality of a configuration is asked of `cuflash.config` or `cuflash.backward_config` before it is rendered into a
kernel.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, NamedTuple, TypeAlias

from cuflash.backward_config import BackwardConfig, BackwardMmaConfig, BackwardSimtConfig, BackwardWgmmaConfig
from cuflash.backward_problem import BackwardProblem
from cuflash.config import MmaConfig, SimtConfig, WgmmaConfig
from cuflash.device import DeviceInfo
from cuflash.problem import DTYPES, MAX_HEAD_DIM, Problem, Spec

SCHEMA = 1  # of the JSON below; a configuration field that changes its meaning raises it too
FORWARD, BACKWARD = "forward", "backward"  # operations

LEAST_SEQLEN, MOST_SEQLEN = 16, 32768  # of a bucket; the last one holds everything longer
LARGEST_FIELD = 2**20  # of a configuration
BLOCK_ROWS = 128  # query rows, or keys, of a nominal block
WAVES = {"0.5": 0.5, "1": 1.0, "2": 2.0, "4": 4.0, "more": math.inf}

GpuConfig: TypeAlias = SimtConfig | MmaConfig | WgmmaConfig | BackwardConfig
CONFIG_TYPES: dict[str, dict[str, type[GpuConfig]]] = {
    FORWARD: {kind.family: kind for kind in (SimtConfig, MmaConfig, WgmmaConfig)},
    BACKWARD: {kind.family: kind for kind in (BackwardSimtConfig, BackwardMmaConfig, BackwardWgmmaConfig)},
}


class Damaged(ValueError):
    """Not a winner: truncated, altered, or of values that no winner has."""


class Foreign(ValueError):
    """A winner of another version of cuflash, or of another key, of which this one can make nothing."""


class Bucket(NamedTuple):
    """Sizes that are tuned together.

    Attributes
    ----------
    n_q, n_k : int
        Powers of two nearest to the sequence lengths, from 16 to 32768; n_q = 1 for a single query row.
    window : int
        Power of two nearest to the number of keys in a window that is bounded on both sides, at most `n_k`; else 0.
    waves : {"0.5", "1", "2", "4", "more"}
        At most how many times blocks of 128 query rows, backward of 128 keys, fill the multiprocessors.
    grouped : bool
        Whether several query heads share a head of keys and values.
    """

    n_q: int
    n_k: int
    window: int
    waves: str
    grouped: bool

    def __str__(self) -> str:
        fill = "more than 4 waves" if self.waves == "more" else f"up to {self.waves} waves"
        window = f", window {self.window}" if self.window else ""
        return f"N {self.n_q} x {self.n_k}{window}, {fill}{', grouped heads' if self.grouped else ''}"


class Key(NamedTuple):
    """What a winner is looked up by."""

    spec: Spec
    bucket: Bucket
    device: DeviceInfo
    operation: str = FORWARD


class Provenance(NamedTuple):
    """What a winner was measured with. One of other provenance may no longer be the fastest.

    Attributes
    ----------
    source : str
        `cuflash.sources.source_hash` of its kernel.
    nvrtc, driver : str
        Version of NVRTC, and the newest CUDA version that the driver serves, ``"13.0"`` say.
    """

    source: str
    nvrtc: str
    driver: str


class Measurement(NamedTuple):
    """How fast a winner was, and how it was found.

    Attributes
    ----------
    time_us, default_time_us : float
        Microseconds of the winner and of the configuration that an untuned call gets, timed in turn.
    evaluations : int
        How many configurations were timed.
    date : str
        ISO 8601, UTC.
    details : mapping
        Whatever else the tuner records, as JSON knows it.
    """

    time_us: float
    default_time_us: float
    evaluations: int
    date: str
    details: Mapping[str, Any]

    @property
    def gain(self) -> float:
        """How many times faster than the default."""
        return self.default_time_us / self.time_us


class Winner(NamedTuple):
    """The fastest configuration measured for a key."""

    key: Key
    config: GpuConfig
    provenance: Provenance
    measurement: Measurement

    @property
    def kernel(self) -> str:
        """The file of its kernel, without the ending."""
        return f"{self.key.operation}_{self.config.family}"

    def as_json(self) -> dict[str, Any]:
        """The winner as JSON knows it, with a checksum."""
        document: dict[str, Any] = {
            "schema": SCHEMA,
            "key": key_as_json(self.key),
            "family": self.config.family,
            "config": config_as_json(self.config),
            "provenance": self.provenance._asdict(),
            "measurement": {**self.measurement._asdict(), "details": dict(self.measurement.details)},
        }
        return {**document, "checksum": checksum(document)}


def key_of(problem: Problem | BackwardProblem, device: DeviceInfo) -> Key:
    """The key of a call on `device`.

    Examples
    --------
    >>> import numpy as np, cuflash
    >>> from cuflash.device import known_device
    >>> from cuflash.winner import key_of
    >>> x = np.zeros((8, 1000, 64), np.float16)
    >>> key_of(cuflash.explain(x, x, x, causal=True).problem, known_device("sm_90")).bucket
    Bucket(n_q=1024, n_k=1024, window=0, waves='0.5', grouped=False)
    """
    operation, forward = (FORWARD, problem) if isinstance(problem, Problem) else (BACKWARD, problem.forward)
    group = forward.h_q // max(forward.h_kv, 1)
    n_k = nearest_power(forward.n_k)
    window = 0
    if forward.left is not None and forward.right is not None:
        window = min(nearest_power(forward.left + forward.right + 1), n_k)
    owned = forward.n_q * group if operation == FORWARD else forward.n_k  # by the blocks of a head of keys
    blocks = forward.heads_total // max(group, 1) * -(-owned // BLOCK_ROWS)
    waves = next(name for name, most in WAVES.items() if blocks <= most * device.multiprocessors)
    n_q = 1 if forward.n_q == 1 else nearest_power(forward.n_q)
    return Key(problem.spec, Bucket(n_q, n_k, window, waves, group > 1), device, operation)


def nearest_power(length: int) -> int:
    """The power of two that is nearest to `length` by ratio, among those of a bucket."""
    clamped = min(max(length, LEAST_SEQLEN), MOST_SEQLEN)
    return 1 << round(math.log2(clamped))


# ---- as JSON ----


def canonical_json(value: Any) -> str:
    """The one text of a JSON value that its checksum is taken of."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def checksum(document: Mapping[str, Any]) -> str:
    """SHA-256 of a document without its own checksum."""
    rest = {name: value for name, value in document.items() if name != "checksum"}
    return hashlib.sha256(canonical_json(rest).encode()).hexdigest()


def key_as_json(key: Key) -> dict[str, Any]:
    """A key as JSON knows it. Features that are off are left out, so that a new one leaves older keys what they are."""
    spec = {f.name: getattr(key.spec, f.name) for f in fields(Spec) if getattr(key.spec, f.name) != f.default}
    device = {f.name: getattr(key.device, f.name) for f in fields(DeviceInfo)}
    device["compute_capability"] = list(key.device.compute_capability)
    return {"operation": key.operation, "device": device, "spec": spec, "bucket": key.bucket._asdict()}


def config_as_json(config: GpuConfig) -> dict[str, int]:
    """The fields of a configuration: integers and booleans."""
    return {f.name: getattr(config, f.name) for f in fields(config)}


def winner_from_json(document: Any) -> Winner:
    """Read what `Winner.as_json` made.

    Raises
    ------
    Damaged, Foreign
        Saying what is wrong.
    """
    if not isinstance(document, dict) or not _is_int(document.get("schema")):
        raise Damaged("it is not a winner of cuflash")
    if document["schema"] != SCHEMA:
        raise Foreign(f"its schema is {document['schema']}, this version of cuflash reads {SCHEMA}")
    try:
        if document.get("checksum") != checksum(document):
            raise Damaged("its checksum does not fit")
        names = ("schema", "key", "family", "config", "provenance", "measurement", "checksum")
        _, key, family, config, provenance, measurement, _ = _take(document, "a winner", *names)
        known = key_from_json(key)
        return Winner(
            known,
            config_from_json(known.operation, family, config),
            Provenance(*(_text(part) for part in _take(provenance, "provenance", *Provenance._fields))),
            _measurement(measurement),
        )
    except (Damaged, Foreign):
        raise
    except RecursionError:
        raise Damaged("it is nested too deeply") from None
    except (TypeError, ValueError) as error:  # no JSON has a text for it: NaN, infinity
        raise Damaged(str(error)) from error


def key_from_json(document: Any) -> Key:
    """Read what `key_as_json` made."""
    operation, device, spec, bucket = _take(document, "key", "operation", "device", "spec", "bucket")
    if not isinstance(operation, str) or operation not in CONFIG_TYPES:
        raise Foreign(f"it is for the operation {operation!r}")
    return Key(_spec(spec), _bucket(bucket), _device(device), operation)


def config_from_json(operation: str, family: Any, document: Any) -> GpuConfig:
    """Read what `config_as_json` made of a configuration. Whether it is legal, its `why_illegal` says."""
    if not isinstance(family, str) or family not in CONFIG_TYPES[operation]:
        raise Foreign(f"its kernel family is {family!r}")
    kind = CONFIG_TYPES[operation][family]
    values = _known_fields(kind, document)
    for name, value in values.items():
        if not isinstance(value, int) or not 0 <= value <= LARGEST_FIELD:
            raise Damaged(
                f"{kind.__name__}.{name} must be an integer up to {LARGEST_FIELD} or a boolean, got {value!r:.80}"
            )
    try:
        return kind(**values)
    except ValueError as error:
        raise Damaged(str(error)) from error


def _known_fields(kind: Any, document: Any) -> dict[str, Any]:
    """The fields of a dataclass, checked for names: none unknown, none missing that has no default."""
    if not isinstance(document, dict):
        raise Damaged(f"{kind.__name__} must be an object, got {type(document).__name__}")
    if unknown := document.keys() - {f.name for f in fields(kind)}:
        raise Foreign(f"this version of cuflash knows no {kind.__name__}.{min(unknown)}")
    if missing := {f.name for f in fields(kind) if f.default is MISSING} - document.keys():
        raise Damaged(f"{kind.__name__}.{min(missing)} is missing")
    return document


def _spec(document: Any) -> Spec:
    spec = Spec(**_known_fields(Spec, document))
    for name, dtype in (("dtype", spec.dtype), ("bias", spec.bias)):
        if dtype not in DTYPES and not (name == "bias" and dtype is None):
            raise Damaged(f"Spec.{name} must be a dtype, got {dtype!r}")
    for name in ("d", "d_v"):
        head_dim = getattr(spec, name)
        if not _is_int(head_dim) or head_dim % 16 or not 16 <= head_dim <= MAX_HEAD_DIM:
            raise Damaged(f"Spec.{name} must be a multiple of 16 up to {MAX_HEAD_DIM}, got {head_dim!r}")
    for f in fields(Spec):
        if isinstance(f.default, bool) and not isinstance(getattr(spec, f.name), bool):
            raise Damaged(f"Spec.{f.name} must be true or false, got {getattr(spec, f.name)!r}")
    return spec


def _bucket(document: Any) -> Bucket:
    bucket = Bucket(*_take(document, "bucket", *Bucket._fields))
    powers = {1 << exponent for exponent in range(MOST_SEQLEN.bit_length())}
    powers = {power for power in powers if power >= LEAST_SEQLEN}
    for name, legal in (("n_q", powers | {1}), ("n_k", powers), ("window", powers | {0})):
        if not _is_int(value := getattr(bucket, name)) or value not in legal:
            raise Damaged(f"bucket.{name} must be one of {sorted(legal)}, got {value!r}")
    if not isinstance(bucket.waves, str) or bucket.waves not in WAVES or not isinstance(bucket.grouped, bool):
        raise Damaged(f"bucket must have waves of {', '.join(WAVES)} and a flag grouped, got {bucket}")
    return bucket


def _device(document: Any) -> DeviceInfo:
    names = [f.name for f in fields(DeviceInfo)]
    name, capability, multiprocessors, shared_bytes = _take(document, "device", *names)
    if not isinstance(capability, list) or len(capability) != 2 or not all(map(_is_int, capability)):
        raise Damaged(f"device.compute_capability must be a pair of integers, got {capability!r}")
    for number in (*capability, multiprocessors, shared_bytes):
        if not _is_int(number) or not 0 <= number < 2**31:
            raise Damaged(f"device must be described by non-negative integers, got {number!r}")
    return DeviceInfo(_text(name), (capability[0], capability[1]), multiprocessors, shared_bytes)


def _measurement(document: Any) -> Measurement:
    measurement = Measurement(*_take(document, "measurement", *Measurement._fields))
    for time in measurement[:2]:
        if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 < time < math.inf:
            raise Damaged(f"a time must be a positive number, got {time!r}")
    if not _is_int(measurement.evaluations) or measurement.evaluations < 0:
        raise Damaged(f"evaluations must be a count, got {measurement.evaluations!r}")
    if not isinstance(measurement.details, dict):
        raise Damaged("measurement.details must be an object")
    _text(measurement.date)
    return measurement


def _take(document: Any, what: str, *names: str) -> list[Any]:
    """The values of `names` in a JSON object that must hold these and no others."""
    if not isinstance(document, dict):
        raise Damaged(f"{what} must be an object, got {type(document).__name__}")
    if missing := set(names) - document.keys():
        raise Damaged(f"{what} lacks {min(missing)}")
    if unknown := document.keys() - set(names):
        raise Foreign(f"this version of cuflash knows no {unknown.pop()!r} of {what}")
    return [document[name] for name in names]


def _text(value: Any) -> str:
    """A short text that is safe to print."""
    if not isinstance(value, str) or len(value) > 200 or not value.isprintable():
        raise Damaged(f"must be a short printable text, got {value!r:.80}")
    return value


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
