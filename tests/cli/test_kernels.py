"""`linearize kernels`: every discovered kernel, with the numbers the kernel itself gives."""

import json
from pathlib import Path

from linearize import kernels
from linearize.kernels import HeadShape


def test_every_discovered_kernel_is_listed_with_its_own_numbers(run, tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    shape = HeadShape(4, 2, 16, 8, 16**-0.5)
    given = ["--head-dim", 16, "--value-dim", 8, "--query-heads", 4, "--kv-heads", 2]
    result = run("kernels", *given, "--json", out)
    assert result.exit_code == 0, result.output
    listed = json.loads(out.read_text())["kernels"]
    assert [line["name"] for line in listed] == kernels.available()
    for line in listed:
        assert line["name"] in result.stdout and line["source"]
        if line["exact"] or line["features"] is None:
            continue
        kernel = kernels.get(line["name"])(shape)
        assert line["features"] == kernel.feature_count
        assert line["trainable"] == kernel.trainable_numbers
        assert line["state_numbers"] == kernel.state_heads * kernel.feature_count * 9


def test_the_state_of_oal_is_packed_and_shared(run, tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    assert run("kernels", "--json", out).exit_code == 0
    (oal,) = [line for line in json.loads(out.read_text())["kernels"] if line["name"] == "oal"]
    assert oal["features"] == 1 + 64 + 64 * 65 // 2
    assert oal["state_numbers"] == 3 * 139_425


def test_heads_that_do_not_divide_are_refused(run) -> None:
    result = run("kernels", "--query-heads", 9, "--kv-heads", 4)
    assert result.exit_code == 2 and "asked for 9 query heads with 4 KV heads" in result.stderr
