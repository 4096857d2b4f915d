"""The public surface, exactly: what is exported, documented and promised to others."""

import ast
import importlib
import importlib.resources
import importlib.util
import inspect
import pkgutil
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import linearize
from linearize import errors
from linearize.errors import LinearizeError

MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages(linearize.__path__, "linearize.")
    if not info.name.endswith("__main__")
    and (importlib.util.find_spec("triton") or not info.name.startswith("linearize.ops.triton."))
)

SURFACE = {
    "linearize": {
        "AdaptSettings",
        "Adaptation",
        "Conversion",
        "LinearizeError",
        "Loaded",
        "Plan",
        "adapt",
        "convert",
        "evaluate",
        "kernels",
        "load",
        "ops",
        "save",
    },
    "linearize.ops": {
        "BACKENDS",
        "Features",
        "KernelMap",
        "State",
        "Weights",
        "dimension_quadratic_attention",
        "grouped_quadratic_attention",
        "kernel_attention",
        "resolve_backend",
    },
    "linearize.kernels": {"HeadShape", "Kernel", "available", "get"},
    "linearize.fitting": {
        "Activations",
        "Calibration",
        "FitResult",
        "Moments",
        "fit_factor",
        "match_outputs",
        "softmax_outputs",
    },
}

# DESIGN.md, "Contracts that others rely on": name -> (positional parameters, keyword-only ones)
CONTRACTS = {
    "linearize.load": (["ref"], {"dtype", "device"}),
    "linearize.convert": (["loaded", "text", "plan"], set()),
    "linearize.save": (["loaded", "folder", "adapter_only"], set()),
    "linearize.ops.grouped_quadratic_attention": (
        ["q", "k", "v", "groups", "factor"],
        {"eps", "scale", "key_mask", "state", "return_state", "backend"},
    ),
    "linearize.kernels.available": ([], set()),
}


@pytest.mark.parametrize("module", SURFACE)
def test_the_surface_is_exact(module: str) -> None:
    assert set(importlib.import_module(module).__all__) == SURFACE[module]


def test_the_root_has_no_other_public_names() -> None:
    public = {
        name
        for name, value in vars(linearize).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == SURFACE["linearize"] - {"evaluate", "kernels", "ops"}


@pytest.mark.parametrize("path", CONTRACTS)
def test_contracts_keep_their_parameters(path: str) -> None:
    """Further parameters may follow, by keyword."""
    module, _, name = path.rpartition(".")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    positional, keywords = CONTRACTS[path]
    kinds = {p.name: p.kind for p in parameters.values()}
    assert [n for n, kind in kinds.items() if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD] == (
        positional
    )
    assert keywords <= {n for n, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY}


def test_contracts_keep_their_defaults() -> None:
    signature = inspect.signature(linearize.ops.grouped_quadratic_attention)
    defaults = {name: p.default for name, p in signature.parameters.items()}
    assert defaults["eps"] == 1e-6
    assert defaults["scale"] is None
    assert defaults["return_state"] is False
    assert defaults["backend"] == "auto"
    assert inspect.signature(linearize.save).parameters["adapter_only"].default is False


@pytest.mark.parametrize("module", MODULES)
def test_every_module_says_what_it_exports(module: str) -> None:
    """``__all__`` exists, is sorted, and every name in it is there."""
    found = importlib.import_module(module)
    assert found.__doc__, f"{module} has no docstring"
    if not _defines_something(found):
        return
    names = found.__all__
    assert len(names) == len(set(names))
    missing = [name for name in names if not hasattr(found, name)]
    assert not missing


def _defines_something(module: types.ModuleType) -> bool:
    return any(not n.startswith("_") for n, _ in _own(module))


def _own(module: types.ModuleType) -> Iterator[tuple[str, object]]:
    for name, value in vars(module).items():
        if (inspect.isclass(value) or inspect.isfunction(value)) and (
            value.__module__ == module.__name__
        ):
            yield name, value


@pytest.mark.parametrize("module", MODULES)
def test_every_exported_object_is_documented(module: str) -> None:
    found = importlib.import_module(module)
    for name in getattr(found, "__all__", []):
        value = getattr(found, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{module}.{name} has no docstring"


def test_every_error_is_a_linearize_error_with_three_parts() -> None:
    kinds = [value for _, value in _own(errors)]
    assert {kind.__name__ for kind in kinds} == {
        "BackendError",
        "CheckpointError",
        "LinearizeError",
        "ModelError",
        "OutputError",
        "PlanError",
        "TextError",
    }
    for kind in kinds:
        error = kind("layers 3-99", "a model with layers 0-29", "Choose layers inside.")
        assert isinstance(error, LinearizeError)
        assert (error.asked, error.found, error.remedy) == (
            "layers 3-99",
            "a model with layers 0-29",
            "Choose layers inside.",
        )
        assert str(error) == (
            "asked for layers 3-99; found a model with layers 0-29. Choose layers inside."
        )


def test_the_package_is_typed_and_needs_no_peft() -> None:
    """py.typed is shipped, and peft is imported in one module, when adapters are made."""
    assert (importlib.resources.files("linearize") / "py.typed").is_file()
    root = Path(linearize.__path__[0])
    for file in root.rglob("*.py"):
        if file == root / "lora.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = [node.module or ""]
            else:
                continue
            roots = {entry.partition(".")[0] for entry in imported}
            assert "peft" not in roots, f"{file} imports peft"


def test_kernels_are_discovered_and_sorted() -> None:
    names = linearize.kernels.available()
    assert names == sorted(names)
    assert {"oal", "global"} <= set(names)
    for name in names:
        kernel = linearize.kernels.get(name)
        assert kernel.name == name
        assert kernel.title
        assert kernel.source
    with pytest.raises(LinearizeError, match="'nope'") as raised:
        linearize.kernels.get("nope")
    for name in names:
        assert name in str(raised.value)
