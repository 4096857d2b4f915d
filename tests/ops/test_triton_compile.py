"""The kernels go through Triton's compiler for a GPU that need not be there: types, sizes, memory."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs the triton package (the extra triton)")


SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from linearize.ops.triton import backward, decode, forward

WHOLE = {"left", "right", "counts"}  # pointers to integers


def compile(kernel, **constants):
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name == "eps":
            signature[name] = "fp32"
        elif name in WHOLE:
            signature[name] = "*i32"
        elif name in NUMBERS:
            signature[name] = "i32"
        else:
            signature[name] = "*fp32"
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    made = triton.compile(ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32))
    print(kernel.__name__, made.metadata.shared)


NUMBERS = {
    *("tokens", "chunk", "chunks", "tiles", "r", "channels", "features", "components"),
    *("stride_state", "stride_chunk", "has_state"),
}
block = int(sys.argv[1])
one = int(sys.argv[2])  # whether arguments that are 1 get their own version, as at launch
dim, wide, width = (64, 64, 64) if block == 64 else (8, 16, 32)
shape = {"dim": dim, "width": width, "tail": block == 64, "precision": "ieee"}
single = {"r": 1, "tokens": 1, "chunk": 1} if one else {}
tiles = {"tiles": 1} if one else {}
keys = {"r": 1, "coefficients": None, "weighted": False}
rows, cells = {"block_rows": block}, {"block_features": block}
pairs = {"wide": wide, "block_keys": block} | rows
compile(forward.sum_kernel, weighted=True, **shape, **rows, **cells, **single)
compile(forward.sum_kernel, **shape, **rows, **cells, **single | keys)
output = shape | pairs | cells | tiles
compile(forward.output_kernel, weighted=True, pairs=True, **output, **single)
compile(forward.output_kernel, pairs=False, has_state=1, **output, **single | keys)
through = {"wide": wide} | shape | rows | cells | tiles
compile(backward.feature_kernel, weighted=True, **through, **single)
compile(backward.feature_kernel, **through, **single | keys)
chunks = {"chunks": 1} if one else {}
compile(backward.coefficient_kernel, heads=16, **shape, **rows, **cells, **single, **chunks)
compile(backward.pair_row_kernel, heads=16, **shape, **pairs, **single, **tiles)
compile(backward.pair_key_kernel, **shape, **pairs, **single, **tiles)
decoding = {"r": 1} if one else {}
compile(decode.decode_kernel, heads=16, wide=wide, **shape, **cells, **decoding)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("block", "one"), [(32, 1), (32, 0), (64, 0)])
def test_every_kernel_compiles_and_fits_into_shared_memory(block: int, one: int) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(block), str(one)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    width = 64 if block == 64 else 32
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 10
    for name, shared in lines:
        assert int(shared) <= 4 * block * (6 * block + 4 * width), name  # what `sums._block` takes
