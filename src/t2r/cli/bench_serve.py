"""t2r bench serve"""

import os
from typing import Annotated

import typer

from t2r.cli.common import RUN, AsJson, Device, Dtype, Quiet, calm, show_report, shows_progress
from t2r.errors import T2RError


def bench_serve(
    model: Annotated[str | None, typer.Argument(help="The model to serve: a folder, or a hub name.")] = None,
    teacher: Annotated[
        str | None, typer.Option(help="A second model in the same server, such as its teacher: a folder or a hub name.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Measure the server at this address instead, with the key in T2R_API_KEY if there is one."),
    ] = None,
    users: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of users. Repeatable. [default: 1 8 64]")
    ] = None,
    prompt: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Tokens of a prompt. Repeatable: users take them in turn. [default: 20 600 60 2000 200]"
        ),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that each request generates.")] = 32,
    after: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Also measure a turn after this number of tokens. Repeatable. [default: 1000 8000]"),
    ] = None,
    gap: Annotated[float, typer.Option(min=0, help="Milliseconds between the arrivals of two users.")] = 50.0,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows of the engine. [default: those of t2r serve]")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Number of rounds. The median is reported.")] = 3,
    dtype: Dtype = RUN["dtype"].default,
    device: Device = RUN["device"].default,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Measure a server over HTTP: tokens per second, waiting times, turns of a conversation, memory of a user.

    The server is a process of its own. A turn is measured from a state, and compared with reading everything again.

    \b
    t2r bench serve smollm2-rnn --teacher smollm2
    t2r bench serve smollm2-rnn --users 1 --users 256 --after 32000
    t2r bench serve --url http://127.0.0.1:8000
    """
    if (model is None) == (url is None):
        raise T2RError("give a model to serve, or the --url of a server")
    if url is not None and (teacher is not None or rows is not None):
        raise T2RError("--teacher and --rows are options of a server that is started here: omit them with --url")
    from t2r.bench import serving
    from t2r.data.progress import progress_bar

    counts, lengths, later = users or serving.USERS, prompt or serving.PROMPTS, after or serving.AFTER
    options = {"prompts": lengths, "new_tokens": new_tokens, "after": later, "gap": gap, "repeats": repeats}
    key = os.environ.get(serving.KEY)

    def measured(address: str) -> serving.Report:
        models = 1 + (teacher is not None)
        total = models * (len(counts) * (1 + repeats) + 1 + len(later))
        with progress_bar("measuring", total, "rounds", shown=shows_progress(quiet)) as set_done:
            seen: list[str] = []

            def tell(line: str) -> None:
                set_done(len(seen))
                seen.append(line)

            return serving.run(address, counts, key=key, progress=tell, **options)

    with calm(quiet, info=True):
        if url is not None:
            report = measured(url)
        else:
            assert model is not None
            longest = max(*lengths, *later) + 64 * new_tokens
            chosen = ["--dtype", dtype, "--device", device, "--max-queue", str(max(256, *counts))]
            chosen += ["--max-length", str(max(32768, longest))]
            chosen += [] if teacher is None else ["--teacher", teacher]
            chosen += [] if rows is None else ["--rows", str(rows)]
            with serving.started(model, chosen, key) as address:
                report = measured(address)
    show_report(report, serving.tables, as_json)
