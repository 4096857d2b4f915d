"""What a report shows: the files a converted folder holds, read back and checked."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from linearize.adapt import AdaptationReport, read_adaptation
from linearize.checkpoint import REPORT
from linearize.convert import ConversionReport, LayerReport
from linearize.errors import CheckpointError
from linearize.selection import Candidate, Selection

__all__ = ["EVALUATION", "SAMPLES", "Memory", "ReportData", "read", "read_evaluation"]

EVALUATION = "evaluation.json"
SAMPLES = "samples.json"


@dataclass(frozen=True)
class ReportData:
    """Everything one page is made of.

    Attributes:
        conversion: how the conversion went.
        evaluation: what ``linearize eval`` found (its JSON); ``None`` before the first evaluation.
        samples: continuations of a prompt by both models: ``prompt``, ``softmax`` and ``converted``
            (each with ``text``), and the settings of the generation.
        adaptation: how the adaptation went; ``None`` without one.
    """

    conversion: ConversionReport
    evaluation: dict[str, Any] | None = None
    samples: list[dict[str, Any]] = field(default_factory=list)
    adaptation: AdaptationReport | None = None


@dataclass(frozen=True)
class Memory:
    """Decoding memory of one sequence in bytes, fp32.

    Attributes:
        original: what one token adds before conversion, all layers.
        retained: what one token adds after it: the layers that keep softmax.
        state: what the converted layers hold at any length.
    """

    original: int
    retained: int
    state: int

    @staticmethod
    def of(report: ConversionReport) -> Memory:
        """From the numbers of a conversion; a layer without a state of its own keeps every key."""
        per_token, layers = report.cache_bytes_per_token, report.model_layers
        states = [layer for layer in report.layers if layer.state_bytes]
        saved = sum(per_token * (report.kv_heads - len(x.kept)) // report.kv_heads for x in states)
        original = per_token * layers
        return Memory(original, original - saved, sum(layer.state_bytes for layer in states))

    def before(self, tokens: int) -> int:
        """Bytes after ``tokens`` tokens with softmax everywhere."""
        return self.original * tokens

    def after(self, tokens: int) -> int:
        """Bytes after ``tokens`` tokens with the converted layers."""
        return self.state + self.retained * tokens

    @property
    def crossover(self) -> int | None:
        """The first length at which the converted model needs less; ``None`` if it never does."""
        saved = self.original - self.retained
        return math.floor(self.state / saved) + 1 if saved > 0 else None


def read(folder: str | Path) -> ReportData:
    """What a converted folder holds. Only the conversion itself has to be there.

    Raises:
        CheckpointError: the folder has no account of a conversion, or a file is damaged.
    """
    folder = Path(folder)
    if not (folder / REPORT).is_file():
        raise CheckpointError(
            f"a report on {folder}",
            f"no {REPORT} in it" if folder.is_dir() else "no such folder",
            "Give a folder written by linearize convert, or by save(..., report=...).",
        )
    content = _read_json(folder / REPORT, dict)
    try:
        content["layers"] = [LayerReport(**layer) for layer in content["layers"]]
        if content.get("selection"):
            chosen = content["selection"]
            chosen["candidates"] = [Candidate(**one) for one in chosen["candidates"]]
            content["selection"] = Selection(**chosen)
        conversion = ConversionReport(**content)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"{folder / REPORT}",
            f"an account that cannot be read ({error})",
            "Convert again, or use the version of linearize that wrote it.",
        ) from error
    samples = folder / SAMPLES
    return ReportData(
        conversion,
        read_evaluation(folder),
        _read_json(samples, list) if samples.is_file() else [],
        read_adaptation(folder),
    )


def read_evaluation(folder: str | Path) -> dict[str, Any] | None:
    """What ``linearize eval`` stored in a folder; ``None`` before the first evaluation.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = Path(folder) / EVALUATION
    found: dict[str, Any] | None = _read_json(path, dict) if path.is_file() else None
    return found


def _read_json(path: Path, kind: type) -> Any:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}", f"{error}", "The file is damaged; write it again."
        ) from None
    if not isinstance(content, kind):
        raise CheckpointError(
            f"{path}", f"JSON that is no {kind.__name__}", "The file is damaged; write it again."
        )
    return content
