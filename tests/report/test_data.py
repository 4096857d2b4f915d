"""Reading a folder back, and the memory that follows from the numbers of a conversion."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linearize.checkpoint import REPORT
from linearize.errors import CheckpointError
from linearize.report import EVALUATION, SAMPLES, Memory, read
from report.synthetic import conversion


def test_what_was_written_comes_back(tmp_path: Path) -> None:
    (tmp_path / REPORT).write_text(json.dumps(conversion().as_dict()))
    (tmp_path / EVALUATION).write_text('{"perplexity": 9.5}')
    (tmp_path / SAMPLES).write_text('[{"prompt": "x"}]')
    data = read(tmp_path)
    assert data.conversion == conversion()
    assert data.evaluation == {"perplexity": 9.5}
    assert data.samples == [{"prompt": "x"}]


def test_only_the_conversion_has_to_be_there(tmp_path: Path) -> None:
    (tmp_path / REPORT).write_text(json.dumps(conversion().as_dict()))
    data = read(tmp_path)
    assert data.evaluation is None and data.samples == []


@pytest.mark.parametrize("content", ["{}", '{"layers": [{}]}', "[]", "nonsense", '{"layers": 3}'])
def test_another_account_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / REPORT).write_text(content)
    with pytest.raises(CheckpointError, match=REPORT):
        read(tmp_path)


def test_memory_of_two_converted_layers_out_of_four() -> None:
    memory = Memory.of(conversion())  # 96 bytes a token and layer, states of 1,000 bytes
    assert (memory.original, memory.retained, memory.state) == (4 * 96, 2 * 96, 2000)
    assert memory.before(100) == 38_400 and memory.after(100) == 2000 + 19_200
    assert memory.crossover == 11  # 2000 / 192 = 10.4


def test_a_kernel_that_keeps_every_key_saves_nothing() -> None:
    report = conversion()
    layers = [dataclasses.replace(layer, state_bytes=0) for layer in report.layers]
    memory = Memory.of(dataclasses.replace(report, layers=layers))
    assert memory.crossover is None and memory.after(1000) == memory.before(1000)


@given(retained=st.integers(0, 10**6), saved=st.integers(1, 10**6), state=st.integers(0, 10**9))
def test_the_crossover_is_the_first_length_with_less(retained: int, saved: int, state: int) -> None:
    memory = Memory(retained + saved, retained, state)
    first = memory.crossover
    assert first is not None
    assert memory.after(first) < memory.before(first)
    assert memory.after(first - 1) >= memory.before(first - 1)
