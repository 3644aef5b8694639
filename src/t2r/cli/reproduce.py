"""t2r reproduce"""

import signal
from typing import Annotated, Any

import typer

from t2r.cli.common import AsJson, print_json
from t2r.errors import T2RError
from t2r.storage import understood


def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="The name of a shipped experiment (see --list), or a YAML file.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Folder with the texts that the experiment uses.")] = None,
    scale: Annotated[
        str | None, typer.Option(help="The scale, for an experiment with scales: smoke, tiny, small or paper.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=FOLDER: the folder of a model that the experiment uses, or in place of the output of a step, "
            "which is then not run. Repeatable."
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="The working folder. [default: runs/NAME, or runs/NAME-SCALE]")
    ] = None,
    step: Annotated[
        list[str] | None,
        typer.Option(help="Run only this step, and steps whose output it requires. Repeatable. [default: all]"),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            help="AXIS=LABEL: run only these cells of a grid. Repeatable; several labels of one axis are all run. "
            "[default: all]"
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Seeds of the cells of a grid.")] = 1,
    record: Annotated[
        list[str] | None,
        typer.Option(help="A record, or the name of a published one, whose steps are not run again. Repeatable."),
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the experiments, or the steps of the named one, and their texts.")
    ] = False,
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code",
            help="Allow steps to run code of others: of a model's repository, or tasks of lm-eval in a folder.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run the commands behind a published table.

    An experiment file is a program: its steps are t2r commands, which read any file. They write only in the working
    folder, and run code of others only with --trust-remote-code.

    \b
    t2r reproduce --list
    t2r reproduce table1 --scale small --list                  its steps, and the texts it requires
    t2r reproduce smollm2-pure --data texts --model smollm2=models/smollm2
    t2r reproduce ops-cpu --json
    t2r reproduce table1 --scale smoke                         a table of the paper, at a scale for a CPU
    t2r reproduce table1 --scale small --data texts            for one GPU
    t2r reproduce table1 --scale small --data texts --where start=pretrained --seeds 3
    t2r reproduce table1 --scale small --data texts --record table1-small.json --model teacher=models/teacher

    Each command is printed before it runs. An interrupted experiment is resumed by the same command. OUT/record.json
    (with scales OUT/NAME-SCALE.json) records the results, the commands, the machine, the versions, and the time of
    each step.

    Several processes may run the same command at the same time, on one machine or on several with a shared folder: each
    takes the next step that no other works on.
    """
    from t2r.experiments import listing
    from t2r.experiments import reproduce as run
    from t2r.experiments.experiment import load_experiment, scales_of
    from t2r.experiments.record import claims_of
    from t2r.experiments.tables import record_tables

    if list_:
        named = None if name is None else load_experiment(name, scale or next(iter(scales_of(name)), None), seeds)
        if as_json:
            print_json(listing.as_dicts() if named is None else listing.as_dict(named))
        else:
            print(*(listing.lines() if named is None else listing.lines_of(named)), sep="\n")
        return
    if name is None:
        raise T2RError("no experiment given: see --list")
    signal.signal(signal.SIGTERM, _interrupt)  # otherwise the command of the current step would keep running
    made = run(
        name,
        scale=scale,
        data_folder=data,
        models={name: folders[-1] for name, folders in _pairs("--model", "NAME=FOLDER", model).items()},
        out=out,
        steps=step or [],
        where=_pairs("--where", "AXIS=LABEL", where),
        seeds=seeds,
        records=record or [],
        trust_remote_code=trust_remote_code,
    )
    if as_json:
        print_json(made)
        return
    with understood("the record"):
        for table in record_tables(made):
            print(f"\n{table}", end="")
        if claims := claims_of(made):
            print("\nClaims of the paper in this record:", *claims, sep="\n- ")


def _pairs(option: str, form: str, given: list[str] | None) -> dict[str, list[str]]:
    """Parse options such as NAME=FOLDER. A name may have several values."""
    found: dict[str, list[str]] = {}
    for text in given or []:
        name, _, value = text.partition("=")
        if not name or not value:
            raise T2RError(f"{option} {text}: write {form}")
        found.setdefault(name, []).append(value)
    return found


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
