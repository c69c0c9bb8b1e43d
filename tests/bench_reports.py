"""Reports of `cuflash bench`, as a run would give them."""

from cuflash.bench import Ceiling, Comparison, Measured, Report


def report_of(*comparisons, **fields):
    return Report(
        {"gpu": "a GPU", "packages": {}}, {}, {"bfloat16": Ceiling(800.0, "cuBLAS")}, list(comparisons), **fields
    )


def comparison(case, excluded=(), **milliseconds):
    return Comparison(
        case, "a plan", {name: Measured((ms,) * 3, 0.0, False) for name, ms in milliseconds.items()}, dict(excluded)
    )
