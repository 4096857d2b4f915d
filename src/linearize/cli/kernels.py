"""`linearize kernels`: every kernel that can be chosen, with its costs."""

from __future__ import annotations

from typing import Annotated, Any

from typer import Option

from linearize.cli.common import JsonOption, results, say, store_json, table
from linearize.errors import PlanError
from linearize.kernels import HeadShape, available, get

__all__ = ["kernels"]


def kernels(
    head_dim: Annotated[int, Option("--head-dim", min=1, help="Of queries and keys.")] = 64,
    value_dim: Annotated[int, Option("--value-dim", min=1, help="Of values.")] = 64,
    query_heads: Annotated[int, Option("--query-heads", min=1, help="Query heads.")] = 9,
    kv_heads: Annotated[int, Option("--kv-heads", min=1, help="Key and value heads.")] = 3,
    json: JsonOption = None,
) -> None:
    """List the kernels and their costs.

    Features, state size and trainable numbers are those of one layer.

    Examples:

    \b
      linearize kernels
      linearize kernels --head-dim 128 --value-dim 128 --query-heads 32 --kv-heads 8
    """
    if query_heads % kv_heads:
        raise PlanError(
            f"{query_heads} query heads with {kv_heads} KV heads",
            "a number that is no multiple",
            "Every KV head serves the same number of query heads.",
        )
    shape = HeadShape(query_heads, kv_heads, head_dim, value_dim, head_dim**-0.5)
    rows = [_describe(name, shape) for name in available()]
    made = table("name", "title", "features", "state", "trainable", "source", left=2)
    made.columns[-1].justify = "left"
    for row in rows:
        state = "grows" if row["exact"] else _text(row["state_numbers"])
        features = "-" if row["exact"] else _text(row["features"])
        made.add_row(
            row["name"], row["title"], features, state, _text(row["trainable"]), row["source"]
        )
    results.print(made)
    say(
        f"state and trainable: numbers of one layer with {query_heads} query and {kv_heads} KV heads "
        f"of {head_dim}/{value_dim} dimensions, before fitting; kernels that find their structure in "
        "the data may come to more"
    )
    store_json(json, {"shape": vars(shape), "kernels": rows})


def _describe(name: str, shape: HeadShape) -> dict[str, Any]:
    """One kernel's line; its numbers are ``None`` where it cannot have this shape."""
    cls = get(name)
    line: dict[str, Any] = {
        "name": name,
        "title": cls.title,
        "source": cls.source,
        "exact": cls.exact,
        "features": None,
        "state_numbers": None,
        "trainable": None,
    }
    try:
        kernel = cls.build(shape, {})
    except PlanError:
        return line
    line["trainable"] = kernel.trainable_numbers
    if not line["exact"]:
        line["features"] = kernel.feature_count
        line["state_numbers"] = kernel.state_numbers
    return line


def _text(number: int | None) -> str:
    return "not this shape" if number is None else f"{number:,}"
