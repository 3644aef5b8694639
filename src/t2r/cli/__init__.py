"""The command line: each command parses, calls one function, and prints.

A module a command, each registered here by a line. Commands import what they call inside themselves, so that
`t2r --help` answers before torch could load.
"""

import os
import sys
from typing import Annotated

import typer

from t2r import __version__
from t2r.cli import bench, convert, evaluate, generate, import_, info, inspect, merge, pretrain, reproduce, swap
from t2r.cli.stages import ShowsRecipe
from t2r.errors import T2RError

app = typer.Typer(
    help="Turn a pretrained transformer into an RNN.",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich would take longer than all the rest of --help
)
app.command(cls=ShowsRecipe)(convert.convert)
app.command()(pretrain.pretrain)
app.command()(swap.swap)
app.command()(merge.merge)
app.command()(inspect.inspect)
app.command()(generate.generate)
app.command()(evaluate.evaluate)
app.command(name="import")(import_.import_)
app.command()(reproduce.reproduce)
app.command()(info.info)
app.add_typer(bench.app, name="bench")

INTERRUPTED = 130
"""What a shell expects of a command ended by Ctrl-C."""
CLOSED = 141
"""And of one whose output nobody reads any more."""


def main() -> None:
    """Run a command; a mistake of the user's is one line on stderr and exit code 2, without a traceback."""
    try:
        arguments = sys.argv[1:] or ["--help"]
        check_arguments(arguments)
        sys.exit(app(arguments, prog_name="t2r", standalone_mode=False))
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(CLOSED)
    except Exception as error:
        if os.environ.get("T2R_DEBUG") or (message := _mistake(error)) is None:
            raise
    print(f"t2r: {message}", file=sys.stderr)
    sys.exit(2)


def check_arguments(arguments: list[str]) -> None:
    """Python holds bytes that are not UTF-8 as characters that are none; nothing can be done with them later."""
    for number, word in enumerate(arguments, 1):
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise T2RError(f"argument {number} is not UTF-8: {word!a}") from error


def _mistake(error: Exception) -> str | None:
    """What the user did wrong, or None if the error is not of that kind."""
    if isinstance(error, T2RError):
        return " ".join(str(error).split())
    # Typer's own complaints. They are known by their method, not by their class, because that is a class of
    # click in older versions of typer and a private one in newer.
    if hasattr(error, "format_message"):
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "t2r"
        return f"{error.format_message().rstrip('.')} (see '{command} --help')"
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
        os.environ["T2R_DEBUG"] = "1"  # so that main() sees it, and processes we start do too
