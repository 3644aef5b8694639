"""The command line. Each command parses its arguments, calls one function, and prints the result.

Each command is a module, registered here by one line. Commands import heavy libraries inside the function, so that
`t2r --help` does not import torch.
"""

import os
import sys
from typing import Annotated

import typer

from t2r._version import __version__
from t2r.capacity import shortage
from t2r.cli import (
    analyze,
    average,
    bench,
    bench_serve,
    convert,
    evaluate,
    generate,
    import_,
    info,
    inspect,
    merge,
    plan,
    pretrain,
    report,
    reproduce,
    serve,
    swap,
    teach,
)
from t2r.cli.common import OutputError, checked_output
from t2r.cli.stages import ShowsRecipe
from t2r.errors import T2RError

app = typer.Typer(
    help="Turn a pretrained transformer into an RNN.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich would take most of the time of --help
)
app.command(cls=ShowsRecipe)(convert.convert)
app.command()(pretrain.pretrain)
app.command()(swap.swap)
app.command()(merge.merge)
app.command()(average.average)
app.command()(teach.teach)
app.command(cls=ShowsRecipe)(inspect.inspect)
app.command()(plan.plan)
app.command()(generate.generate)
app.command()(serve.serve)
app.command()(evaluate.evaluate)
app.command()(analyze.analyze)
app.command(name="import")(import_.import_)
app.command()(reproduce.reproduce)
app.command()(report.report)
app.command()(info.info)
bench.app.command("serve")(bench_serve.bench_serve)
app.add_typer(bench.app, name="bench")

INTERRUPTED = 130
"""The exit code of a command that was interrupted by Ctrl-C (128 + SIGINT)."""
CLOSED = 141
"""The exit code of a command whose output pipe was closed (128 + SIGPIPE)."""


def main() -> None:
    """Run a command. A user error prints one line on stderr, without a traceback, and exits with code 2."""
    try:
        arguments = sys.argv[1:] or ["--help"]
        check_arguments(arguments)
        with checked_output():
            code = app(arguments, prog_name="t2r", standalone_mode=False)
        sys.exit(code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    except Exception as error:
        if isinstance(error, OutputError) and error.closed:
            sys.exit(CLOSED)
        if os.environ.get("T2R_DEBUG") or (message := _mistake(error)) is None:
            raise
    if is_first_to_tell():
        print(f"t2r: {message}", file=sys.stderr)
    sys.exit(2)


def is_first_to_tell() -> bool:
    """Return whether this process prints an error: of several processes, one does."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return True
    from t2r.training.loop.processes import first_to_tell

    try:
        return first_to_tell()
    except T2RError:  # the variables of the launcher are wrong, which is what is told
        return True


def check_arguments(arguments: list[str]) -> None:
    """Raise T2RError for an argument that is not UTF-8. Python decodes such bytes to surrogates, which fail later."""
    for number, word in enumerate(arguments, 1):
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise T2RError(f"argument {number} is not UTF-8: {word!a}") from error


def _mistake(error: Exception) -> str | None:
    """Return the message of a user error, of a lack of memory or of other processes, or None for any other error."""
    if isinstance(error, T2RError | OutputError):
        return " ".join(str(error).split())
    if (message := shortage(error)) is not None:
        return message
    # Usage errors of typer are recognized by their method: their class is click's in older versions of typer and a
    # private one in newer versions.
    if hasattr(error, "format_message"):
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "t2r"
        return f"{error.format_message().rstrip('.')} (see '{command} --help')"
    if os.environ.get("WORLD_SIZE", "1") != "1":
        from t2r.training.loop.processes import lost_another

        if lost_another(error):  # outside of a training run, which says how it is resumed
            return "another process of this command has ended, so this one does too: start all of them again"
    return None


def _print_version(asked: bool) -> None:
    if asked:
        print(f"t2r {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of any error (or set T2R_DEBUG=1).")
    ] = False,
) -> None:
    if debug:
        os.environ["T2R_DEBUG"] = "1"  # read by main() and inherited by child processes
