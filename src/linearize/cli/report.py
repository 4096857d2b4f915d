"""`linearize report`: the page of a converted folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from linearize.cli.common import JsonOption, check_file, say, store_json
from linearize.report import read, write

__all__ = ["report"]


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A folder written by `linearize convert`.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None,
        Option(
            "--out",
            metavar="FILE",
            callback=check_file,
            help="Where to write.",
            show_default="DIR/report.html",
        ),
    ] = None,
    json: JsonOption = None,
) -> None:
    """Make the HTML page of a converted folder.

    It shows what is stored there; nothing is computed again. The results of `linearize eval` and of
    `linearize generate --compare` are in it if these were run on the folder. The page needs no
    other file.

    Examples:

    \b
      linearize report out/oal
      linearize report out/oal --out oal.html
    """
    path = write(folder, out)
    data = read(folder)
    say(f"wrote {path}")
    store_json(
        json,
        {
            "page": str(path),
            "evaluated": data.evaluation is not None,
            "samples": len(data.samples),
        },
    )
