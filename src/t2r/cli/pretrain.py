"""t2r pretrain"""

import logging
from typing import Annotated, Any

import typer

from t2r.cli.common import AsJson, Quiet, calm, show_results, swap_options


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
    train: Annotated[list[str], typer.Option(help="Text files, globs, JSONL, datasets:NAME. Repeatable.")],
    valid: Annotated[str | None, typer.Option(help="A text to measure perplexity on, before and after.")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="A shipped recipe, or a YAML file. [default: the preset's own]")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override the recipe: stage.field=value. Repeatable.")
    ] = None,
    model_set: Annotated[
        list[str] | None,
        typer.Option("--model-set", help="Override the model: field=value of its configuration. Repeatable."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Time for all stages together, shared as the recipe does.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="The folder of a tokenizer. [default: one is trained, as the preset says]")
    ] = None,
    documents: Annotated[bool, typer.Option(help="Keep documents apart inside a block.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    limit: Annotated[int | None, typer.Option(help="Evaluate on so many windows only.")] = None,
    report_to: Annotated[str, typer.Option(help="none, tensorboard (in OUT.logs) or wandb.")] = "none",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model that OUT holds already.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a language model from random initialization, and its tokenizer: for teachers and for baselines.

    \b
    t2r pretrain gpt2-tiny first --train corpus.txt                       seconds on a CPU
    t2r pretrain adaptive-lm-small lm --train wiki.train.tokens           the paper's model, small
    t2r pretrain gpt2-tiny rnn --train corpus.txt --feature-map elu       recurrent from the start
    t2r pretrain gpt2-tiny wide --train corpus.txt --model-set n_embd=128 --set steps=1000

    The attention is the model's own softmax, unless --feature-map or another option of the swap says otherwise. Stop it
    anywhere; the same command goes on where it was.
    """
    from t2r.pipelines.pretrain import pretrain as run
    from t2r.pipelines.pretrain import summary

    with calm(quiet or as_json):
        if not quiet:
            logging.getLogger("t2r").setLevel(logging.INFO)
        results = run(
            config,
            out,
            train=train,
            valid=valid,
            recipe=recipe,
            overrides=set_ or [],
            model_overrides=model_set or [],
            minutes=minutes,
            tokenizer=tokenizer,
            documents=documents,
            device=device,
            limit=limit,
            report_to=report_to,
            overwrite=overwrite,
            progress=not (quiet or as_json),
            **options,
        )
    show_results(results, summary, out, as_json, quiet)
