"""`linearize merge`: fold LoRA into the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from linearize.adapt import ADAPTATION, read_adaptation
from linearize.checkpoint import REPORT, save
from linearize.cli.common import JsonOption, OverwriteOption, load_model, say, store_json
from linearize.errors import CheckpointError
from linearize.lora import lora_layers
from linearize.output import check_writable
from linearize.report import read

__all__ = ["merge"]


def merge(
    folder: Annotated[
        str, typer.Argument(metavar="DIR", help="An adapted folder.", show_default=False)
    ],
    out: Annotated[
        Path, Option("--out", metavar="DIR", help="Folder to write.", show_default=False)
    ],
    overwrite: OverwriteOption = False,
    json: JsonOption = None,
) -> None:
    """Fold LoRA into the weights: a folder that loads without peft and gives equal logits.

    A folded softmax model is an ordinary Hugging Face folder; a folded converted one is what
    `linearize convert` writes. Embeddings tied to the output projection stay tied.

    Examples:

    \b
      linearize merge out/oal-adapted --out out/oal-merged
    """
    check_writable(out, overwrite)
    loaded = load_model(folder)
    count = len(lora_layers(loaded.model))
    if not count:
        raise CheckpointError(
            f"merging {folder}", "a model without LoRA", "Give a folder of linearize adapt."
        )
    adaptation = read_adaptation(folder)
    save(
        loaded,
        out,
        merge=True,
        overwrite=overwrite,
        report=read(folder).conversion if (Path(folder) / REPORT).is_file() else None,
        accounts={} if adaptation is None else {ADAPTATION: adaptation.as_dict()},
    )
    say(f"folded LoRA into {count} projections, saved to {out}")
    store_json(json, {"folder": str(out), "projections": count})
