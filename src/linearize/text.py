"""Texts become token blocks: reading, tokenizing without special tokens, dividing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from linearize.errors import TextError
from linearize.plan import Plan

__all__ = ["Division", "Source", "default_text", "divide", "evenly", "split_blocks", "tokenize"]

SUFFIXES = (".txt", ".raw", ".jsonl", ".json", ".md", ".text")
Source = str | Path | Sequence[str] | Sequence[Path] | Tensor


@dataclass(frozen=True)
class Division:
    """What a conversion takes from a text: prompts for grouping, blocks for fitting and validation.

    ``fit_at`` and ``validation_at`` are the block numbers in the text.
    """

    prompts: list[Tensor]
    fit: list[Tensor]
    validation: list[Tensor]
    fit_at: list[int]
    validation_at: list[int]


def default_text() -> str:
    """465 KB of English that every Python brings: the standard library's own documentation."""
    from pydoc_data import topics

    return "\n\n".join(text for _, text in sorted(topics.topics.items()))


def tokenize(source: Source | None, tokenizer: PreTrainedTokenizerBase | None) -> Tensor:
    """Token ids ``[n]`` of a text, without BOS, EOS or any other added token.

    Args:
        source: text, paths (``.jsonl`` files give the ``text`` field of every line), several of
            these (joined by two newlines), or token ids; None for ``default_text()``.
        tokenizer: needed unless ``source`` holds token ids.

    Raises:
        TextError: a file is missing or malformed, or a tokenizer is needed.
    """
    if isinstance(source, Tensor):
        if source.is_floating_point() or source.dim() > 2:
            raise TextError(
                "token ids",
                f"a {source.dtype} tensor {tuple(source.shape)}",
                "Pass a LongTensor [n].",
            )
        return source.flatten().long()
    source = default_text() if source is None else source
    parts: list[str | Path] = [source] if isinstance(source, str | Path) else list(source)
    text = "\n\n".join(read(part) for part in parts)
    if tokenizer is None:
        raise TextError(
            "tokenizing a text", "a model without tokenizer", "Pass token ids as a LongTensor."
        )
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.long)


def read(part: str | Path) -> str:
    """A text: the string itself, or the content of a path (also of a string that names a file or
    looks like the name of one).

    Raises:
        TextError: the file is missing, not text, or a JSONL line lacks ``text``.
    """
    if isinstance(part, str) and not _names_a_file(part):
        return part
    path = Path(part)
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise TextError(f"text file {path}", f"{error.strerror}", "Check the path.") from None
    except UnicodeDecodeError as error:
        raise TextError(f"text file {path}", f"{error}", "Give UTF-8 text.") from None
    return _jsonl(path, content) if path.suffix == ".jsonl" else content


def split_blocks(tokens: Tensor, length: int, need: int = 1) -> list[Tensor]:
    """Non-overlapping blocks ``[length]``; the incomplete last one is dropped.

    Raises:
        TextError: fewer than ``need`` blocks, with the number of tokens missing.
    """
    count = len(tokens) // length
    if count < need:
        raise TextError(
            f"{need} blocks of {length} tokens",
            f"{len(tokens)} tokens, {need * length - len(tokens)} too few",
            "Give a longer text or a smaller block.",
        )
    return list(tokens[: count * length].view(count, length))


def divide(tokens: Tensor, plan: Plan) -> Division:
    """Divide a text as the plan says (OAL paper, appendix C: skip 16, fit 8, validate 2).

    A text too short for the skipped blocks skips as many as it can, and one too short for all
    fitting blocks fits on fewer: at least one block to fit and one to validate are needed. Prompts
    are taken evenly from the text after the validation blocks if it is long enough, else from the
    fitting blocks.

    Raises:
        TextError: the text has fewer than two blocks.
    """
    blocks = split_blocks(tokens, plan.block, need=2)
    validation = min(plan.validation_blocks, max(1, len(blocks) // 5))
    fit = min(plan.fit_blocks, len(blocks) - validation)
    start = min(plan.skip_blocks, len(blocks) - fit - validation)
    middle, stop = start + fit, start + fit + validation
    rest = tokens[stop * plan.block :]
    if len(rest) < plan.prompts * plan.prompt_length:
        rest = tokens[start * plan.block : middle * plan.block]
    return Division(
        evenly(rest, plan.prompts, plan.prompt_length),
        blocks[start:middle],
        blocks[middle:stop],
        list(range(start, middle)),
        list(range(middle, stop)),
    )


def evenly(tokens: Tensor, count: int, length: int) -> list[Tensor]:
    """``count`` pieces of ``length`` tokens (or of all, if fewer), evenly over a text."""
    length = min(length, len(tokens))
    last = len(tokens) - length
    starts = [round(at * last / max(1, count - 1)) for at in range(count)]
    return [tokens[start : start + length] for start in starts]


def _names_a_file(text: str) -> bool:
    """Whether a string is a path: of an existing file, or one word that ends like a file name."""
    if "\n" in text or len(text.encode()) > 255:
        return False
    word = not any(letter.isspace() for letter in text)
    return Path(text).is_file() or (word and Path(text).suffix.lower() in SUFFIXES)


def _jsonl(path: Path, content: str) -> str:
    texts = []
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise TextError(
                f"{path} line {number}", f"{error.msg}", "Write one JSON a line."
            ) from None
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise TextError(
                f"{path} line {number}", "no text under the key 'text'", 'Write {"text": "…"}.'
            )
        texts.append(record["text"])
    return "\n\n".join(texts)
