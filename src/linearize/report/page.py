"""One self-contained HTML page from the account of a conversion: no script or style from elsewhere."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from linearize import kernels
from linearize.convert import ConversionReport, LayerReport
from linearize.errors import PlanError
from linearize.output import write_text
from linearize.report import figures
from linearize.report.adaptation_figure import adaptation_chart
from linearize.report.data import Memory, ReportData, read
from linearize.report.drawing import GROUP_COLOURS, byte_text

__all__ = ["PAGE", "render", "write"]

PAGE = "report.html"
LENGTHS = (1024, 8192, 32768, 131072)  # of the memory table


def write(folder: str | Path, out: str | Path | None = None) -> Path:
    """Make the page of a converted folder from what is stored there; nothing is computed again.

    Args:
        folder: a folder with a conversion. out: where to write; ``report.html`` in it by default.

    Returns:
        the path of the page.

    Raises:
        CheckpointError: see :func:`linearize.report.read`. OutputError: the page cannot be written.
    """
    path = Path(folder) / PAGE if out is None else Path(out)
    write_text(path, render(read(folder)))
    return path


def render(data: ReportData) -> str:
    """The page as text. What is missing in ``data`` is said to be missing."""
    environment = Environment(
        loader=PackageLoader("linearize.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bytes": byte_text, "number": _number, "ranges": _ranges}
    return environment.get_template("page.html.j2").render(_context(data))


def _context(data: ReportData) -> dict[str, Any]:
    report = data.conversion
    memory = Memory.of(report)
    profiles = figures.profiles(report)
    fitting = figures.fitting_chart(report)
    return {
        "report": report,
        "plan": report.plan,
        "title": _title(report.plan["kernel"]),
        "base": report.base or "a model built in memory",
        "layers": [layer.layer for layer in report.layers],
        "retained": report.model_layers - len(report.layers),
        "evaluation": data.evaluation if "perplexity" in (data.evaluation or {}) else None,
        "accuracies": _accuracies(data.evaluation or {}),
        "evaluation_settings": _evaluation_settings(data.evaluation),
        "samples": data.samples,
        "adaptation": data.adaptation,
        "adaptation_chart": data.adaptation and Markup(adaptation_chart(data.adaptation)),
        "memory": memory,
        "memory_rows": [(n, memory.before(n), memory.after(n)) for n in LENGTHS],
        "memory_chart": Markup(figures.memory_chart(memory)),
        "error_chart": Markup(figures.error_chart(report)),
        "fitting_chart": None if fitting is None else Markup(fitting),
        "mean_error": _mean([e for layer in report.layers for e in layer.validation_relative]),
        "rows": [_row(layer) for layer in report.layers],
        "kept_heads": [(layer.layer, layer.kept) for layer in report.layers if layer.kept],
        "selection": report.selection,
        "ranks": sorted({layer.rank for layer in report.layers if layer.rank is not None}),
        "trainable": sum(layer.trainable for layer in report.layers),
        "heads": max(len(layer.validation_relative) for layer in report.layers),
        "groups": _group_table(report),
        "profile": profiles and Markup(profiles.svg),
        "profile_start": profiles and [profiles.layer, profiles.head],
        "profile_heads": profiles and _heads(report, profiles.paths),
        "colours": GROUP_COLOURS,
    }


def _row(layer: LayerReport) -> dict[str, Any]:
    """One line of the table of layers."""
    counts = [len(groups) for groups in layer.groups]
    relative = layer.validation_relative
    return {
        "layer": layer.layer,
        "groups": (min(counts), max(counts)) if counts else None,
        "mean": _mean(relative),
        "best": min(relative),
        "worst": max(relative),
        "worst_head": relative.index(max(relative)),
        "fit": _mean(layer.fit_mse) if layer.fit_mse else None,
        "validation": _mean(layer.validation_mse),
        "trainable": layer.trainable,
        "state_bytes": layer.state_bytes,
        "seconds": layer.seconds,
    }


def _group_table(report: ConversionReport) -> list[dict[str, Any]] | None:
    """Per layer and head: number of groups, their sizes, and how dark the cell is (0 to 1)."""
    if not any(layer.groups for layer in report.layers):
        return None
    counts = [len(head) for layer in report.layers for head in layer.groups]
    low, high = min(counts), max(counts)
    return [
        {
            "layer": layer.layer,
            "at": at,
            "heads": [
                {
                    "count": len(head),
                    "sizes": [len(members) for members in head],
                    "level": (len(head) - low) / (high - low) if high > low else 0.5,
                }
                for head in layer.groups
            ],
        }
        for at, layer in enumerate(report.layers)
    ]


def _heads(report: ConversionReport, paths: list[list[list[str]]]) -> list[dict[str, Any]]:
    """What the page's script needs to show another head."""
    return [
        {
            "layer": layer.layer,
            "heads": [
                {
                    "number": layer.heads[at] if layer.heads else at,
                    "paths": head,
                    "groups": layer.groups[at] if layer.groups else [],
                }
                for at, head in enumerate(heads)
            ],
        }
        for layer, heads in zip(report.layers, paths, strict=True)
    ]


def _accuracies(evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a task: accuracies with standard errors of softmax, the converted model, its parts."""
    rows = []
    for task in evaluation.get("tasks", {}).values():
        measured = {"softmax, the original model": task["softmax"], "converted": task["model"]}
        rows.append(
            task
            | {"measured": {k: v for k, v in (measured | task["parts"]).items() if v is not None}}
        )
    return rows


def _evaluation_settings(evaluation: dict[str, Any] | None) -> dict[str, Any]:
    wanted = ("text", "block", "blocks", "targets", "batch", "seconds")
    found = {key: evaluation[key] for key in wanted if key in evaluation} if evaluation else {}
    if isinstance(found.get("text"), list):
        found["text"] = ", ".join(map(str, found["text"]))
    return found


def _title(kernel: str) -> str:
    try:
        return kernels.get(kernel).title
    except PlanError:  # a kernel of the user's own that is not installed where the page is made
        return kernel


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _number(value: Any) -> str:
    """Four significant digits, thousands separated; other things as they are."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _ranges(numbers: list[int]) -> str:
    """``[3, 4, 5, 9]`` -> ``"3–5, 9"``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{p[0]}–{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts)
