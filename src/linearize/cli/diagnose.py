"""`linearize diagnose`: where the error of linear attention comes from, on any model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from typer import Option

from linearize import diagnose as measure
from linearize.cli.common import (
    DEFAULTS,
    AlphaOption,
    BlockOption,
    CenterOption,
    EvaluationBlocksOption,
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
    parts_folder,
    progress,
    results,
    say,
    store_json,
    table,
)
from linearize.diagnose import tables
from linearize.diagnose.retained_error import CONTROLS, KERNELS, POSITIONS
from linearize.errors import PlanError
from linearize.kernels import get
from linearize.models import Loaded, attention_layers
from linearize.output import write_json, write_text
from linearize.parts import Parts, model_identity, text_identity
from linearize.plan import Plan
from linearize.report import diagnose_figures as figures
from linearize.text import Source, tokenize

__all__ = ["diagnose"]


@dataclass(frozen=True)
class Settings:
    """What the diagnostics are asked for, apart from the plan."""

    head: int
    kernels: list[str]
    positions: int
    controls: int
    fitted: bool
    sinks: int
    window: int
    center: bool
    parts: Path | None


Run = Callable[[Loaded, Source | None, Plan, Settings, Callable[[int, int, str], None]], Any]


@dataclass(frozen=True)
class Diagnostic:
    """One diagnostic: how it is run, drawn and told, and what its ``result`` is.

    ``everywhere``: it looks at all layers unless some are named.
    """

    title: str
    run: Run
    draw: Callable[[Any], dict[str, str]]
    tell: Callable[[Any], tables.Shown]
    result: type[Any]
    everywhere: bool = False


def diagnose(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="profiles, groups, budget, state, concentration, stability, activations, "
            "retained-error or all.",
            show_default=False,
        ),
    ],
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="An unconverted model: Hugging Face id, folder, .gguf file, or smollm2-135m.",
            show_default=False,
        ),
    ],
    text: TextOption = None,
    layers: Annotated[
        str | None,
        Option(
            "--layers",
            help='Zero-based layers: "4,12,20", "3-26" or "all". By default those at 1/6, 1/2 and '
            "5/6 of the depth; concentration looks at all, activations always.",
        ),
    ] = None,
    head: Annotated[
        int, Option("--head", min=0, help="Query head of what shows a single head.")
    ] = 0,
    kernels: Annotated[
        str, Option("--kernels", metavar="A,B", help="Kernels whose retained error is measured.")
    ] = ",".join(KERNELS),
    controls: Annotated[
        int, Option("--controls", min=0, help="Replicates of the randomization test; 0: none.")
    ] = CONTROLS,
    positions: Annotated[
        int, Option("--positions", min=1, help="Query positions per sequence in retained-error.")
    ] = POSITIONS,
    fitted: Annotated[
        bool, Option("--fitted", help="Fit the kernels before retained-error; the paper does not.")
    ] = False,
    window: WindowOption = DEFAULTS.window,
    sinks: SinksOption = DEFAULTS.sinks,
    center: CenterOption = DEFAULTS.center,
    alpha: AlphaOption = DEFAULTS.alpha,
    gamma: GammaOption = DEFAULTS.gamma,
    tau: TauOption = DEFAULTS.tau,
    prompts: Annotated[int, Option("--prompts", help="Calibration prompts.")] = DEFAULTS.prompts,
    block: BlockOption = DEFAULTS.block,
    evaluation_blocks: EvaluationBlocksOption = DEFAULTS.skip_blocks,
    fit_blocks: FitBlocksOption = DEFAULTS.fit_blocks,
    validation_blocks: ValidationBlocksOption = DEFAULTS.validation_blocks,
    out: Annotated[
        Path | None,
        Option("--out", metavar="DIR", help="Folder of figures, results and an index of them."),
    ] = None,
    resume: Annotated[
        bool, Option("--resume", help="Go on where an interrupted retained-error stopped.")
    ] = False,
    overwrite: OverwriteOption = False,
    seed: SeedOption = DEFAULTS.seed,
    json: JsonOption = None,
) -> None:
    """Show where the error of linear attention comes from.

    \b
    profiles        contribution of every dimension of a head, with its queries and keys
    groups          how the dimensions of a head fall into groups, and why
    budget          error of a head against its number of groups, in the first of the layers
    state           error of a layer against the size of its state (see --sinks, --window, --center)
    concentration   what the five largest dimensions carry, against Gaussian vectors
    stability       whether a profile depends on the input or its length
    activations     largest activations of the residual stream, layer by layer
    retained-error  share of a kernel's error that the largest dimensions make, with two controls
    all             everything

    retained-error at its full size takes an hour on two cores. Its finished parts, and with "all"
    every finished diagnostic, are kept in DIR/parts (with --json FILE alone: beside it, in
    FILE.parts) and taken up again by --resume.

    Examples:

    \b
      linearize diagnose profiles smollm2-135m --layers 5,15,25 --head 3 --out out/profiles
      linearize diagnose retained-error smollm2-135m --text train.txt --json out/retained.json
      linearize diagnose all smollm2-135m --text train.txt --layers 5,15,25 --out out/diagnose
    """
    chosen = _choose(what)
    names = [name.strip() for name in kernels.split(",")]
    for name in names:
        get(name)
    needed = "retained-error" in chosen
    kept = parts_folder(out, json if needed or resume else None, resume, overwrite)
    settings = Settings(
        head,
        names,
        positions,
        controls,
        fitted,
        sinks,
        window,
        center,
        kept if needed else None,
    )
    plan = Plan(
        layers=layers or "all",
        alpha=alpha,
        gamma=gamma,
        tau=tau,
        prompts=prompts,
        block=block,
        skip_blocks=evaluation_blocks,
        fit_blocks=fit_blocks,
        validation_blocks=validation_blocks,
        seed=seed,
    )
    source = check_texts(text)
    if source is None:
        note("no --text: using the documentation that comes with Python")

    loaded = load_model(model)
    if settings.parts is not None and not resume:
        shutil.rmtree(settings.parts, ignore_errors=True)
    tokens = tokenize(source, loaded.tokenizer)
    few = plan if layers else plan.model_copy(update={"layers": _three(loaded)})
    inputs = {"model": model_identity(loaded.model), "text": text_identity(tokens)}
    found: dict[str, Any] = {}
    for name, diagnostic in chosen.items():
        own = plan if diagnostic.everywhere else few
        # retained-error keeps its own, smaller parts
        shelf = None if name == "retained-error" else settings.parts
        parts = Parts(shelf, _identity(own, settings) | inputs)
        result = parts.read(name, diagnostic.result, "result of")
        if result is None:
            with progress(name) as advance:
                result = diagnostic.run(loaded, tokens, own, settings, advance)
            parts.put(name, asdict(result))
        found[name] = result
        _show(diagnostic, found[name])
        if out is not None:
            _store(out, name, diagnostic, found[name])
    if out is not None:
        write_text(out / "index.md", _index(model, found))
        note(f"wrote {out}/index.md")
    as_json = {name: asdict(result) for name, result in found.items()}
    store_json(json, as_json if what == "all" else as_json[what])


def _identity(plan: Plan, settings: Settings) -> dict[str, Any]:
    """What decides a diagnostic besides its name, the model and the text."""
    return plan.model_dump(mode="json") | {
        "head": settings.head,
        "beside": [settings.sinks, settings.window, settings.center],
    }


def _choose(what: str) -> dict[str, Diagnostic]:
    if what == "all":
        return DIAGNOSTICS
    if what not in DIAGNOSTICS:
        raise PlanError(
            f"diagnostic {what!r}",
            f"{', '.join(DIAGNOSTICS)}, all",
            "Choose one; it comes before the model.",
        )
    return {what: DIAGNOSTICS[what]}


def _three(loaded: Loaded) -> tuple[int, ...]:
    """Layers at 1/6, 1/2 and 5/6 of the depth: 4, 12 and 20 of the paper's 24."""
    count = len(attention_layers(loaded.model))
    return tuple(sorted({count // 6, count // 2, 5 * count // 6}))


def _show(diagnostic: Diagnostic, result: Any) -> None:
    shown, sentence = diagnostic.tell(result)
    for each in shown:
        results.print(_rich(each))
    say(sentence)


def _store(out: Path, name: str, diagnostic: Diagnostic, result: Any) -> None:
    for file, svg in diagnostic.draw(result).items():
        write_text(out / f"{file}.svg", svg)
    write_json(out / f"{name}.json", asdict(result))


def _index(model: str, found: dict[str, Any]) -> str:
    """All figures and tables on one Markdown page."""
    lines = [f"# Diagnostics of {model}", ""]
    for name, result in found.items():
        diagnostic = DIAGNOSTICS[name]
        shown, sentence = diagnostic.tell(result)
        lines += [f"## {diagnostic.title}", "", sentence, ""]
        for file in diagnostic.draw(result):
            lines += [f"![{file}]({file}.svg)", ""]
        for each in shown:
            marks = [":--" if at < each.left else "--:" for at in range(len(each.columns))]
            for row in (each.columns, marks, *each.rows):
                lines.append(f"| {' | '.join(row)} |")
            lines.append("")
        lines += [f"Numbers: [{name}.json]({name}.json)", ""]
    return "\n".join(lines)


def _rich(rows: tables.Rows) -> Table:
    made = table(*rows.columns, left=rows.left)
    for row in rows.rows:
        made.add_row(*row)
    return made


def _of_head(function: Callable[..., Any]) -> Run:
    return lambda loaded, text, plan, settings, advance: function(
        loaded, text, plan, head=settings.head, progress=advance
    )


def _of_layers(function: Callable[..., Any]) -> Run:
    return lambda loaded, text, plan, settings, advance: function(
        loaded, text, plan, progress=advance
    )


def _state(
    loaded: Loaded, text: Source | None, plan: Plan, settings: Settings, advance: Any
) -> measure.StateCurve:
    beside = {"sinks": settings.sinks, "window": settings.window, "center": settings.center}
    plan = plan.model_copy(update=beside)
    return measure.state_curve(loaded, text, plan, progress=advance)


def _retained(
    loaded: Loaded, text: Source | None, plan: Plan, settings: Settings, advance: Any
) -> measure.RetainedError:
    return measure.retained_error(
        loaded,
        text,
        plan,
        kernels=settings.kernels,
        positions=settings.positions,
        controls=settings.controls,
        fitted=settings.fitted,
        progress=advance,
        store=settings.parts,
    )


DIAGNOSTICS = {
    "profiles": Diagnostic(
        "Contribution profiles",
        _of_head(measure.profiles),
        figures.profile_figures,
        tables.profile_tables,
        measure.Profiles,
    ),
    "groups": Diagnostic(
        "Groups",
        _of_head(measure.groups),
        figures.group_figures,
        tables.group_tables,
        measure.Groups,
    ),
    "budget": Diagnostic(
        "Group budget",
        _of_head(measure.group_budget),
        figures.budget_figures,
        tables.budget_tables,
        measure.GroupBudget,
    ),
    "state": Diagnostic(
        "Size of the state",
        _state,
        figures.state_figures,
        tables.state_tables,
        measure.StateCurve,
    ),
    "concentration": Diagnostic(
        "Concentration",
        _of_layers(measure.concentration),
        figures.concentration_figures,
        tables.concentration_tables,
        measure.Concentration,
        everywhere=True,
    ),
    "stability": Diagnostic(
        "Stability",
        _of_head(measure.stability),
        figures.stability_figures,
        tables.stability_tables,
        measure.Stability,
    ),
    "activations": Diagnostic(
        "Residual activations",
        _of_layers(measure.activation_profile),
        figures.activation_figures,
        tables.activation_tables,
        measure.ActivationProfile,
        everywhere=True,
    ),
    "retained-error": Diagnostic(
        "Retained error",
        _retained,
        figures.retained_figures,
        tables.retained_tables,
        measure.RetainedError,
    ),
}
