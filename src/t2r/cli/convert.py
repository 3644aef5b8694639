"""t2r convert"""

import logging
from typing import Annotated, Any

import typer

from t2r.cli.common import AsJson, Model, Quiet, Revision, TrustRemoteCode, calm, show_results, swap_options


@swap_options
def convert(
    source: Model,
    out: Annotated[str, typer.Argument(help="The folder to make. OUT.run beside it holds an unfinished run.")],
    options: dict[str, Any],
    train: Annotated[
        list[str],
        typer.Option(
            help="Text files, globs, JSONL, datasets:NAME; or `teacher`: the model writes its own, or beside other "
            "texts more like them. Repeatable."
        ),
    ],
    valid: Annotated[str | None, typer.Option(help="A text to measure perplexity on, before and after.")] = None,
    recipe: Annotated[str, typer.Option(help="A shipped recipe, or a YAML file.")] = "distill-lm",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override the recipe: stage.field=value. Repeatable.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Time for all stages together, shared as the recipe does.")
    ] = None,
    teacher_tokens: Annotated[int, typer.Option(help="How much the teacher writes for --train teacher.")] = 10_000_000,
    documents: Annotated[bool, typer.Option(help="Keep documents apart inside a block.")] = False,
    merge: Annotated[bool | None, typer.Option(help="Fold the maps at the end. [default: if it pays]")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    limit: Annotated[int | None, typer.Option(help="Evaluate on so many windows only.")] = None,
    report_to: Annotated[str, typer.Option(help="none, tensorboard (in OUT.logs) or wandb.")] = "none",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model that OUT holds already.")] = False,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Turn a language model into an RNN: swap, train, evaluate, merge if possible, save.

    \b
    t2r convert gpt2 rnn --train corpus.txt --valid valid.txt        perplexities beside the teacher's
    t2r convert gpt2 rnn --train corpus.txt --minutes 30             in the time there is
    t2r convert gpt2 rnn --train corpus.txt --softmax-layers auto:3  the 3 layers that matter most stay
    t2r convert gpt2 rnn --train teacher                             no text? the model writes its own
    t2r convert gpt2 rnn --train small.txt --set noise=0.1           read often, but never quite the same

    Stop it anywhere; the same command goes on where it was. Where the recipe says something about the swap, that is the
    default: distill-lm has --no-shared --no-grouped --decay --no-rotary --activation softmax --init identity
    --key-weights.
    """
    from t2r.pipelines.convert import convert as run
    from t2r.pipelines.convert import summary

    with calm(quiet or as_json):
        if not quiet:
            logging.getLogger("t2r").setLevel(logging.INFO)
        results = run(
            source,
            out,
            train=train,
            valid=valid,
            recipe=recipe,
            overrides=set_ or [],
            minutes=minutes,
            teacher_tokens=teacher_tokens,
            documents=documents,
            merged=merge,
            device=device,
            limit=limit,
            report_to=report_to,
            overwrite=overwrite,
            revision=revision,
            trust_remote_code=trust_remote_code,
            progress=not (quiet or as_json),
            **options,
        )
    show_results(results, summary, out, as_json, quiet)
