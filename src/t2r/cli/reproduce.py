"""t2r reproduce"""

import signal
from dataclasses import asdict
from typing import Annotated, Any

import typer

from t2r.cli.common import AsJson, print_json
from t2r.errors import T2RError


def reproduce(
    name: Annotated[str | None, typer.Argument(help="A shipped experiment (see --list), or a YAML file.")] = None,
    data: Annotated[str | None, typer.Option(help="The folder with the texts that the experiment names.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER: where a model of the experiment is. Repeatable.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="The folder to work in. [default: runs/NAME]")] = None,
    step: Annotated[list[str] | None, typer.Option(help="Run only this step. Repeatable. [default: all]")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the experiments, their models and their texts.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run an experiment: the commands behind a published table, on your machine and your data.

    \b
    t2r reproduce --list
    t2r reproduce smollm2-pure --data texts --model smollm2=models/smollm2
    t2r reproduce ops-cpu --json

    Each step's command is printed before it runs. Stop it anywhere; the same command goes on where it was. The record,
    OUT/record.json, has the figures, the commands, the machine, the versions, and how long each step took.
    """
    from t2r.experiments import load_experiment, shipped_experiments
    from t2r.experiments import reproduce as run
    from t2r.experiments.data import TEXTS
    from t2r.experiments.tables import record_tables

    if list_:
        experiments = [load_experiment(known) for known in shipped_experiments()]
        if as_json:
            print_json([asdict(experiment) | {"texts": experiment.texts()} for experiment in experiments])
            return
        for experiment in experiments:
            print(f"{experiment.name}: {experiment.title}")
            for known, source in experiment.models.items():
                print(f"    --model {known}=FOLDER [default: {source}]")
            if texts := experiment.texts():
                print(f"    --data FOLDER with {', '.join(texts)}")
        print("\nTexts, each a file in the folder of --data, which may be compressed (.xz, .gz):")
        for text in TEXTS.values():
            raw = f" (or {' or '.join(text.raw)}, which is detokenized)" if text.raw else ""
            print(f"    {text.files[0]}{raw}: {text.source}")
        return
    if name is None:
        raise T2RError("name an experiment, or say --list")
    folders = {}
    for given in model or []:
        known, equals, folder = given.partition("=")
        if not equals or not known or not folder:
            raise T2RError(f"--model {given}: write NAME=FOLDER")
        folders[known] = folder
    signal.signal(signal.SIGTERM, _interrupt)  # or the command that a step has started would go on without us
    record = run(name, data_folder=data, models=folders, out=out, steps=step or [])
    if as_json:
        print_json(record)
    else:
        for table in record_tables(record):
            print(f"\n{table}", end="")


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
