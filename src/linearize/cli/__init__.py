"""The `linearize` command: one module a verb."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer

from linearize.cli.adapt import adapt
from linearize.cli.bench import bench
from linearize.cli.coefficients import export_file, import_file
from linearize.cli.common import Verbs, quiet
from linearize.cli.compare import compare_folders
from linearize.cli.convert import convert
from linearize.cli.demo import demo
from linearize.cli.diagnose import diagnose
from linearize.cli.evaluate import evaluate
from linearize.cli.fidelity import fidelity
from linearize.cli.generate import generate
from linearize.cli.kernels import kernels
from linearize.cli.merge import merge
from linearize.cli.probe import probe
from linearize.cli.report import report

__all__ = ["app", "main"]

VERBS: dict[str, Callable[..., Any]] = {
    "demo": demo,
    "convert": convert,
    "adapt": adapt,
    "merge": merge,
    "eval": evaluate,
    "fidelity": fidelity,
    "diagnose": diagnose,
    "generate": generate,
    "report": report,
    "compare": compare_folders,
    "export": export_file,
    "import": import_file,
    "kernels": kernels,
}

app = typer.Typer(
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Turn the softmax attention of pretrained causal language models into linear-time attention, "
    "and say what it cost.",
    epilog="Set LINEARIZE_DEBUG=1 to see the traceback of an error.",
)
for name, verb in VERBS.items():
    app.command(name, no_args_is_help=name not in ("demo", "kernels"))(verb)
app.add_typer(bench, name="bench")
app.add_typer(probe, name="probe")


def main() -> None:
    """Entry point of the `linearize` command; ends the process with 0, 2 on an error, or 130."""
    quiet()
    sys.exit(app())
