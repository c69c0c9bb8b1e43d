"""Imports run one way, and importing cuflash loads no more than it needs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "cuflash"
TUNING = PACKAGE.parent / "tuning"

# A module imports only what stands in a layer above its own.
LAYERS = [
    {"device", "problem", "cubins", "counters", "driver", "wgmma", "sources"},
    {"config", "tensor_maps"},
    {"backward_config", "backward_problem"},
    {"winner", "cost_model"},
    {"store"},
    {"tuned"},
    {"plan", "compiler", "arrays", "reference"},
    {"launch", "backward_plan", "backward_reference"},
    {"backward_launch"},
    {"call"},
    {"backward"},
    {"api"},
    {"__init__"},
    {"machine", "timing", "torch"},
    {"demo", "peers", "cache"},
    {"samples"},
    {"bench"},
    {"cli"},
    {"__main__"},
]
LAYER_OF = {module: number for number, layer in enumerate(LAYERS) for module in layer}
MAY_LOAD_THE_TUNER = {"cli"}


def imports_of(path):
    """The modules of cuflash that the file `path` imports anywhere, in functions and for type checking too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} imports relatively"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    parts = [name.split(".") for name in found if name.split(".")[0] == "cuflash"]
    modules = {part[1] if len(part) > 1 else "__init__" for part in parts}
    return {module if module in LAYER_OF or module == "tuning" else "__init__" for module in modules}


@pytest.mark.parametrize("path", sorted(PACKAGE.glob("*.py")), ids=lambda path: path.stem)
def test_module_imports_only_what_stands_above_it(path):
    assert path.stem in LAYER_OF, f"{path.name} has no layer yet"
    wrong = {m for m in imports_of(path) - {"tuning"} if LAYER_OF[m] >= LAYER_OF[path.stem]}
    assert not wrong, f"{path.stem} must not import {sorted(wrong)}"


def test_only_the_command_line_may_import_the_tuner():
    loads = {path.stem for path in PACKAGE.glob("*.py") if "tuning" in imports_of(path)}
    assert loads <= MAY_LOAD_THE_TUNER


def test_importing_cuflash_loads_no_optional_or_slow_library():
    code = "import cuflash, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    )
    assert "numpy" in loaded
    assert not loaded & {"cupy", "torch", "jax", "optuna", "rich", "matplotlib"}
