"""What a user of `import cuflash` sees, and that every example in a docstring is true."""

import doctest
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cuflash

README = Path(__file__).parents[1] / "README.md"

MODULES = [
    "cuflash",
    *(f"cuflash.{module.name}" for module in pkgutil.iter_modules(cuflash.__path__) if module.name != "__main__"),
]
NEEDS = {"cuflash.torch": "torch"}  # modules for an optional library


def test_public_names_exist_once_and_are_sorted():
    assert list(cuflash.__all__) == sorted(set(cuflash.__all__))
    assert all(hasattr(cuflash, name) for name in cuflash.__all__)
    assert {"attention", "explain", "prepare"} <= set(cuflash.__all__)


def test_version_is_a_release_number():
    assert re.fullmatch(r"\d+\.\d+\.\d+", cuflash.__version__)


@pytest.mark.parametrize("name", sorted(n for n in cuflash.__all__ if callable(getattr(cuflash, n))))
def test_public_callable_is_documented(name):
    assert inspect.getdoc(getattr(cuflash, name))


def test_options_of_attention_are_keyword_only():
    parameters = inspect.signature(cuflash.attention).parameters
    positional = [name for name, p in parameters.items() if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert positional == ["q", "k", "v"]


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings_are_true(module):
    if module in NEEDS:
        pytest.importorskip(NEEDS[module])
    failed, _ = doctest.testmod(
        importlib.import_module(module), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert failed == 0


def test_attention_has_an_example():
    finder = doctest.DocTestFinder(recurse=False)
    assert all(test.examples for test in finder.find(cuflash.attention, "attention"))


def test_example_in_the_readme_is_true():
    failed, tried = doctest.testfile(str(README), module_relative=False)
    assert (failed, tried > 3) == (0, True)


def test_modules_for_optional_libraries_are_attributes_of_the_package():
    pytest.importorskip("torch")
    lazy = "import sys, cuflash; assert not {'torch', 'optuna'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"{lazy}; cuflash.torch.attention; cuflash.tuning.tune"], check=True)


def test_the_package_has_no_other_attributes():
    with pytest.raises(AttributeError, match="module 'cuflash' has no attribute 'nonsense'"):
        _ = cuflash.nonsense
