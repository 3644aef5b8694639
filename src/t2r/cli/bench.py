"""t2r bench ..."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from t2r.cli.common import (
    RUN,
    AsJson,
    Bf16,
    Compile,
    Device,
    Dtype,
    Model,
    Quiet,
    calm,
    print_json,
    show,
    swap_options,
)
from t2r.cli.stages import ShowsRecipe

app = typer.Typer(help="Measure speed and memory on this machine.")


@app.command("ops")
def bench_ops(
    length: Annotated[
        list[int] | None, typer.Option(help="Sequence length. Repeatable. [default: 512 2048 8192]")
    ] = None,
    batch: Annotated[int, typer.Option(help="Batch size.")] = 1,
    heads: Annotated[int, typer.Option(help="Number of attention heads.")] = 8,
    feature_size: Annotated[int, typer.Option(help="Feature size: the size of q and k, rows of the state.")] = 32,
    head_dim: Annotated[int, typer.Option(help="Head size: the size of v, columns of the state.")] = 128,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, ...")] = "cpu",
    backend: Annotated[
        str, typer.Option(help="The backend to measure, or several, separated by commas, to compare.")
    ] = "auto",
    decay: Annotated[bool, typer.Option("--decay", help="Use a decay rate for each feature.")] = False,
    repeats: Annotated[int, typer.Option(help="Number of measurements. The median is reported.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Compare linear attention with softmax attention: time, and memory of a training step."""
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


@app.command("decode")
def bench_decode(
    models: Annotated[
        list[str], typer.Argument(help="Folders or hub names. The first is the teacher; the others are compared to it.")
    ],
    length: Annotated[
        list[int] | None, typer.Option(help="Context length in tokens. Repeatable. [default: 512 2048 8192]")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Batch size. Repeatable. [default: 1]")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of tokens generated in each timing.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Number of timings. The median is reported.")] = 5,
    engine: Annotated[
        bool, typer.Option(help="Also measure t2r.Engine and, on a GPU, the teacher's decoding steps as CUDA graphs.")
    ] = True,
    compile_: Annotated[
        bool, typer.Option("--compile", help="Compile the captured steps with torch.compile, on a GPU.")
    ] = False,
    window: Annotated[
        bool, typer.Option(help="Also measure the teacher with an attention window as large as the state in bytes.")
    ] = True,
    dtype: Dtype = RUN["dtype"].default,
    device: Device = RUN["device"].default,
    page: Annotated[str | None, typer.Option(help="Write the tables and figures to this HTML file.")] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure time and memory per generated token by context length.

    Models are measured in turn. The report includes the context length from which each model is faster than the first.

    \b
    t2r bench decode smollm2 smollm2-rnn
    t2r bench decode smollm2 smollm2-rnn --batch 1 --batch 16 --length 512 --length 32768
    t2r bench decode smollm2 smollm2-rnn --page speed.html        also write figures
    """
    from t2r.bench import decoding
    from t2r.hub import choose_device, load_model

    with calm(quiet or as_json):
        place = str(choose_device(device))
        loaded = {name: load_model(name, dtype=dtype, device=place) for name in models}
        reports = []
        for rows in batch or [1]:
            report = decoding.run(
                loaded,
                length or decoding.LENGTHS,
                batch=rows,
                steps=steps,
                repeats=repeats,
                engine=engine,
                compiled=compile_,
                window=window,
            )
            reports.append(report)
        if page is not None:
            from t2r.bench.figures import decoding_page

            decoding_page(reports).write(Path(page))
    if as_json:
        print_json([asdict(report) for report in reports])
    else:
        show([part for report in reports for part in decoding.tables(report)])


@app.command("train", cls=ShowsRecipe)
@swap_options()
def bench_train(
    model: Model,
    options: dict[str, Any],
    recipe: Annotated[str, typer.Option(help="The name of a shipped recipe, or a YAML file.")] = "distill-lm",
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens per optimizer step.")] = 16384,
    block_size: Annotated[int, typer.Option(min=2, help="Tokens per block.")] = 512,
    bf16: Bf16 = None,
    compile_: Compile = None,
    repeats: Annotated[int, typer.Option(min=1, help="Number of steps. The median is reported.")] = 10,
    device: Device = RUN["device"].default,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure the time of an optimizer step.

    Compares finetuning the softmax model with each stage of its conversion. The swap options default to those of the
    recipe; the defaults shown are those of distill-lm.

    \b
    t2r bench train smollm2 --feature-size 128
    t2r bench train gpt2 --batch-tokens 8192 --block-size 4096 --recipe paper-lm
    """
    from t2r.bench import training
    from t2r.hub import choose_device, load_model

    with calm(quiet or as_json):
        loaded = load_model(model, dtype="float32", device=str(choose_device(device)))
        report = training.run(
            loaded,
            recipe=recipe,
            batch_tokens=batch_tokens,
            block_size=block_size,
            bf16=bf16,
            compiled=compile_,
            repeats=repeats,
            options=options,
        )
    if as_json:
        print_json(asdict(report))
    else:
        show(training.tables(report))
