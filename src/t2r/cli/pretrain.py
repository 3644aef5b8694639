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
    Join,
    Limit,
    Overwrite,
    Quiet,
    ReportTo,
    Restart,
    RunOut,
    SaveSteps,
    Set,
    SourceLanguage,
    Src,
    TargetLanguage,
    TeacherBeams,
    Valid,
    ValidSrc,
    ValidTgt,
    calm,
    flag,
    show_results,
    shows_progress,
    swap_options,
    takes,
)
from t2r.cli.stages import STAGE, stage_overrides


@takes("stage", STAGE)
@swap_options(
    feature_map={
        "help": "The feature map: t2r, elu, rfa, performer or hedgehog; softmax keeps softmax attention.",
        "default": None,
        "unset": "CONFIG's, or softmax; t2r if another option of the swap is given",
    },
    softmax_layers={"help": "Decoder layers, from 0, that keep their softmax attention, such as 0-3,7."},
    seed={"help": "Seed of the weights, the data order and dropout."},
)
def pretrain(
    config: Annotated[
        str,
        typer.Argument(
            help="A preset (gpt2-tiny, gpt2-novels, adaptive-lm-tiny, adaptive-lm-small, adaptive-lm-medium, "
            "adaptive-lm-wiki, adaptive-lm-paper; for translation marian-tiny, marian-small, marian-large-paper), a "
            "YAML file in the same format, or a model folder, whose configuration is used."
        ),
    ],
    out: RunOut,
    options: dict[str, Any],
    stage: dict[str, Any],
    train: Annotated[
        list[str] | None,
        typer.Option(
            help="Training text: a file, a glob, JSONL (text or messages; .gz and .xz are read), or "
            "datasets:NAME[:CONFIG[:SPLIT]]. wiki.txt:2 reads a source twice per epoch; "
            "wiki.txt:60% makes it 60% of the tokens. Repeatable. [default: the recipe's sources]"
        ),
    ] = None,
    valid: Valid = None,
    src: Src = None,
    tgt: Annotated[
        list[str] | None,
        typer.Option(
            help="File of the targets of each --src; with --continued also `teacher`: the model translates --src "
            "before it is trained. Repeatable."
        ),
    ] = None,
    valid_src: ValidSrc = None,
    valid_tgt: ValidTgt = None,
    source_language: SourceLanguage = None,
    target_language: TargetLanguage = None,
    teacher_beams: TeacherBeams = None,
    join: Join = 1,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="The name of a shipped recipe, or a YAML file. [default: the preset's, or scratch-lm, with --src "
            "scratch-mt]"
        ),
    ] = None,
    set_: Set = None,
    model_set: Annotated[
        list[str] | None,
        typer.Option("--model-set", help="Override the model configuration: field=value. Repeatable."),
    ] = None,
    minutes: Annotated[
        float | None,
        flag(RUN["minutes"], help="Time for the whole run, in minutes: loading, training and evaluation."),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A tokenizer folder. [default: the model folder's, or one trained as the preset says]"),
    ] = None,
    continued: Annotated[
        bool, typer.Option("--continued", help="Start from the weights in CONFIG, a model folder or hub name.")
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
    """Train a language model or a translation model from random weights.

    Trains a teacher or a baseline, and its tokenizer. The attention is softmax, unless --feature-map or another option
    of the swap is given.

    \b
    t2r pretrain gpt2-tiny first --train corpus.txt                       seconds on a CPU
    t2r pretrain adaptive-lm-small lm --train wiki.train.tokens           the paper's model, smaller
    t2r pretrain gpt2-tiny rnn --train corpus.txt --feature-map elu       recurrent from the start
    t2r pretrain gpt2-tiny wide --train corpus.txt --model-set n_embd=128 --set steps=1000
    t2r pretrain smollm2 more --continued --recipe scratch-lm --train corpus.txt --set steps=1000
    t2r pretrain marian-small mt --src train.en --tgt train.de --valid-src dev.en --valid-tgt dev.de   report BLEU
    t2r pretrain marian-small mt --src train.zh --tgt train.en --model-set share_encoder_decoder_embeddings=false

    With --src the preset is an encoder-decoder. Its tokenizer is one BPE for both languages, or one for each if the
    embeddings are not shared. An interrupted run is resumed by the same command.
    """
    from t2r.pipelines.pretrain import pretrain as run
    from t2r.pipelines.pretrain import summary

    with calm(quiet or as_json, info=not quiet):
        results = run(
            config,
            out,
            train=train or None,
            valid=valid,
            source=src or None,
            target=tgt or None,
            valid_source=valid_src,
            valid_target=valid_tgt,
            source_language=source_language,
            target_language=target_language,
            teacher_beams=teacher_beams,
            join=join,
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
            restart=restart,
            progress=shows_progress(quiet or as_json),
            **options,
        )
    show_results(results, summary, out, as_json, quiet)
