"""t2r reproduce"""

import signal
from dataclasses import asdict
from typing import Annotated, Any

import typer

from t2r.cli.common import AsJson, print_json
from t2r.errors import T2RError


def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="The name of a shipped experiment (see --list), or a YAML file.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Folder with the texts that the experiment uses.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="NAME=FOLDER: the folder of a model that the experiment uses. Repeatable.")
    ] = None,
    out: Annotated[str | None, typer.Option(help="The working folder. [default: runs/NAME]")] = None,
    step: Annotated[list[str] | None, typer.Option(help="Run only this step. Repeatable. [default: all]")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the experiments, their models and their texts.")] = False,
    as_json: AsJson = False,
) -> None:
    """Run the commands behind a published table.

    \b
    t2r reproduce --list
    t2r reproduce smollm2-pure --data texts --model smollm2=models/smollm2
    t2r reproduce ops-cpu --json

    Each command is printed before it runs. An interrupted experiment is resumed by the same command. OUT/record.json
    records the results, the commands, the machine, the versions, and the time of each step.
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
        print("\nTexts are files in the --data folder, optionally compressed (.xz, .gz):")
        for text in TEXTS.values():
            raw = f" (or {' or '.join(text.raw)}, which is detokenized)" if text.raw else ""
            print(f"    {text.files[0]}{raw}: {text.source}")
        return
    if name is None:
        raise T2RError("no experiment given: see --list")
    folders = {}
    for given in model or []:
        known, equals, folder = given.partition("=")
        if not equals or not known or not folder:
            raise T2RError(f"--model {given}: write NAME=FOLDER")
        folders[known] = folder
    signal.signal(signal.SIGTERM, _interrupt)  # otherwise the command of the current step would keep running
    record = run(name, data_folder=data, models=folders, out=out, steps=step or [])
    if as_json:
        print_json(record)
    else:
        for table in record_tables(record):
            print(f"\n{table}", end="")


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
