"""t2r evaluate"""

import json
from typing import Annotated, Any

import typer

from t2r.cli.common import AsJson, Quiet, calm, show
from t2r.errors import T2RError


def evaluate(
    models: Annotated[list[str], typer.Argument(help="Folders or hub names; the others are compared with the first.")],
    text: Annotated[str | None, typer.Option(help="The text to score: a file or a glob.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="A task of lm-eval (an extra), too. Repeatable.")] = None,
    task_folder: Annotated[str | None, typer.Option(help="Where YAML files of your own tasks are.")] = None,
    window: Annotated[int, typer.Option(help="Tokens of a window.")] = 512,
    stride: Annotated[int, typer.Option(help="How far a window is advanced; so many tokens of each are scored.")] = 256,
    limit: Annotated[int | None, typer.Option(help="Score so many windows, or questions of a task, only.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Windows at a time. [default: by the device]")] = None,
    teacher: Annotated[str | None, typer.Option(help="Measure the KL to this model instead of the first.")] = None,
    generation: Annotated[bool, typer.Option(help="Also look at what it writes: repetition and recall.")] = True,
    dtype: Annotated[str, typer.Option(help="auto (as saved), float32, bfloat16 or float16.")] = "float32",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Perplexity by the paper's protocol, bits per byte, KL to the first model, and what likelihood hides.

    \b
    t2r evaluate teacher rnn --text valid.txt                                 side by side
    t2r evaluate teacher rnn --task hellaswag --task lambada_openai           tasks of lm-eval
    t2r evaluate rnn --task mine --task-folder tasks                          your own, in tasks/mine.yaml
    """
    from t2r.evaluation import evaluate as run
    from t2r.evaluation import find_tasks, harness, tables

    if text is None and not task:
        raise T2RError("nothing to measure: give --text FILE, --task NAME, or both")
    if task:
        find_tasks(task, task_folder)  # and not after the text has been measured
    with calm(quiet or as_json):
        results: list[dict[str, Any]] = [{"model": model} for model in models]
        if text is not None:
            results = run(
                models,
                text,
                window=window,
                stride=stride,
                limit=limit,
                batch_size=batch_size,
                teacher=teacher,
                generation=generation,
                dtype=dtype,
                device=device,
                progress=not (quiet or as_json),
            )
        if task:
            common: dict[str, Any] = {"batch_size": batch_size or 8, "dtype": dtype, "device": device, "limit": limit}
            for result in results:
                result["tasks"] = harness(result["model"], task, task_folder=task_folder, **common)
    if as_json:
        print(json.dumps(results, indent=2))
    else:
        show(tables(results))
