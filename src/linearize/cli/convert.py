"""`linearize convert`: fit linear-time attention to a model and save the converted model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option

from linearize import kernels
from linearize.checkpoint import save
from linearize.cli.common import (
    DEFAULTS,
    AlphaOption,
    BlockOption,
    CenterOption,
    FitBlocksOption,
    GammaOption,
    JsonOption,
    OverwriteOption,
    SeedOption,
    SinksOption,
    TauOption,
    TextOption,
    ValidationBlocksOption,
    WindowOption,
    check_texts,
    load_model,
    note,
    notes,
    parse_bytes,
    parse_options,
    progress,
    results,
    say,
    store_json,
    table,
)
from linearize.convert import Conversion, ConversionReport, LayerReport
from linearize.convert import convert as convert_model
from linearize.models import Loaded
from linearize.output import check_writable
from linearize.plan import Plan
from linearize.processes import Processes, complete_launch
from linearize.report import Memory
from linearize.report.drawing import byte_text
from linearize.selection import Selection
from linearize.text import Source

__all__ = ["convert", "run", "show"]


def convert(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Hugging Face id, model folder, .gguf file, or smollm2-135m.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path,
        Option("--out", metavar="DIR", help="Folder of the converted model.", show_default=False),
    ],
    kernel: Annotated[
        str, Option("--kernel", help="Name of a kernel; see `linearize kernels`.")
    ] = DEFAULTS.kernel,
    layers: Annotated[
        str,
        Option(
            "--layers",
            help='Zero-based layers: "3-26", "4,12,20", "all", "middle", or "auto": those whose '
            "conversion costs most keep softmax.",
        ),
    ] = "middle",
    heads: Annotated[
        str,
        Option(
            "--heads",
            metavar="all|auto",
            help="auto: the KV heads whose conversion costs most keep softmax.",
        ),
    ] = DEFAULTS.heads,
    keep: Annotated[
        str | None,
        Option("--keep", metavar="N|P%", help="With auto: how many layers or heads keep softmax."),
    ] = None,
    max_kl: Annotated[
        float | None,
        Option("--max-kl", help="With auto: divergence to come down to, in nats per token."),
    ] = None,
    memory_budget: Annotated[
        str | None,
        Option(
            "--memory-budget",
            metavar="BYTES",
            help='With auto: decoding memory at --context tokens, such as "64MiB".',
        ),
    ] = None,
    context: Annotated[
        int, Option("--context", help="Tokens at which --memory-budget holds.")
    ] = DEFAULTS.context,
    text: TextOption = None,
    window: WindowOption = DEFAULTS.window,
    sinks: SinksOption = DEFAULTS.sinks,
    saturation: Annotated[
        int | None,
        Option("--saturation", help="Keys the kernel counts for at most beside the exact ones."),
    ] = DEFAULTS.saturation,
    center: CenterOption = DEFAULTS.center,
    state_rank: Annotated[
        int | None,
        Option("--state-rank", help="Directions of the keys the kernel sees; the state shrinks."),
    ] = None,
    state_budget: Annotated[
        str | None,
        Option(
            "--state-budget",
            metavar="BYTES",
            help="Bytes for the states of all converted layers; ranks follow, layer by layer.",
        ),
    ] = None,
    fitting: Annotated[
        str,
        Option(
            "--fitting",
            metavar="frozen|sequential",
            help="sequential: each layer is fitted on activations of the layers converted before.",
        ),
    ] = DEFAULTS.fitting,
    groups: Annotated[
        int | None,
        Option("--groups", help="Groups per head, instead of as many as the data shows."),
    ] = DEFAULTS.groups,
    min_groups: Annotated[
        int, Option("--min-groups", help="Fewest groups per head found in the data.")
    ] = DEFAULTS.min_groups,
    alpha: AlphaOption = DEFAULTS.alpha,
    gamma: GammaOption = DEFAULTS.gamma,
    tau: TauOption = DEFAULTS.tau,
    prompts: Annotated[
        int, Option("--prompts", help="Prompts the groups are found on.")
    ] = DEFAULTS.prompts,
    block: BlockOption = DEFAULTS.block,
    fit_blocks: FitBlocksOption = DEFAULTS.fit_blocks,
    validation_blocks: ValidationBlocksOption = DEFAULTS.validation_blocks,
    skip_blocks: Annotated[
        int, Option("--skip-blocks", help="First blocks of the text, left untouched as held-out.")
    ] = DEFAULTS.skip_blocks,
    positions: Annotated[
        int, Option("--positions", help="Query positions sampled per fitting block.")
    ] = DEFAULTS.positions,
    joint_steps: Annotated[
        int,
        Option(
            "--joint-steps",
            help="Gradient steps in which the keys' mean and directions are learned with the kernel.",
        ),
    ] = DEFAULTS.joint_steps,
    solver: Annotated[
        str, Option("--solver", metavar="moments|adam", help="adam is the paper's recipe.")
    ] = DEFAULTS.solver,
    option: Annotated[
        list[str] | None,
        Option("--option", metavar="KEY=VALUE", help="Setting of the kernel; may be repeated."),
    ] = None,
    adapter_only: Annotated[
        bool, Option("--adapter-only", help="Save the kernels only, naming their base model.")
    ] = False,
    overwrite: OverwriteOption = False,
    seed: SeedOption = DEFAULTS.seed,
    json: JsonOption = None,
) -> None:
    """Convert a model and save it.

    Linear-time attention takes the place of softmax in the layers chosen. The weights of the model
    stay as they are; only the kernels are fitted, on the activations that the text gives. The
    folder is an ordinary Hugging Face folder.

    Examples:

    \b
      linearize convert smollm2-135m --out out/oal
      linearize convert smollm2-135m --out out/oal --layers 3-26 --text train.txt --block 1024
      linearize convert my/model --out out/hybrid --sinks 4 --window 64 --center --state-rank 8
      linearize convert my/model --out out/mixed --sinks 4 --window 64 --heads auto --keep 10%
    """
    complete_launch()
    plan = Plan(
        kernel=kernel,
        layers=layers,
        heads=heads,
        keep=keep,
        max_kl=max_kl,
        memory_budget=parse_bytes(memory_budget),
        context=context,
        window=window,
        sinks=sinks,
        saturation=saturation,
        center=center,
        state_rank=state_rank,
        state_budget=parse_bytes(state_budget),
        fitting=fitting,
        groups=groups,
        min_groups=min_groups,
        alpha=alpha,
        gamma=gamma,
        tau=tau,
        prompts=prompts,
        block=block,
        fit_blocks=fit_blocks,
        validation_blocks=validation_blocks,
        skip_blocks=skip_blocks,
        positions=positions,
        joint_steps=joint_steps,
        solver=solver,
        seed=seed,
        options=parse_options(option),
    )
    kernels.get(plan.kernel)
    check_writable(out, overwrite)
    source = check_texts(text)
    if source is None:
        note("no --text: using the documentation that comes with Python")

    conversion = run(load_model(model), source, plan)
    processes = Processes.join()
    processes.leave()
    if not processes.main:
        return
    show(conversion.report)
    with notes.status(f"saving {out}"):
        save(
            conversion.loaded,
            out,
            adapter_only,
            overwrite=overwrite,
            report=conversion.report,
        )
    say(f"saved to {out}; next: linearize eval {out}, linearize report {out}")
    store_json(json, {"folder": str(out), **conversion.report.as_dict()})


def run(loaded: Loaded, text: Source | None, plan: Plan) -> Conversion:
    """Convert with a progress bar over the layers."""
    with progress("converting") as advance:
        return convert_model(loaded, text, plan, progress=advance)


def show(report: ConversionReport) -> None:
    """Print a line a layer, and what the conversion comes to."""
    made = table(
        "layer", "groups", "relative error", "worst head", "numbers fitted", "seconds", left=0
    )
    for layer in report.layers:
        made.add_row(*_row(layer))
    results.print(made)
    if report.selection is not None:
        _show_selection(report.selection)
    relative = [error for layer in report.layers for error in layer.validation_relative]
    say(
        f"converted {len(report.layers)} of {report.model_layers} layers with kernel "
        f"{report.plan['kernel']} in {report.seconds:.0f} s: mean relative error "
        f"{sum(relative) / len(relative):.3f}, {sum(x.trainable for x in report.layers):,} numbers fitted"
    )
    for line in memory_lines(Memory.of(report)):
        say(line)


def _show_selection(selection: Selection) -> None:
    """What keeps its softmax, and what that is worth."""
    made = table("kept exact", "divergence", "on repeated text", "gain", left=1)
    for one in selection.candidates:
        if one.kept:
            heads = f", KV head {one.heads[0]}" if selection.unit == "head" else ""
            measured = f"{one.divergence:.4f}", f"{one.recall:.4f}", f"{one.gain:.1%}"
            made.add_row(f"layer {one.layer}{heads}", *measured)
    results.print(made)
    (_, text, recall), (kept, text_left, recall_left) = selection.curve[0], selection.curve[-1]
    say(
        f"kept {kept} of {len(selection.candidates)} {selection.unit}s exact: divergence from the "
        f"original {text:.3f} -> {text_left:.3f} nats per token on {selection.tokens:,} tokens, "
        f"{recall:.3f} -> {recall_left:.3f} on {selection.repeated:,} read a second time; "
        f"decoding memory at {selection.context:,} tokens {byte_text(selection.decode_bytes)}"
    )


def memory_lines(memory: Memory) -> list[str]:
    """The decoding memory in words."""
    if memory.state == 0:
        return ["decoding memory: as before; this kernel keeps every key"]
    lines = [
        f"decoding memory (fp32): {byte_text(memory.state)} at any length"
        + (f" and {memory.retained:,} bytes a token in retained layers" if memory.retained else "")
        + f"; before, {memory.original:,} bytes a token"
    ]
    if memory.crossover is not None:
        lines.append(f"less memory than before from {memory.crossover:,} tokens on")
    return lines


def _row(layer: LayerReport) -> list[Any]:
    counts = [len(head) for head in layer.groups]
    groups = "-" if not counts else f"{min(counts)}-{max(counts)}"
    if counts and min(counts) == max(counts):
        groups = str(counts[0])
    relative = layer.validation_relative
    return [
        str(layer.layer),
        groups,
        f"{sum(relative) / len(relative):.4f}",
        f"{max(relative):.4f}",
        f"{layer.trainable:,}",
        f"{layer.seconds:.1f}",
    ]
