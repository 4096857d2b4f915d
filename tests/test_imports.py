"""Modules of linearize import from their own layer or a lower one, never from a higher one."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "linearize"

LAYERS = (  # lowest first; a new top-level module or package is placed here
    ("errors", "versions", "plan", "output", "parts", "tensors", "processes", "schedule"),
    ("ops",),
    ("grouping", "fitting"),
    ("kernels", "transform"),
    ("attention",),
    ("interface", "models", "text", "capture", "lora", "replay"),
    (
        "divergence",
        "selection",
        "allocation",
        "growing",
        "cache",
        "converted",
        "convert",
        "checkpoint",
        "coefficients",
    ),
    ("adapt", "evaluate", "diagnose", "probe", "bench"),
    ("report",),
    ("cli",),
)
ORDER = {name: level for level, names in enumerate(LAYERS) for name in names}
TOP = ("__init__", "__main__")  # above every layer: may import anything, imported by nothing


def top_level(package: Path) -> set[str]:
    """Names of the modules and packages directly inside `package`."""
    modules = {file.stem for file in package.glob("*.py")}
    folders = {file.relative_to(package).parts[0] for file in package.glob("*/**/*.py")}
    return modules | folders


def imported(file: Path, package: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name below `package`) of each import of `package`; "" is its root."""
    here = [package.name, *file.relative_to(package).with_suffix("").parts]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level] if node.level else []
            base += node.module.split(".") if node.module else []
            # `from linearize import ops` names a module; `from linearize import load`, the root
            names = [
                f"{base[0]}.{alias.name}"
                if base == [package.name] and alias.name in ORDER
                else ".".join(base)
                for alias in node.names
            ]
        else:
            continue
        for name in names:
            root, _, rest = name.partition(".")
            if root == package.name:
                yield node.lineno, rest


def violations(package: Path) -> list[str]:
    """One line for each import between placed modules that points to a higher layer."""
    found = set()
    for file in package.rglob("*.py"):
        path = file.relative_to(package)
        module = path.with_suffix("").parts[0]
        if module not in ORDER:
            continue
        for line, name in imported(file, package):
            target = name.partition(".")[0] or "__init__"
            if target in TOP or ORDER.get(target, -1) > ORDER[module]:
                found.add(
                    f"{package.name}/{path}:{line} imports {package.name}.{target}, "
                    f"which is above {module}"
                )
    return sorted(found)


def test_every_module_has_a_layer() -> None:
    missing = top_level(PACKAGE) - set(ORDER) - set(TOP)
    assert not missing, f"place these in LAYERS of {Path(__file__).name}: {sorted(missing)}"


def test_imports_point_down() -> None:
    found = violations(PACKAGE)
    assert not found, "\n".join(["imports against the order of LAYERS:", *found])


def test_an_upward_import_is_named(tmp_path: Path) -> None:
    package = tmp_path / "linearize"
    for name, source in {
        "__init__": "from linearize import cli",
        "cli/__init__": "from .run import main",
        "cli/run": "from linearize import ops\nfrom ..plan import Plan",
        "ops/api": "import torch\nfrom . import chunked\nfrom ..kernels.oal import OAL",
        "plan": "def f():\n    import linearize.ops.api",
        "text": "from linearize import load",
    }.items():
        file = package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source, encoding="utf-8")
    assert violations(package) == [
        "linearize/ops/api.py:3 imports linearize.kernels, which is above ops",
        "linearize/plan.py:2 imports linearize.ops, which is above plan",
        "linearize/text.py:1 imports linearize.__init__, which is above text",
    ]
    assert top_level(package) == {"__init__", "cli", "ops", "plan", "text"}
