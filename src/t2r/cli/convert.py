"""t2r convert"""

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
    Model,
    Overwrite,
    Quiet,
    ReportTo,
    Restart,
    Revision,
    SaveSteps,
    Set,
    TrustRemoteCode,
    calm,
    flag,
    show_results,
    shows_progress,
    swap_options,
    takes,
)
from t2r.cli.stages import STAGE, stage_overrides


@takes("stage", STAGE)
@swap_options
def convert(
    source: Model,
    out: Annotated[str, typer.Argument(help="The folder to make. OUT.run beside it holds an unfinished run.")],
    options: dict[str, Any],
    stage: dict[str, Any],
    train: Annotated[
        list[str] | None,
        typer.Option(
            help="Text files, globs, JSONL, datasets:NAME; or `teacher`: the model writes its own, or beside other "
            "texts more like them. wiki.txt:2 is read twice in an epoch, wiki.txt:60% is 60% of what is read. "
            "Repeatable. [default: the texts that the recipe names]"
        ),
    ] = None,
    valid: Annotated[str | None, typer.Option(help="A text to measure perplexity on, before and after.")] = None,
    src: Annotated[
        list[str] | None,
        typer.Option(
            help="Of an encoder-decoder: a file of sources, line by line, with a weight or without, as for --train. "
            "Repeatable."
        ),
    ] = None,
    tgt: Annotated[
        list[str] | None,
        typer.Option(help="The targets of each --src; or `teacher`: the model translates them itself. Repeatable."),
    ] = None,
    valid_src: Annotated[str | None, typer.Option(help="Sources to measure BLEU on, before and after.")] = None,
    valid_tgt: Annotated[str | None, typer.Option(help="Their references.")] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="A shipped recipe, or a YAML file. [default: distill-lm, or with --src distill-mt]"),
    ] = None,
    set_: Set = None,
    minutes: Minutes = None,
    teacher_tokens: Annotated[int, flag(RUN["teacher_tokens"])] = RUN["teacher_tokens"].default,
    documents: Documents = False,
    merge: Annotated[bool | None, typer.Option(help="Fold the maps at the end. [default: if it pays]")] = None,
    device: Device = RUN["device"].default,
    bf16: Bf16 = None,
    compile_: Compile = None,
    gradient_checkpointing: GradientCheckpointing = False,
    save_steps: SaveSteps = None,
    limit: Limit = None,
    report_to: ReportTo = "none",
    restart: Restart = False,
    overwrite: Overwrite = False,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Turn a language model or a translation model into an RNN: swap, train, evaluate, merge if possible, save.

    \b
    t2r convert gpt2 rnn --train corpus.txt --valid valid.txt        perplexities beside the teacher's
    t2r convert gpt2 rnn --train corpus.txt --minutes 30             in the time there is
    t2r convert gpt2 rnn --train corpus.txt --softmax-layers auto:3  the 3 layers that matter most stay
    t2r convert gpt2 rnn --train teacher                             no text? the model writes its own
    t2r convert gpt2 rnn --train wiki.txt:2 --train novels.txt:0.5   twice, and every second block
    t2r convert gpt2 rnn --train wiki.txt:60% --train novels.txt:40% shares of what is read
    t2r convert gpt2 rnn --train small.txt --set noise=0.1           read often, but never quite the same
    t2r convert opus-mt-zh-en rnn --src train.zh --tgt train.en --valid-src dev.zh --valid-tgt dev.en   translation
    t2r convert opus-mt-zh-en rnn --src train.zh --tgt teacher       only sources? the model translates them

    Stop it anywhere; the same command goes on where it was. The defaults shown here are those of the recipe distill-lm.
    """
    from t2r.pipelines.convert import convert as run
    from t2r.pipelines.convert import summary

    if restart:
        options["restart"] = True
    recipe = recipe or ("distill-mt" if src or tgt else "distill-lm")
    with calm(quiet or as_json, info=not quiet):
        results = run(
            source,
            out,
            train=train or None,
            valid=valid,
            source=src or None,
            target=tgt or None,
            valid_source=valid_src,
            valid_target=valid_tgt,
            recipe=recipe,
            overrides=stage_overrides(stage, minutes, set_, recipe),
            minutes=minutes,
            teacher_tokens=teacher_tokens,
            documents=documents,
            merged=merge,
            device=device,
            bf16=bf16,
            compiled=compile_,
            gradient_checkpointing=gradient_checkpointing,
            save_steps=save_steps,
            limit=limit,
            report_to=report_to,
            overwrite=overwrite,
            revision=revision,
            trust_remote_code=trust_remote_code,
            progress=shows_progress(quiet or as_json),
            **options,
        )
    show_results(results, summary, out, as_json, quiet)
