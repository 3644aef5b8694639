"""t2r pretrain"""

from typing import Annotated, Any

import typer

from t2r.cli.common import (
    RUN,
    AsJson,
    Bf16,
    Compile,
    Device,
    Documents,
    GradientCheckpointing,
    Limit,
    Minutes,
    Overwrite,
    Quiet,
    ReportTo,
    Restart,
    SaveSteps,
    Set,
    calm,
    show_results,
    shows_progress,
    swap_options,
    takes,
)
from t2r.cli.stages import STAGE, stage_overrides


@takes("stage", STAGE)
@swap_options
def pretrain(
    config: Annotated[
        str,
        typer.Argument(
            help="A preset (gpt2-tiny, gpt2-novels, adaptive-lm-small, adaptive-lm-medium, adaptive-lm-paper), a YAML "
            "file like those, or the folder of a model, whose shape is taken."
        ),
    ],
    out: Annotated[str, typer.Argument(help="The folder to make. OUT.run beside it holds an unfinished run.")],
    options: dict[str, Any],
    stage: dict[str, Any],
    train: Annotated[
        list[str] | None,
        typer.Option(
            help="Text files, globs, JSONL, datasets:NAME. wiki.txt:2 is read twice in an epoch, wiki.txt:60% is 60% "
            "of what is read. Repeatable. [default: the texts that the recipe names]"
        ),
    ] = None,
    valid: Annotated[str | None, typer.Option(help="A text to measure perplexity on, before and after.")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="A shipped recipe, or a YAML file. [default: the preset's own]")
    ] = None,
    set_: Set = None,
    model_set: Annotated[
        list[str] | None,
        typer.Option("--model-set", help="Override the model: field=value of its configuration. Repeatable."),
    ] = None,
    minutes: Minutes = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="The folder of a tokenizer. [default: one is trained, as the preset says]")
    ] = None,
    continued: Annotated[
        bool, typer.Option("--continued", help="Start from the weights of CONFIG, the folder of a model.")
    ] = False,
    documents: Documents = False,
    device: Device = RUN["device"].default,
    bf16: Bf16 = None,
    compile_: Compile = None,
    gradient_checkpointing: GradientCheckpointing = False,
    save_steps: SaveSteps = None,
    limit: Limit = None,
    report_to: ReportTo = "none",
    restart: Restart = False,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a language model from random initialization, and its tokenizer: for teachers and for baselines.

    \b
    t2r pretrain gpt2-tiny first --train corpus.txt                       seconds on a CPU
    t2r pretrain adaptive-lm-small lm --train wiki.train.tokens           the paper's model, small
    t2r pretrain gpt2-tiny rnn --train corpus.txt --feature-map elu       recurrent from the start
    t2r pretrain gpt2-tiny wide --train corpus.txt --model-set n_embd=128 --set steps=1000
    t2r pretrain smollm2 more --continued --recipe scratch-lm --train corpus.txt --set steps=1000

    The attention is the model's own softmax, unless --feature-map or another option of the swap says otherwise. Stop it
    anywhere; the same command goes on where it was.
    """
    from t2r.pipelines.pretrain import pretrain as run
    from t2r.pipelines.pretrain import summary

    if restart:
        options["restart"] = True
    with calm(quiet or as_json, info=not quiet):
        results = run(
            config,
            out,
            train=train or None,
            valid=valid,
            recipe=recipe,
            overrides=stage_overrides(stage, minutes, set_),
            model_overrides=model_set or [],
            minutes=minutes,
            tokenizer=tokenizer,
            continued=continued,
            documents=documents,
            device=device,
            bf16=bf16,
            compiled=compile_,
            gradient_checkpointing=gradient_checkpointing,
            save_steps=save_steps,
            limit=limit,
            report_to=report_to,
            overwrite=overwrite,
            progress=shows_progress(quiet or as_json),
            **options,
        )
    show_results(results, summary, out, as_json, quiet)
