"""`linearize export` and `linearize import`: the OAL authors' coefficient file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from linearize.checkpoint import REPORT, save
from linearize.cli.common import JsonOption, OverwriteOption, load_model, say, store_json
from linearize.coefficients import export_coefficients, import_coefficients
from linearize.converted import converted_layers
from linearize.output import check_writable
from linearize.report.data import read

__all__ = ["export_file", "import_file"]


def export_file(
    folder: Annotated[str, typer.Argument(metavar="DIR", show_default=False)],
    out: Annotated[Path, Option("--out", metavar="FILE", help="JSON file to write.")],
    json: JsonOption = None,
) -> None:
    """Write the groups and factors of an OAL model in the authors' form.

    Examples:

    \b
      linearize export out/oal --out coefficients.json
    """
    loaded = load_model(folder)
    stored = (Path(folder) / REPORT).is_file()
    export_coefficients(loaded, out, read(Path(folder)).conversion if stored else None)
    layers = sorted(converted_layers(loaded.model))
    say(f"wrote the coefficients of {len(layers)} layers to {out}")
    store_json(json, {"file": str(out), "layers": layers})


def import_file(
    model: Annotated[str, typer.Argument(metavar="MODEL", show_default=False)],
    coefficients: Annotated[Path, Option("--coefficients", metavar="FILE", help="The file.")],
    out: Annotated[Path, Option("--out", metavar="DIR", help="Folder of the converted model.")],
    adapter_only: Annotated[
        bool, Option("--adapter-only", help="Save the kernels only, naming their base model.")
    ] = False,
    overwrite: OverwriteOption = False,
    json: JsonOption = None,
) -> None:
    """Convert a model with groups and factors from the authors' file; nothing is fitted.

    Examples:

    \b
      linearize import Qwen/Qwen2.5-0.5B --coefficients coefficients.json --out out/oal
    """
    check_writable(out, overwrite)
    loaded = import_coefficients(load_model(model), coefficients)
    save(loaded, out, adapter_only, overwrite=overwrite)
    layers = sorted(converted_layers(loaded.model))
    say(f"converted layers {layers} with {coefficients}, saved to {out}")
    store_json(json, {"folder": str(out), "layers": layers})
