"""A tiny model on disk, a text, the same converted, and the command to run on them."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import tiny
from linearize.cli import app
from linearize.text import default_text

Run = Callable[..., Result]

SMALL = (
    *("--block", "64", "--skip-blocks", "2", "--fit-blocks", "3", "--validation-blocks", "2"),
    *("--prompts", "4", "--positions", "32"),
)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of three layers with its tokenizer (one token a character)."""
    folder = tmp_path_factory.mktemp("base")
    tiny.model("llama").save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 characters of English."""
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(default_text()[:1000], encoding="utf-8")
    return file


@pytest.fixture
def run() -> Run:
    """Run the command in this process."""
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="session")
def _converted(
    base: Path, text: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("converted") / "model"
    arguments = ["convert", base, "--out", folder, "--layers", "1-2", "--text", text, *SMALL]
    options = ["--sinks", "2", "--window", "4", "--json", folder.parent / "convert.json"]
    result = CliRunner().invoke(app, [str(a) for a in (*arguments, *options)])
    assert result.exit_code == 0, result.output
    return folder, result


@pytest.fixture
def conversion(_converted: tuple[Path, Result]) -> tuple[Path, Result]:
    """The converted folder, to be left as it is, and what the command said."""
    return _converted


@pytest.fixture
def converted(_converted: tuple[Path, Result], tmp_path: Path) -> Path:
    """A copy of the converted folder of one's own."""
    return Path(shutil.copytree(_converted[0], tmp_path / "converted"))
