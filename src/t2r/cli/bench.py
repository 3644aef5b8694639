"""t2r bench ..."""

from dataclasses import asdict
from typing import Annotated

import typer

from t2r.cli.common import AsJson, print_json, show

app = typer.Typer(help="Measure speed and memory on this machine.")


@app.callback()
def root() -> None:
    """A callback makes `ops` a command of its own, even while it is the only one."""


@app.command("ops")
def bench_ops(
    length: Annotated[
        list[int] | None, typer.Option(help="Sequence length; may be repeated. [default: 512 2048 8192]")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 8,
    feature_size: Annotated[int, typer.Option(help="Rows of the state: the size of q and k.")] = 32,
    head_dim: Annotated[int, typer.Option(help="Columns of the state: the size of v.")] = 128,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    backend: Annotated[
        str, typer.Option(help="The backend to measure; several, separated by commas, side by side.")
    ] = "auto",
    decay: Annotated[bool, typer.Option("--decay", help="With a rate of forgetting for every feature.")] = False,
    repeats: Annotated[int, typer.Option(help="Measurements of which the median is taken.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Linear attention against softmax attention: time, and memory of a training step."""
    from t2r.bench import ops

    report = ops.run(
        lengths=length or ops.LENGTHS,
        batch=batch,
        heads=heads,
        feature_size=feature_size,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        backend=backend,
        decay=decay,
        repeats=repeats,
    )
    if as_json:
        print_json(asdict(report))
    else:
        show(ops.tables(report))
