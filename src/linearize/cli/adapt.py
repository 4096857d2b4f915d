"""`linearize adapt`: train LoRA and kernel parameters together, and save the best weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from torch import nn
from typer import Option

from linearize.adapt import (
    ADAPTATION,
    PRESETS,
    Adaptation,
    AdaptationReport,
    AdaptSettings,
    Part,
    read_adaptation,
    read_parts,
)
from linearize.adapt import adapt as adapt_model
from linearize.adapt.checkpoint import FILE
from linearize.adapt.scalars import available
from linearize.checkpoint import ADAPTER, REPORT, save
from linearize.cli.common import (
    JsonOption,
    OverwriteOption,
    check_texts,
    load_model,
    note,
    notes,
    progress,
    say,
    store_json,
)
from linearize.errors import CheckpointError, LinearizeError, OutputError
from linearize.output import check_writable
from linearize.processes import Processes, complete_launch
from linearize.report.data import read as read_report

__all__ = ["adapt", "check_folder", "finished", "show"]

RANGES = (
    "UTF-8 text or .jsonl. FILE@A-B takes only blocks A to B (inclusive, from 0) of it, "
    "counted in blocks of --unit tokens. May be repeated."
)


def adapt(
    model: Annotated[
        str,
        typer.Argument(
            metavar="DIR|MODEL",
            help="A converted folder; or any model, which gives the softmax reference.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        Option("--out", metavar="DIR", help="Folder of the adapted model.", show_default=False),
    ],
    text: Annotated[
        list[str], Option("--text", metavar="FILE[@A-B]", help=RANGES, show_default=False)
    ],
    validation_text: Annotated[
        list[str] | None,
        Option(
            "--validation-text",
            metavar="FILE[@A-B]",
            help="What the best weights are chosen on.",
            show_default="the last blocks of the text",
        ),
    ] = None,
    unit: Annotated[
        int | None,
        Option("--unit", min=2, help="Tokens per block of a range.", show_default="--block"),
    ] = None,
    preset: Annotated[
        str,
        Option(
            "--preset",
            metavar="|".join(PRESETS),
            help="paper: 512 updates of 4,096 tokens. small: 128 of 2,048, for two cores. Options "
            "below change single values.",
        ),
    ] = "paper",
    steps: Annotated[int | None, Option("--steps", help="Updates.")] = None,
    block: Annotated[int | None, Option("--block", help="Tokens per block.")] = None,
    batch: Annotated[int | None, Option("--batch", help="Blocks per forward pass.")] = None,
    accumulate: Annotated[
        int | None, Option("--accumulate", help="Forward passes per update and process.")
    ] = None,
    lr: Annotated[float | None, Option("--lr", help="Peak learning rate.")] = None,
    kernel_lr: Annotated[
        float | None,
        Option("--kernel-lr", help="Peak learning rate of the kernels.", show_default="--lr"),
    ] = None,
    kernels: Annotated[
        bool | None, Option("--kernels/--no-kernels", help="Train kernel parameters as well.")
    ] = None,
    rank: Annotated[int | None, Option("--rank", help="Rank of LoRA; 0: none.")] = None,
    alpha: Annotated[float | None, Option("--alpha", help="Scale of LoRA times its rank.")] = None,
    dropout: Annotated[float | None, Option("--dropout", help="Dropout before LoRA.")] = None,
    weight_decay: Annotated[float | None, Option("--weight-decay", help="Of AdamW.")] = None,
    warmup: Annotated[
        float | None, Option("--warmup", help="Share of the updates with a rising rate.")
    ] = None,
    clip: Annotated[float | None, Option("--clip", help="Largest gradient norm.")] = None,
    distill: Annotated[
        float | None,
        Option(
            "--distill", help="Share of the loss that follows the original model, or --teacher."
        ),
    ] = None,
    teacher: Annotated[
        str | None,
        Option(
            "--teacher",
            metavar="DIR|MODEL",
            help="Model to follow instead of the original, say the adapted softmax reference.",
        ),
    ] = None,
    transfer_steps: Annotated[
        int | None,
        Option("--transfer-steps", help="Updates of attention transfer before the others."),
    ] = None,
    transfer_lr: Annotated[
        float | None, Option("--transfer-lr", help="Peak learning rate of attention transfer.")
    ] = None,
    eval_every: Annotated[
        int | None, Option("--eval-every", help="Updates between two validations.")
    ] = None,
    validation_blocks: Annotated[
        int | None, Option("--validation-blocks", help="Blocks of a validation.")
    ] = None,
    skip_blocks: Annotated[
        int | None, Option("--skip-blocks", help="First blocks of the text, not trained on.")
    ] = None,
    seed: Annotated[
        int | None, Option("--seed", help="Seed of LoRA, order of blocks and dropout.")
    ] = None,
    dtype: Annotated[
        str | None, Option("--dtype", metavar="bf16|fp32", help="Precision of the model's maths.")
    ] = None,
    gradient_checkpointing: Annotated[
        bool | None, Option("--gradient-checkpointing", help="Less memory, a third more time.")
    ] = None,
    checkpoint_seconds: Annotated[
        float | None, Option("--checkpoint-seconds", help="Time between two checkpoints.")
    ] = None,
    tensorboard: Annotated[
        bool, Option("--tensorboard/--no-tensorboard", help="Write curves for TensorBoard.")
    ] = True,
    adapter_only: Annotated[
        bool, Option("--adapter-only", help="Save kernels and LoRA only, naming their base.")
    ] = False,
    resume: Annotated[
        bool, Option("--resume", help="Continue the run that was interrupted.")
    ] = False,
    overwrite: OverwriteOption = False,
    json: JsonOption = None,
) -> None:
    """Train LoRA on every layer's projections and the kernels with it, and save the best weights.

    The backbone stays as it is. The run under way keeps a checkpoint in DIR.training beside the
    output folder; --resume continues from it and gives what an uninterrupted run gives. Started by
    `accelerate launch`, the processes share the blocks of an update.

    Examples:

    \b
      linearize adapt out/oal --preset small --text train.txt --out out/oal-adapted
      linearize adapt out/oal --preset small --text train.txt --out out/oal-adapted --resume
      linearize adapt smollm2-135m --preset small --text train.txt --out out/softmax-adapted
      linearize adapt out/oal --text train.txt --distill 0.5 --teacher out/softmax-adapted --out out/b
      linearize adapt out/oal --unit 4096 --text train.txt@26-55 --text valid.txt@32-64 \\
        --validation-text valid.txt@0-31 --out out/oal-adapted
      accelerate launch --num_processes 2 -m linearize adapt out/oal --text train.txt --out out/two
    """
    complete_launch()
    given = {
        "steps": steps,
        "block": block,
        "batch": batch,
        "accumulate": accumulate,
        "lr": lr,
        "kernel_lr": kernel_lr,
        "train_kernels": kernels,
        "rank": rank,
        "alpha": alpha,
        "dropout": dropout,
        "weight_decay": weight_decay,
        "warmup": warmup,
        "clip": clip,
        "distill": distill,
        "transfer_steps": transfer_steps,
        "transfer_lr": transfer_lr,
        "eval_every": eval_every,
        "validation_blocks": validation_blocks,
        "skip_blocks": skip_blocks,
        "seed": seed,
        "dtype": dtype,
        "gradient_checkpointing": gradient_checkpointing,
        "checkpoint_seconds": checkpoint_seconds,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    settings = AdaptSettings.preset(preset, **changes)
    train = [Part(one) for one in text]
    held = [Part(one) for one in validation_text or []]
    check_texts([part.path for part in (*train, *held)])
    check_folder(model)
    if teacher is not None:
        check_folder(teacher)
    if resume and not overwrite and finished(out, settings, train, held, teacher):
        say(f"{out} is complete: nothing to resume")
        return
    check_writable(out, overwrite)
    work = out.with_name(f"{out.name}.training")
    processes = Processes.join()
    if processes.main:
        _claim(work, resume, overwrite)
        if tensorboard and not available():
            note("TensorBoard is not installed: the curves go to the report only")

    sizes = {"unit": unit or settings.block, "block": settings.block}
    with _no_empty(work):
        loaded = load_model(model)
        followed = None if teacher is None else load_model(teacher)
        nn.Module.to(loaded.model, processes.device)
        tokens = read_parts(train, loaded.tokenizer, **sizes)
        kept = read_parts(held, loaded.tokenizer, **sizes) if held else None
        with progress("adapting") as advance:
            adaptation = adapt_model(
                loaded,
                tokens,
                settings,
                validation=kept,
                teacher=followed,
                folder=work,
                resume=resume,
                tensorboard=tensorboard,
                progress=advance,
                names=([part.text for part in train], [part.text for part in held]),
            )
    processes.leave()
    if not processes.main:
        return
    show(adaptation.report)
    with notes.status(f"saving {out}"):
        _store(adaptation, model, out, work, adapter_only, overwrite)
    page = f", linearize report {out}" if (out / REPORT).is_file() else ""
    say(f"saved to {out}; next: linearize eval {out}{page}")
    store_json(json, {"folder": str(out), **adaptation.report.as_dict()})


def show(report: AdaptationReport) -> None:
    """Print what the adaptation comes to."""
    settings = report.settings
    say(
        f"{settings['steps']} updates, {report.tokens:,} tokens, {report.lora_numbers:,} LoRA and "
        f"{report.kernel_numbers:,} kernel numbers trained in {report.seconds:.0f} s, "
        f"{report.peak_memory / 2**30:.1f} GiB at most"
    )
    say(
        f"validation perplexity on {report.validation_blocks} blocks of {settings['block']:,}: "
        f"{report.start_perplexity:.2f} before, {report.best_perplexity:.2f} after "
        f"{report.best_step} updates, whose weights are kept"
    )


def check_folder(model: str) -> None:
    """Refuse a folder that is no model before anything is loaded.

    Raises:
        CheckpointError: it is a folder with neither a configuration nor an adapter.
    """
    folder = Path(model)
    files = ("config.json", ADAPTER)
    if folder.is_dir() and not any((folder / name).is_file() for name in files):
        raise CheckpointError(
            f"the model {folder}",
            f"a folder without {' or '.join(files)}",
            "Give a folder that linearize convert wrote, or a model.",
        )


def finished(
    out: Path,
    settings: AdaptSettings,
    text: list[Part],
    held: list[Part],
    teacher: str | None = None,
) -> bool:
    """Whether a folder holds the result of this very run.

    Raises:
        CheckpointError: it holds the result of another run; the message names what differs.
    """
    there = read_adaptation(out)
    if there is None:
        return False
    wanted = settings.identity() | {
        "text": [part.text for part in text],
        "validation_text": [part.text for part in held],
        "teacher": teacher,
    }
    texts = {"text": there.text, "validation_text": there.validation_text, "teacher": there.teacher}
    for name, value in wanted.items():
        found = (there.settings | texts).get(name)
        if found != value:
            raise CheckpointError(
                f"resuming {out} with {name}={value!r}",
                f"a complete adaptation with {name}={found!r}",
                "Choose another folder, or start again with --overwrite.",
            )
    return True


def _claim(work: Path, resume: bool, overwrite: bool) -> None:
    """Make the folder of the run under way, or refuse to lose an interrupted one.

    Raises:
        OutputError: there is an interrupted run, or the folder cannot be written.
    """
    found = (work / FILE).is_file()
    if found and not (resume or overwrite):
        raise OutputError(
            f"a new run in {work}",
            "the checkpoint of an interrupted one",
            "Continue it with --resume, or start again with --overwrite.",
        )
    if resume and not found:
        note(f"nothing to resume in {work}: starting from the beginning")
    try:
        if found and not resume:
            shutil.rmtree(work)
        work.mkdir(parents=True, exist_ok=True)
        probe = work / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise OutputError(
            f"the folder {work} for checkpoints", f"{error.strerror or error}", "Choose another."
        ) from error


@contextmanager
def _no_empty(work: Path) -> Iterator[None]:
    """Leave no folder without a checkpoint behind when a run fails before its first."""
    try:
        yield
    except LinearizeError:
        if not (work / FILE).is_file():
            shutil.rmtree(work, ignore_errors=True)
        raise


def _store(
    adaptation: Adaptation, model: str, out: Path, work: Path, adapter_only: bool, overwrite: bool
) -> None:
    """Write the adapted model, then drop the run under way."""
    save(
        adaptation.loaded,
        out,
        adapter_only,
        overwrite=overwrite,
        report=read_report(model).conversion if (Path(model) / REPORT).is_file() else None,
        accounts={ADAPTATION: adaptation.report.as_dict()},
    )
    events = work / "tensorboard"
    if events.is_dir():
        shutil.move(events, out / "tensorboard")
    shutil.rmtree(work, ignore_errors=True)
