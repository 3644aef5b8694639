"""t2r evaluate"""

from typing import Annotated

import typer

from t2r.cli.common import (
    RUN,
    AsJson,
    Device,
    Quiet,
    SourceLanguage,
    TargetLanguage,
    calm,
    flag,
    print_json,
    show,
    shows_progress,
)


def evaluate(
    models: Annotated[
        list[str], typer.Argument(help="Folders or hub names. The first is the reference for the others.")
    ],
    text: Annotated[list[str] | None, typer.Option(help="Text to score: a file or a glob. Repeatable.")] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="Add a row for a modified model: MODEL:window=TOKENS,sinks=TOKENS (softmax attention is limited to "
            "the last and the first tokens) or MODEL:state=DTYPE,every=TOKENS (the recurrent state is rounded). "
            "Repeatable."
        ),
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="A task of lm-eval to run (requires the lm-eval extra). Repeatable.")
    ] = None,
    task_folder: Annotated[str | None, typer.Option(help="Folder with YAML files of custom lm-eval tasks.")] = None,
    src: Annotated[str | None, typer.Option(help="File of source sentences to translate, one per line.")] = None,
    ref: Annotated[str | None, typer.Option(help="References of --src, for BLEU and chrF.")] = None,
    beams: Annotated[int, flag(RUN["beams"])] = RUN["beams"].default,
    length_penalty: Annotated[float, flag(RUN["length_penalty"])] = RUN["length_penalty"].default,
    bleu_tokenize: Annotated[str, flag(RUN["bleu_tokenize"])] = RUN["bleu_tokenize"].default,
    source_language: SourceLanguage = None,
    target_language: TargetLanguage = None,
    outputs: Annotated[str | None, typer.Option(help="Folder to save the translations in, one file per model.")] = None,
    window: Annotated[
        list[int] | None,
        typer.Option(help=f"{RUN['window'].help} Repeatable. [default: {RUN['window'].default_words}]"),
    ] = None,
    stride: Annotated[int | None, flag(RUN["stride"])] = None,
    limit: Annotated[
        int | None, flag(RUN["limit"], help="Maximum number of windows, examples per task, or lines of --src to score.")
    ] = None,
    batch_size: Annotated[
        int | None, flag(RUN["batch_size"], help="Windows per batch.", default="8 on a CPU, more on a GPU")
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(help="Measure the KL divergence from this model instead of the first.")
    ] = None,
    generation: Annotated[bool, typer.Option(help="Also measure repetition in generated text, and recall.")] = True,
    distance: Annotated[
        list[int] | None,
        typer.Option(help="Distance in tokens for the recall test. Repeatable. [default: up to half a window]"),
    ] = None,
    trials: Annotated[int, flag(RUN["trials"])] = RUN["trials"].default,
    dtype: Annotated[str, flag(RUN["dtype"], default="float32")] = "float32",
    device: Device = RUN["device"].default,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate models and compare them with the first.

    Measures perplexity by the paper's protocol, bits per byte, KL divergence from the first model, repetition in
    generated text, recall, and tasks of lm-eval. For translation models: BLEU and chrF with signatures, the paper's
    tokenized BLEU, a paired bootstrap against the first model, BLEU by source length, and copied numbers and names.

    \b
    t2r evaluate teacher rnn --text valid.txt
    t2r evaluate teacher rnn --text a.txt --text b.txt --window 512 --window 2048
    t2r evaluate teacher rnn --text valid.txt --variant teacher:window=386,sinks=4    teacher with windowed attention
    t2r evaluate teacher --text valid.txt --variant teacher:window=752,sinks=4,nbits=8    in 8 bits, in the same memory
    t2r evaluate teacher rnn --text valid.txt --variant rnn:state=bfloat16            state rounded to bfloat16
    t2r evaluate teacher rnn --task hellaswag --task lambada_openai                   tasks of lm-eval
    t2r evaluate rnn --task mine --task-folder tasks                                  the task in tasks/mine.yaml
    t2r evaluate teacher rnn --src test.zh --ref test.en --outputs texts              BLEU and chrF, translations saved
    """
    from t2r.evaluation import evaluate as run
    from t2r.evaluation import tables

    with calm(quiet or as_json):
        results = run(
            models,
            text,
            source=src,
            reference=ref,
            beams=beams,
            length_penalty=length_penalty,
            bleu_tokenize=bleu_tokenize,
            source_language=source_language,
            target_language=target_language,
            outputs=outputs,
            tasks=task or [],
            task_folder=task_folder,
            variants=variant or [],
            window=window,
            stride=stride,
            limit=limit,
            batch_size=batch_size,
            teacher=teacher,
            generation=generation,
            distances=distance,
            trials=trials,
            dtype=dtype,
            device=device,
            progress=shows_progress(quiet or as_json),
        )
    if as_json:
        print_json(results)
    else:
        show(tables(results))
