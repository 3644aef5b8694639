"""Shared by all commands: flags made from options, and printing of results."""

import functools
import inspect
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from t2r.errors import TOLD_BY_ANY, T2RError
from t2r.options import Conversion, Option, RunOptions, SwapOptions, options_of
from t2r.storage import json_text

if TYPE_CHECKING:
    from rich.table import Table

# --- Options ------------------------------------------------------------------------------------------------


def flag(option: Option, *names: str, help: str = "", default: str | None = None) -> Any:
    """Return the flag of an option, with its help, default and check.

    `help` and `default` replace the option's own where a command differs."""
    words = option.default_words if default is None else default

    def checked(value: Any) -> Any:
        if value is not None:
            option.check(value)
        return value

    told = f"{help or option.help} [default: {words}]" if words else help or option.help
    callback = None if option.many else checked  # a list is checked after it is parsed
    return typer.Option(*names, help=told.replace("`", ""), show_default=False, callback=callback)


RUN = options_of(RunOptions)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress bars and no notes on stderr.")]
Model = Annotated[str, typer.Argument(help="A folder, or a model name on the Hugging Face hub.")]
Out = Annotated[str, typer.Argument(help="The output folder.")]
RunOut = Annotated[
    str, typer.Argument(help="The output folder. An unfinished run is kept in OUT.run and resumed from there.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing model in OUT.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Allow code from the model's repository to run.")
]
Dtype = Annotated[str, flag(RUN["dtype"])]
Device = Annotated[str, flag(RUN["device"])]
Limit = Annotated[int | None, flag(RUN["limit"])]
Bf16 = Annotated[bool | None, flag(options_of(Conversion)["bf16"])]
Compile = Annotated[bool | None, flag(options_of(Conversion)["compiled"], "--compile/--no-compile")]

SourceLanguage = Annotated[
    str | None,
    typer.Option(
        help="Source language of a multilingual translation model: a code of its tokenizer, such as zh, zho_Hans."
    ),
]
TargetLanguage = Annotated[
    str | None, typer.Option(help="Target language of a multilingual translation model (M2M100, NLLB, mBART).")
]


def takes(into: str, options: Iterable[Option]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add these options to a command as flags. Those that the user gave are passed in its argument `into`."""
    named = {option.flag.replace("-", "_"): option for option in options}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_options(**given: Any) -> None:
            chosen = {option.name: given.pop(flag) for flag, option in named.items()}
            chosen = {name: value for name, value in chosen.items() if value not in (None, [])}
            if "softmax_layers" in chosen:
                chosen["softmax_layers"] = parse_layers(chosen["softmax_layers"])
            command(**given, **{into: chosen})

        own = [p for p in inspect.signature(command).parameters.values() if p.name != into]
        kind = inspect.Parameter.KEYWORD_ONLY
        added = []
        for name, option in named.items():
            type_ = list[str] if option.repeated else str if option.many else option.type
            annotation = Annotated[type_ | None, flag(option, *option.flags)]  # type: ignore[valid-type]
            added.append(inspect.Parameter(name, kind, default=None, annotation=annotation))
        parameters = [p.replace(kind=kind) for p in own] + added
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_options

    return decorate


def swap_options() -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add all options of a swap to a command, passed in its argument `options`."""
    return takes("options", options_of(SwapOptions).values())


def training_options(group: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add all options of a group to a command, passed in its argument `options`. Those of the swap are the last."""
    of_swap = options_of(SwapOptions)
    return takes("options", sorted(options_of(group).values(), key=lambda option: option.name in of_swap))


def parse_layers(text: str) -> list[int] | str:
    """Parse layer numbers: 0-3,7 -> [0, 1, 2, 3, 7]. auto:3 is returned as it is, for `convert`."""
    if text.startswith("auto"):
        return text
    layers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise T2RError(f"softmax_layers must be layer numbers, such as 1,5,9 or 0-3,7; got {text!r}")
        layers += range(int(found[1]), int(found[2] or found[1]) + 1)
    return layers


# --- Printing -----------------------------------------------------------------------------------------------


class OutputError(Exception):
    """Standard output cannot be written. Not an OSError: typer and rich exit with code 1 if a pipe is closed."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"standard output cannot be written: {cause.strerror or cause}")
        self.closed = isinstance(cause, BrokenPipeError)


class Output:
    """A text stream whose write errors are OutputError. Characters that its encoding lacks are escaped."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        try:
            try:
                return self.stream.write(text)
            except UnicodeEncodeError as error:
                return self.stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except OSError as error:
            raise OutputError(error) from error

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            raise OutputError(error) from error


@contextmanager
def checked_output() -> Iterator[None]:
    """Raise OutputError if standard output cannot be written, in the block or at its end."""
    stream = sys.stdout
    if stream is None:  # closed by the caller
        yield
        return
    sys.stdout = Output(stream)
    try:
        yield
        sys.stdout.flush()
    finally:
        sys.stdout = stream
        try:
            stream.flush()
        except OSError:  # Python would report at its exit what could not be written
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print JSON. NaN and infinities, which JSON does not have, become null."""
    text = json_text(value, indent)
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(json.loads(text), indent=indent)  # with the escapes of JSON
    print(text, flush=True)


def shows_progress(quiet: bool) -> bool:
    """Return whether progress bars are shown: only in a terminal, never in a file or a pipe."""
    return not quiet and sys.stderr.isatty()


def show(parts: "Iterable[Table | str]") -> None:
    """Print lines of text and tables."""
    from rich.console import Console

    from t2r import terminal

    console = Console(highlight=False, markup=False, emoji=False)  # a path such as out[v2] is shown as it is
    for part in parts:
        terminal.show(part, console)


def show_report(report: Any, tables: "Callable[[Any], Iterable[Table | str]]", as_json: bool) -> None:
    """Print a report, a dataclass or a list of them, as JSON or by its tables."""
    reports = report if isinstance(report, list) else [report]
    if as_json:
        found = [asdict(each) for each in reports]
        print_json(found if isinstance(report, list) else found[0])
    else:
        show([part for each in reports for part in tables(each)])


def show_results(results: dict[str, Any], summary: Callable[..., Any], out: str, as_json: bool, quiet: bool) -> None:
    """Print the results of training. With several processes, only the first prints."""
    if not is_first_process():
        return
    if as_json:
        print_json(results)
    elif not quiet:
        table = summary(results)
        nothing = "Nothing was measured: give a text for it (--valid; for translation, --valid-src and --valid-tgt)."
        measured = table if table.rows else nothing
        how = "merged (it cannot be trained further), and saved" if results.get("merged") else "saved"
        # What is wrong with a result is the last line.
        show([measured, f"{how} in {out}", *filter(None, [results.get("advice")])])


def is_first_process() -> bool:
    """Return whether this is the only process, or the first of those started by a launcher."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


@contextmanager
def calm(quiet: bool, info: bool = False) -> Iterator[None]:
    """Keep stderr clean: libraries log errors only, and show progress only in a terminal.

    Warnings of t2r are printed one per line unless `quiet`; with `info`, its info messages too. With several processes,
    only the first prints them, except what one tells for all."""
    from transformers.utils import logging as of_transformers

    ours, hub = logging.getLogger("t2r"), logging.getLogger("huggingface_hub")
    notes = logging.StreamHandler(sys.stderr)
    notes.setFormatter(logging.Formatter("t2r: note: %(message)s"))
    notes.setLevel(logging.ERROR if quiet else logging.NOTSET)
    first = is_first_process()
    notes.addFilter(lambda record: first or record.levelno >= logging.ERROR or hasattr(record, TOLD_BY_ANY))
    before = of_transformers.get_verbosity(), hub.level, of_transformers.is_progress_bar_enabled()
    level = ours.level
    if info:
        ours.setLevel(logging.INFO)
    ours.addHandler(notes)
    of_transformers.set_verbosity_error()
    hub.setLevel(logging.ERROR)
    if quiet or not sys.stderr.isatty():
        of_transformers.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        ours.removeHandler(notes)
        ours.setLevel(level)
        of_transformers.set_verbosity(before[0])
        hub.setLevel(before[1])
        if before[2]:
            of_transformers.enable_progress_bar()
