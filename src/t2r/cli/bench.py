"""t2r bench ..."""

from typing import Annotated, Any

import typer

from t2r.cli.common import (
    RUN,
    AsJson,
    Bf16,
    Compile,
    Device,
    Model,
    Quiet,
    calm,
    flag,
    show_report,
    swap_options,
)
from t2r.cli.stages import ShowsRecipe

app = typer.Typer(help="Measure speed and memory on this machine.")

PagePath = Annotated[str | None, typer.Option(help="Write the tables and figures to this HTML file.")]
ModelDtype = Annotated[
    str,
    flag(
        RUN["dtype"],
        help="auto (as saved; all models must agree; convert saves float32), float32, bfloat16 or float16.",
    ),
]
StateDtype = Annotated[
    str | None, typer.Option(help="Store the states of the engine in bfloat16 or float16. [default: float32]")
]
FeatureSizes = Annotated[
    list[int] | None,
    typer.Option(min=1, help="Also measure the first model swapped with this feature size, untrained. Repeatable."),
]


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
        str,
        typer.Option(
            help="The backend to measure, or several, separated by commas, to compare. `fla` is flash-linear-attention "
            "(on a GPU, if it is installed)."
        ),
    ] = "auto",
    decay: Annotated[bool, typer.Option("--decay", help="Use a decay rate for each feature.")] = False,
    repeats: Annotated[int, typer.Option(help="Number of measurements. The median is reported.")] = 5,
    as_json: AsJson = False,
) -> None:
    """Compare linear attention with softmax attention: time, and memory of a training step."""
    from t2r.bench import ops

    report = ops.run(
        length or None,
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
    show_report(report, ops.tables, as_json)


@app.command("decode")
def bench_decode(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Folders, hub names, or random:SHAPE,option=value for random weights, each with a label if you like "
            "(RNN=FOLDER). The first is the teacher; the others are compared to it."
        ),
    ],
    length: Annotated[
        list[int] | None, typer.Option(help="Context length in tokens. Repeatable. [default: 512 2048 8192]")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Batch size. Repeatable. [default: 1]")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of tokens generated in each timing.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Number of timings. The median is reported.")] = 5,
    engine: Annotated[
        bool,
        typer.Option(help="Also measure t2r.Engine and, on a GPU, the teacher's decoding steps as CUDA graphs."),
    ] = True,
    compile_: Annotated[
        bool, typer.Option("--compile", help="Compile the captured steps with torch.compile, on a GPU.")
    ] = False,
    window: Annotated[
        bool, typer.Option(help="Also measure the teacher with an attention window as large as the state in bytes.")
    ] = True,
    own: Annotated[
        bool, typer.Option(help="Measure the models' own forward, as in generate(). If not, the context is not read.")
    ] = True,
    state_dtype: StateDtype = None,
    feature_size: FeatureSizes = None,
    dtype: ModelDtype = RUN["dtype"].default,
    device: Device = RUN["device"].default,
    page: PagePath = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure time and memory per generated token by context length.

    Models are measured in turn. The report includes the context length from which each model is faster, and smaller,
    than the first one decoded in the same way, and the time that moving its bytes takes.

    \b
    t2r bench decode smollm2 smollm2-rnn --dtype float32
    t2r bench decode smollm2 smollm2-rnn --dtype float32 --batch 1 --batch 16 --length 512 --length 32768
    t2r bench decode smollm2 smollm2-rnn --dtype float32 --page speed.html     also write figures
    t2r bench decode random:paper-lm --feature-size 16 --feature-size 32    speed by feature size
    """
    from t2r.bench import commands, decoding

    with calm(quiet, info=True):
        reports = commands.decode(
            commands.load(models, feature_sizes=feature_size or (), dtype=dtype, device=device),
            length or (),
            batches=batch or (),
            steps=steps,
            repeats=repeats,
            engine=engine,
            compiled=compile_,
            window=window,
            own=own,
            state_dtype=state_dtype,
            page=page,
        )
    show_report(reports, decoding.tables, as_json)


@app.command("translate")
def bench_translate(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Folders, hub names, or random:SHAPE,option=value, also LABEL=FOLDER. The first is the reference. "
            "[default: softmax, ELU 64-64, RFA 32-4 and T2R 32-4 with random weights]"
        ),
    ] = None,
    shape: Annotated[str, typer.Option(help="Size of the default models: paper-mt, small-mt or tiny-mt.")] = "paper-mt",
    length: Annotated[
        list[int] | None,
        typer.Option(min=2, help="Tokens of source and target. Repeatable. [default: 8 32 128 512 2048]"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 16,
    repeats: Annotated[int, typer.Option(min=1, help="Number of timings. The median is reported.")] = 3,
    generate: Annotated[bool, typer.Option("--generate", help="Also measure generate() of each model.")] = False,
    compile_: Annotated[
        bool, typer.Option("--compile", help="Compile the captured steps with torch.compile, on a GPU.")
    ] = False,
    feature_size: FeatureSizes = None,
    dtype: ModelDtype = RUN["dtype"].default,
    device: Device = RUN["device"].default,
    page: PagePath = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure tokens per second and memory of greedy translation by length.

    Every model is decoded by t2r.Engine. The time includes the encoder.

    \b
    t2r bench translate --device cuda --dtype bfloat16 --page translate.html     the paper's two figures
    t2r bench translate --shape tiny-mt --batch 2 --length 8 --length 64         a small one, on a CPU
    t2r bench translate opus-mt opus-mt-rnn --dtype float32
    """
    from t2r.bench import commands, translating

    with calm(quiet, info=True):
        names = models or translating.paper_models(shape)
        report = commands.translate(
            commands.load(names, feature_sizes=feature_size or (), dtype=dtype, device=device),
            length or (),
            batch=batch,
            repeats=repeats,
            generate=generate,
            compiled=compile_,
            page=page,
        )
    show_report(report, translating.tables, as_json)


@app.command("memory")
def bench_memory(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="Folders, hub names, or random:SHAPE,option=value, also LABEL=FOLDER. The first is the teacher. "
            "[default: the paper's language model with random weights, and the same with 32 features]"
        ),
    ] = None,
    shape: Annotated[str, typer.Option(help="Size of the default models: paper-lm, small-lm or tiny-lm.")] = "paper-lm",
    context: Annotated[int, typer.Option(min=1, help="Tokens of each sequence.")] = 8192,
    memory_: Annotated[
        float | None, typer.Option("--memory", min=0, help="GiB of memory. Required on a CPU. [default: the GPU's]")
    ] = None,
    most: Annotated[int | None, typer.Option(min=1, help="The largest batch to try.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of tokens generated in each timing.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Number of timings. The median is reported.")] = 3,
    state_dtype: StateDtype = None,
    feature_size: FeatureSizes = None,
    dtype: ModelDtype = RUN["dtype"].default,
    device: Device = RUN["device"].default,
    page: PagePath = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Find the largest batch that fits into memory, and measure its speed.

    On a GPU batches are tried; on a CPU the batch is computed from counted bytes. The teacher with an attention window
    as large as the state in bytes is one of the rows.

    \b
    t2r bench memory --device cuda --dtype bfloat16                        the paper's language model
    t2r bench memory smollm2 smollm2-rnn --context 32768 --device cuda --dtype bfloat16
    t2r bench memory smollm2 smollm2-rnn --memory 4 --most 16 --dtype float32    on a CPU
    """
    from t2r.bench import commands, memory

    with calm(quiet, info=True):
        names = models or memory.paper_models(shape)
        report = commands.find_largest_batch(
            commands.load(names, feature_sizes=feature_size or (), dtype=dtype, device=device),
            context=context,
            memory=memory_,
            most=most,
            steps=steps,
            repeats=repeats,
            state_dtype=state_dtype,
            page=page,
        )
    show_report(report, memory.tables, as_json)


@app.command("requests")
def bench_requests(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Folders, hub names, or random:SHAPE,option=value for random weights, each with a label if you like."
        ),
    ],
    requests: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of requests. Repeatable. [default: 1 16 256]")
    ] = None,
    prompt: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of a prompt. Repeatable: requests take them in turn. [default: 16 64 32 128]"),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that each request generates.")] = 32,
    sampled: Annotated[int, typer.Option(min=0, help="Sample every request of this number. 0: none.")] = 0,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of the engine. [default: by memory]")] = None,
    step_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompts between two steps. [default: that of t2r.Engine]")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Number of rounds. The median is reported.")] = 3,
    feature_size: FeatureSizes = None,
    dtype: ModelDtype = RUN["dtype"].default,
    device: Device = RUN["device"].default,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure tokens per second and waiting times of requests that join a running engine one after the other.

    \b
    t2r bench requests smollm2-rnn --dtype float32
    t2r bench requests smollm2-rnn --requests 64 --sampled 2 --prompt 32 --prompt 2048 --step-tokens 64
    """
    from t2r.bench import commands
    from t2r.bench import requests as running

    with calm(quiet, info=True):
        report = running.run(
            commands.load(models, feature_sizes=feature_size or (), dtype=dtype, device=device),
            requests or running.REQUESTS,
            prompts=prompt or running.PROMPTS,
            new_tokens=new_tokens,
            sampled=sampled,
            rows=rows,
            step_tokens=step_tokens,
            repeats=repeats,
        )
    show_report(report, running.tables, as_json)


@app.command("train", cls=ShowsRecipe)
@swap_options()
def bench_train(
    model: Model,
    options: dict[str, Any],
    recipe: Annotated[
        str | None,
        typer.Option(
            help="The name of a shipped recipe, or a YAML file. [default: distill-lm, or distill-mt for an "
            "encoder-decoder]"
        ),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(help="A converted model, whose swap options are used, also its windows and states."),
    ] = None,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens per optimizer step.")] = 16384,
    block_size: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens per block: by default 512, or 64 on each side of a pair for translation."),
    ] = None,
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
    t2r bench train random:paper-lm --recipe paper-lm              random weights, as in bench decode
    t2r bench train opus-mt-zh-en --block-size 32                  pairs of 32 tokens on each side
    t2r bench train smollm2 --like smollm2-8 --block-size 2048     with the windows and states of a converted model
    """
    from t2r.bench import commands, training

    with calm(quiet, info=True):
        report = commands.train(
            model,
            device=device,
            like=like,
            recipe=recipe,
            batch_tokens=batch_tokens,
            block_size=block_size,
            bf16=bf16,
            compiled=compile_,
            repeats=repeats,
            options=options,
        )
    show_report(report, training.tables, as_json)
