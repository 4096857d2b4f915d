"""Frozen-attention fidelity: the measures are those of SPEC section 5, and no work is lost."""

import importlib
import json
import pkgutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import linearize
import tiny
from linearize import kernels
from linearize.attention import LinearAttention
from linearize.capture import capture
from linearize.cli import app
from linearize.errors import CheckpointError, ModelError, PlanError, TextError
from linearize.evaluate import Fidelity, fidelity
from linearize.evaluate.fidelity import output_projection
from linearize.evaluate.fidelity_result import Run, pool
from linearize.fitting import match_outputs
from linearize.models import attention_layers
from linearize.report.fidelity_figure import fidelity_chart
from linearize.text import default_text

LAYERS = [0, 2]
HELD_OUT = 3


def plan(**changes: Any) -> linearize.Plan:
    return tiny.plan(**{"skip_blocks": HELD_OUT, "fit_blocks": 2} | changes)


def measure(names: list[str], base: linearize.Loaded | None = None, **options: Any) -> Fidelity:
    settings = options.pop("plan", plan())
    return fidelity(base or tiny.loaded(), tiny.text(), LAYERS, names, settings, **options)


def without_time(result: Fidelity) -> str:
    """Everything a result holds but times, as text (exact to the last bit)."""
    value = result.as_dict()
    del value["seconds"]
    for one in (*value["kernels"], *value["runs"]):
        del one["fit_seconds"], one["evaluation_seconds"]
    return json.dumps(value)


def softmax(q: Tensor, k: Tensor, v: Tensor, weights: Callable[[Tensor], Tensor]) -> Tensor:
    """Causal normalised attention ``[H, N, dv]`` in fp64, with any weight of the logits."""
    ratio = q.shape[0] // k.shape[0]
    k, v = k.double().repeat_interleave(ratio, 0), v.double().repeat_interleave(ratio, 0)
    kappa = weights(q.double() @ k.transpose(1, 2) * q.shape[-1] ** -0.5).tril()
    return kappa @ v / kappa.sum(-1, keepdim=True)


def test_every_measure_by_hand() -> None:
    base = tiny.loaded()
    result = measure(["based"], base)
    blocks = [tiny.text()[64 * b : 64 * (b + 1)] for b in range(HELD_OUT)]
    exact, approximate, projected, differences = [], [], [], []
    for arrived in capture(base.model, blocks, LAYERS):
        data = arrived.activations(0, HELD_OUT)
        weight = base.model.model.layers[arrived.index].self_attn.o_proj.weight.detach().double()
        for b in range(HELD_OUT):
            y = softmax(data.q[b], data.k[b], data.v[b], torch.exp)
            ours = softmax(data.q[b], data.k[b], data.v[b], lambda s: 1 + s + s**2 / 2)
            exact.append(y)
            approximate.append(ours)
            projected.append(torch.cat(list(y), -1) @ weight.T)
            differences.append(torch.cat(list(ours - y), -1) @ weight.T)
    shape = (len(LAYERS), HELD_OUT)
    y, ours, after, wrong = (
        torch.stack(x).unflatten(0, shape) for x in (exact, approximate, projected, differences)
    )  # [L, b, H, N, dv] and [L, b, N, hidden]

    def four(layers: slice) -> list[float]:
        values = []
        for difference, reference in ((ours - y, y), (wrong, after)):
            by_sequence = difference[layers].transpose(0, 1).flatten(1).square()
            energy = reference[layers].transpose(0, 1).flatten(1).square().sum(1)
            values += [by_sequence.mean(1).mean(), (by_sequence.sum(1) / energy).mean()]
        return [float(value) for value in values]

    (kernel,) = result.kernels
    got = [kernel.errors, *(layer.errors for layer in kernel.layers)]
    for errors, layers in zip(got, (slice(None), slice(0, 1), slice(1, 2)), strict=True):
        assert [
            *(errors.mse, errors.relative, errors.mse_after, errors.relative_after)
        ] == pytest.approx(four(layers), rel=1e-4)
    heads = ((ours - y).square().sum((3, 4)) / y.square().sum((3, 4))).mean(1)
    for at, layer in enumerate(kernel.layers):
        assert layer.heads == pytest.approx(heads[at].tolist(), rel=1e-4)


def test_pooling_sums_squares_before_the_ratio() -> None:
    def run(layer: int, error: list[float], energy: list[float]) -> Run:
        sides = [[e] for e in error], [[e] for e in energy], error, energy
        return Run("oal", 0, layer, 1, 1, 4, 0, 0.0, 0.0, *sides, 10, 20)

    pooled = pool([run(0, [1.0, 3.0], [2.0, 3.0]), run(1, [6.0, 1.0], [8.0, 5.0])])
    assert pooled.relative == pytest.approx((7 / 10 + 4 / 8) / 2)
    assert pooled.mse == pytest.approx((7 + 4) / 2 / 20)
    assert pooled.mse_after == pytest.approx((7 + 4) / 2 / 40)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox"])
def test_after_the_projection_stands_the_output_of_the_module(name: str) -> None:
    base = tiny.loaded(name)
    result = measure(["based"], base)
    layers = {layer.index: layer.module for layer in attention_layers(base.model)}
    for run in result.runs:
        seen: list[Tensor] = []
        handle = layers[run.layer].register_forward_hook(
            lambda module, inputs, output, seen=seen: seen.append(output[0])
        )
        for b in range(HELD_OUT):
            tiny.logits(base.model, tiny.text()[None, 64 * b : 64 * (b + 1)])
        handle.remove()
        energy = [float(output.double().square().sum()) for output in seen]
        assert run.energy_after == pytest.approx(energy, rel=1e-4)
        assert run.count_after == seen[0].numel()


def test_softmax_has_no_error_and_no_state_of_constant_size() -> None:
    (kernel,) = measure(["softmax"]).kernels
    assert kernel.errors.relative < 1e-9 and kernel.errors.relative_after < 1e-9
    assert kernel.exact and kernel.state_bytes == 0 and kernel.state_numbers == 0


def test_state_and_trained_numbers_stand_beside_the_error(
    short_training: list[dict[str, Any]],
) -> None:
    result = measure(["based", "global"], plan=plan(window=4, sinks=2))
    based, learned = result.kernels
    sums = tiny.KV_HEADS * (1 + 8 + 36) * 9
    assert based.features == 45
    assert based.state_numbers == learned.state_numbers == sums + 6 * tiny.KV_HEADS * 16
    assert based.state_bytes == 4 * based.state_numbers
    assert (based.trainable, learned.trainable) == (0, 3 * tiny.HEADS)


def test_the_model_is_left_as_it_was() -> None:
    base = tiny.loaded()
    before = tiny.logits(base.model, tiny.prompt(1, 32))
    measure(["global"], base)
    assert torch.equal(tiny.logits(base.model, tiny.prompt(1, 32)), before)


def test_held_out_text_is_never_fitted_on() -> None:
    changed = tiny.text()
    changed[: 64 * HELD_OUT] = tiny.text(64 * HELD_OUT, seed=9)
    one = measure(["global"])
    other = fidelity(tiny.loaded(), changed, LAYERS, ["global"], plan())
    assert (one.evaluation_blocks, one.fit_blocks) == ([0, 1, 2], [3, 4])
    assert one.validation_blocks == [5, 6]
    fitted = []
    for text in (tiny.text(), changed):
        settings = plan(kernel="global", layers=LAYERS)
        fitted.append(
            tiny.kernel_tensors(linearize.convert(tiny.loaded(), text, settings).loaded.model)
        )
    assert all(torch.equal(fitted[0][key], fitted[1][key]) for key in fitted[0])
    assert one.kernels[0].errors != other.kernels[0].errors


def test_the_fit_is_that_of_a_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = []
    original = LinearAttention.fit

    def fit(self: LinearAttention, calibration: Any) -> Any:
        result = original(self, calibration)
        fitted.append(self)
        return result

    monkeypatch.setattr(LinearAttention, "fit", fit)
    settings = plan(window=3, center=True)
    measure(["oal"], plan=settings)
    ours = [{k: v.clone() for k, v in linear.state_dict().items()} for linear in fitted]
    converted = linearize.convert(
        tiny.loaded(), tiny.text(), settings.model_copy(update={"layers": tuple(LAYERS)})
    )
    stored = tiny.kernel_tensors(converted.loaded.model)
    for index, own in zip(LAYERS, ours, strict=True):
        for key, value in own.items():
            assert torch.equal(stored[f"{index}.{key}"], value), key


def test_a_head_dimension_that_is_no_power_of_two(short_training: list[dict[str, Any]]) -> None:
    base = tiny.loaded(head_dim=12)
    result = measure(["spectraformer", "dijiang", "oal"], base)
    assert result.kernels[0].features == 17  # padded to 16
    for kernel in result.kernels:
        assert 0 < kernel.errors.relative < 10 and 0 < kernel.errors.relative_after < 10


def test_kernels_that_draw_are_averaged_over_seeds_with_their_spread() -> None:
    result = measure(["performer", "based"], seeds=[3, 4, 5])
    performer, based = result.kernels
    assert performer.seeds == [3, 4, 5] and based.seeds == [3] and based.spread is None
    singles = [
        measure(["performer"], plan=plan(seed=seed)).kernels[0].errors.relative
        for seed in (3, 4, 5)
    ]
    assert len(set(singles)) == 3
    assert performer.errors.relative == pytest.approx(sum(singles) / 3)
    assert performer.spread is not None
    assert performer.spread.relative == pytest.approx(float(torch.tensor(singles).std()), rel=1e-4)


@pytest.fixture
def short_training(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Gradient fits take two steps; the list gathers what each asked for."""
    calls: list[dict[str, Any]] = []

    def short(kernel: Any, calibration: Any, **settings: Any) -> Any:
        calls.append({"kernel": kernel.name, **settings})
        return match_outputs(kernel, calibration, **settings | {"steps": 2})

    for info in pkgutil.iter_modules(kernels.__path__):
        module = importlib.import_module(f"linearize.kernels.{info.name}")
        if hasattr(module, "match_outputs"):
            monkeypatch.setattr(module, "match_outputs", short)
    return calls


def test_all_kernels_train_by_one_recipe(short_training: list[dict[str, Any]]) -> None:
    settings = plan(solver="adam", block=32)
    result = fidelity(tiny.loaded(), tiny.text(), [1], kernels.available(), settings)
    assert [one.kernel for one in result.kernels] == kernels.available()
    trained = {one.kernel for one in result.kernels if one.trainable}
    assert {call["kernel"] for call in short_training} == trained
    for call in short_training:  # steps, learning rate, positions and selection are never their own
        assert set(call) <= {"kernel", "head_wise", "objective", "start"}, call


class Interrupted(Exception):
    """What stops a run in these tests."""


def stop_after(count: int) -> Callable[[int, int, str], None]:
    def progress(done: int, total: int, message: str) -> None:
        if done == count:
            raise Interrupted

    return progress


def test_an_interrupted_run_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["global", "based", "oal"]
    whole = measure(names)
    with pytest.raises(Interrupted):
        measure(names, store=tmp_path, progress=stop_after(4))
    assert len(list(tmp_path.iterdir())) == 4

    fits = []
    original = LinearAttention.fit

    def fit(self: LinearAttention, calibration: Any) -> Any:
        fits.append(self.kernel.name)
        return original(self, calibration)

    monkeypatch.setattr(LinearAttention, "fit", fit)
    steps: list[tuple[int, int]] = []
    resumed = measure(
        names, store=tmp_path, progress=lambda done, total, _: steps.append((done, total))
    )
    assert fits == ["based", "oal"] and steps == [(4, 6), (5, 6), (6, 6)]
    assert without_time(resumed) == without_time(whole)

    again = measure(names, store=tmp_path)
    assert len(fits) == 2 and without_time(again) == without_time(whole)


@pytest.mark.parametrize(
    ("changes", "found"),
    [({"window": 3}, "window=0"), ({"fit_blocks": 1}, "fit_blocks=2"), ({"tau": 2.0}, "tau=1.5")],
)
def test_other_settings_are_not_mixed_in(
    tmp_path: Path, changes: dict[str, Any], found: str
) -> None:
    measure(["based"], store=tmp_path)
    with pytest.raises(CheckpointError, match=found):
        measure(["based"], store=tmp_path, plan=plan(**changes))


def test_another_text_or_model_is_not_mixed_in(tmp_path: Path) -> None:
    measure(["based"], store=tmp_path)
    with pytest.raises(CheckpointError, match="text="):
        fidelity(tiny.loaded(), tiny.text(seed=5), LAYERS, ["based"], plan(), store=tmp_path)
    with pytest.raises(CheckpointError, match="model="):
        measure(["based"], tiny.loaded(seed=5), store=tmp_path)


def test_more_kernels_and_layers_join_a_store(tmp_path: Path) -> None:
    fidelity(tiny.loaded(), tiny.text(), [0], ["based"], plan(), store=tmp_path)
    result = measure(["based", "global"], store=tmp_path)
    assert without_time(result) == without_time(measure(["based", "global"]))


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    measure(["based"], store=tmp_path)
    file = tmp_path / "based-seed42-layer0.json"
    file.write_text("{}")
    with pytest.raises(CheckpointError, match=str(file)):
        measure(["based"], store=tmp_path)


def test_missing_tokens_are_counted() -> None:
    with pytest.raises(TextError, match=r"7 blocks of 64 tokens.* 400 tokens, 48 too few"):
        fidelity(tiny.loaded(), tiny.text(400), [0], ["based"], plan())


def test_a_text_that_just_suffices_gives_every_block() -> None:
    settings = plan(skip_blocks=1, fit_blocks=1, validation_blocks=3)
    result = fidelity(tiny.loaded(), tiny.text(5 * 64), [0], ["global"], settings)
    assert (result.evaluation_blocks, result.fit_blocks) == ([0], [1])
    assert result.validation_blocks == [2, 3, 4]


@pytest.mark.parametrize(
    ("names", "settings", "found"),
    [
        (["based", "nosuch"], {}, "global, .*oal"),
        ([], {}, "nothing to measure"),
        (["based"], {"skip_blocks": 0}, "nothing to measure"),
    ],
)
def test_impossible_requests(names: list[str], settings: dict[str, Any], found: str) -> None:
    with pytest.raises(PlanError, match=found):
        measure(names, plan=plan(**settings))


def test_a_converted_model_is_refused() -> None:
    with pytest.raises(PlanError, match="converted already"):
        measure(["based"], tiny.converted("based"))


def test_a_projection_that_cannot_be_used_is_named() -> None:
    base = tiny.loaded()
    layer = attention_layers(base.model)[0]
    layer.module.o_proj = nn.Linear(7, 7)
    with pytest.raises(ModelError, match=r"projection of .*self_attn"):
        output_projection(layer)
    del layer.module.o_proj
    with pytest.raises(ModelError, match="o_proj, out_proj, c_proj"):
        output_projection(layer)


def test_the_chart_shows_every_kernel_with_a_state() -> None:
    result = measure(["based", "performer", "global", "softmax"])
    svg = fidelity_chart(result)
    root = ElementTree.fromstring(svg)
    texts = ["".join(node.itertext()).strip() for node in root.iter() if node.tag.endswith("text")]
    for kernel in result.kernels:
        shown = [0, 2][not kernel.exact]  # beside its marker and beside its bars
        assert texts.count(kernel.title) == shown, kernel.title
        if shown:
            for value in (kernel.errors.mse, kernel.errors.relative_after):
                assert any(text.startswith(f"{value:.3g}") for text in texts)
    assert "currentColor" in svg and 'style="color: #' in svg


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny model with its tokenizer (a token a character) and a text."""
    folder = tmp_path_factory.mktemp("fidelity")
    tiny.model("llama").save_pretrained(folder / "base")
    tiny.tokenizer().save_pretrained(folder / "base")
    (folder / "text.txt").write_text(default_text()[:1000], encoding="utf-8")
    return folder / "base", folder / "text.txt"


def run(files: tuple[Path, Path], *arguments: Any) -> Result:
    small = ["--block", 64, "--evaluation-blocks", 3, "--fit-blocks", 2]
    given = ["fidelity", files[0], "--text", files[1], *small, *arguments]
    return CliRunner().invoke(app, [str(argument) for argument in given])


def test_the_command_prints_stores_and_draws(files: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = ["--layers", "0,2", "--kernels", "based,performer", "--seeds", "0,1", "--out", out]
    result = run(files, *asked)
    assert result.exit_code == 0, result.output
    written = json.loads((out / "fidelity.json").read_text())
    assert written["text"] == [str(files[1])]
    assert written["layers"] == [0, 2] and len(written["runs"]) == 2 * (1 + 2)
    rows = {line.split()[0]: line for line in reversed(result.stdout.splitlines()) if line.split()}
    for kernel in written["kernels"]:
        assert f"{kernel['errors']['relative']:.3g}" in rows[kernel["kernel"]]
        assert f"{kernel['state_numbers']:,.0f}" in rows[kernel["kernel"]]
        for layer in kernel["layers"]:
            assert f"{layer['errors']['relative']:.3g}, " in result.stdout
    assert f"±{written['kernels'][1]['spread']['relative']:.2g}" in result.stdout
    ElementTree.parse(out / "fidelity.svg")
    assert len(list((out / "parts").iterdir())) == 6

    refused = run(files, *asked)
    assert refused.exit_code == 2 and "--resume" in refused.stderr
    assert run(files, *asked, "--resume").exit_code == 0
    again = json.loads((out / "fidelity.json").read_text())
    assert again["kernels"] == written["kernels"]
    other = run(files, *asked, "--resume", "--sinks", 2)
    assert other.exit_code == 2 and "found sinks=0" in other.stderr
    assert run(files, *asked, "--overwrite", "--center").exit_code == 0


def test_an_interrupted_command_keeps_its_parts(
    files: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LinearAttention.fit
    fits = []

    def fit(self: LinearAttention, calibration: Any) -> Any:
        fits.append(self.kernel.name)
        if len(fits) == 2:
            raise KeyboardInterrupt
        return original(self, calibration)

    monkeypatch.setattr(LinearAttention, "fit", fit)
    file = tmp_path / "fidelity.json"
    asked = ["--layers", "1", "--kernels", "based,softmax", "--json", file]
    assert run(files, *asked).exit_code == 130
    assert [part.name for part in tmp_path.iterdir()] == ["fidelity.parts"]
    assert run(files, *asked, "--resume").exit_code == 0
    assert fits == ["based", "softmax", "softmax"]
    assert file.is_file() and (tmp_path / "fidelity.svg").is_file()


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--layers", "0", "--kernels", "based,nosuch"], "spectraformer"),
        (["--layers", "9"], "layers 0-2"),
        (["--layers", "0", "--block", "512"], "too few"),
        (["--layers", "0", "--seeds", "a"], "integers"),
        (["--layers", "0", "--resume"], "--json"),
        (["--layers", "0", "--out", __file__], "a file of that name"),
    ],
)
def test_bad_input_is_one_message(
    files: tuple[Path, Path], arguments: list[str], found: str
) -> None:
    result = run(files, *arguments)
    assert result.exit_code == 2 and "Traceback" not in result.output
    assert "error: asked for" in result.stderr and found in result.stderr
