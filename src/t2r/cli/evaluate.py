"""t2r evaluate"""

from typing import Annotated

import typer

from t2r.cli.common import RUN, AsJson, Device, Quiet, calm, flag, print_json, show, shows_progress


def evaluate(
    models: Annotated[list[str], typer.Argument(help="Folders or hub names; the others are compared with the first.")],
    text: Annotated[list[str] | None, typer.Option(help="A text to score: a file or a glob. Repeatable.")] = None,
    variant: Annotated[
        list[str] | None,
        typer.Option(
            help="A further row: MODEL:window=TOKENS,sinks=TOKENS (softmax attention sees so many last and first "
            "tokens) or MODEL:state=DTYPE,every=TOKENS (the recurrent state is rounded). Repeatable."
        ),
    ] = None,
    task: Annotated[list[str] | None, typer.Option(help="A task of lm-eval (an extra), too. Repeatable.")] = None,
    task_folder: Annotated[str | None, typer.Option(help="Where YAML files of your own tasks are.")] = None,
    src: Annotated[str | None, typer.Option(help="Of translation models: a file of sources, line by line.")] = None,
    ref: Annotated[str | None, typer.Option(help="The references of --src: BLEU and chrF are measured.")] = None,
    beams: Annotated[int, typer.Option(min=1, max=1000, help="Beams of the search that translates --src.")] = 5,
    length_penalty: Annotated[float, typer.Option(help="Of the beam search.")] = 0.6,
    bleu_tokenize: Annotated[
        str, typer.Option(help="sacrebleu's tokenizer for BLEU, such as zh where the references are Chinese.")
    ] = "13a",
    outputs: Annotated[str | None, typer.Option(help="A folder for the translations, a file for each model.")] = None,
    window: Annotated[
        list[int] | None,
        typer.Option(help=f"{RUN['window'].help} Repeatable. [default: {RUN['window'].default_words}]"),
    ] = None,
    stride: Annotated[int | None, flag(RUN["stride"])] = None,
    limit: Annotated[
        int | None, flag(RUN["limit"], help="Score so many windows, questions of a task, or lines of --src only.")
    ] = None,
    batch_size: Annotated[
        int | None, flag(RUN["batch_size"], help="Windows at a time.", default="by the device")
    ] = None,
    teacher: Annotated[str | None, typer.Option(help="Measure the KL to this model instead of the first.")] = None,
    generation: Annotated[bool, typer.Option(help="Also look at what it writes: repetition and recall.")] = True,
    distance: Annotated[
        list[int] | None,
        typer.Option(help="Tokens over which recall is measured. Repeatable. [default: up to half a window]"),
    ] = None,
    trials: Annotated[int, typer.Option(min=1, help="Of recall, at each distance.")] = 32,
    dtype: Annotated[str, flag(RUN["dtype"], default="float32")] = "float32",
    device: Device = RUN["device"].default,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Perplexity by the paper's protocol, bits per byte, KL to the first model, and what likelihood hides; of
    translation models, BLEU and chrF.

    \b
    t2r evaluate teacher rnn --text valid.txt                                 side by side
    t2r evaluate teacher rnn --text a.txt --text b.txt --window 512 --window 2048
    t2r evaluate teacher rnn --text valid.txt --variant teacher:window=386,sinks=4    a teacher that forgets
    t2r evaluate teacher rnn --text valid.txt --variant rnn:state=bfloat16            a state in half precision
    t2r evaluate teacher rnn --task hellaswag --task lambada_openai           tasks of lm-eval
    t2r evaluate rnn --task mine --task-folder tasks                          your own, in tasks/mine.yaml
    t2r evaluate teacher rnn --src test.zh --ref test.en --outputs texts      translations, side by side
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
