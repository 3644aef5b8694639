"""What commands share: options that mean the same everywhere, and how to print."""

import functools
import inspect
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from t2r.errors import T2RError

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars and no notes on stderr.")]
Model = Annotated[str, typer.Argument(help="A folder, or a name on the Hugging Face hub.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")]
Dtype = Annotated[str, typer.Option(help="auto (as saved), float32, bfloat16 or float16.")]


# --- The options of T2RConfig -------------------------------------------------------------------------------
# Told once, for all commands that swap. Importing T2RConfig to read them would cost seconds of --help.


def _layers(text: str | None) -> list[int] | str | None:
    """1,5,9 -> [1, 5, 9]; auto:3 is for `convert` to find out"""
    if text is None or text.startswith("auto"):
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise T2RError(f"softmax_layers: give numbers of layers, such as 1,5,9; got {text!r}") from None


SWAP_OPTIONS: dict[str, tuple[type, Any]] = {
    "feature_map": (str, typer.Option(help="t2r, elu, rfa, performer or hedgehog. [default: t2r]")),
    "feature_size": (int, typer.Option(help="Rows of the state. [default: the map's own]")),
    "cross_feature_size": (
        int,
        typer.Option(help="The same for cross attention. [default: as --feature-size]"),
    ),
    "softmax_layers": (str, typer.Option(help="Layers that stay softmax attention, from 0: 1,5,9.")),
    "softmax_every": (int, typer.Option(help="Keep every n-th layer, counted from the top one.")),
    "shared": (bool, typer.Option(help="Queries and keys share one map. [default: shared]")),
    "grouped": (bool, typer.Option(help="Query heads of a group share a state. [default: grouped]")),
    "decay": (bool, typer.Option(help="Each feature forgets, at a learned rate. [default: no-decay]")),
    "rotary": (bool, typer.Option(help="Maps see rotated queries and keys, if any are. [default: rotary]")),
    "init": (str, typer.Option(help="How maps start: paper or identity. [default: the map's own]")),
    "activation": (str, typer.Option(help="Of the t2r map. [default: relu]")),
    "key_weights": (bool, typer.Option(help="Each key counts by a learned weight. [default: no-key-weights]")),
    "freeze_feature_map": (bool, typer.Option("--freeze-feature-map", help="Do not train the maps.")),
    "seed": (int, typer.Option(help="Of everything drawn for the maps. [default: 0]")),
}


def swap_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all the options of T2RConfig. It finds those that the user gave in `options`."""

    @functools.wraps(command)
    def with_options(**given: Any) -> None:
        options = {name: given.pop(name) for name in SWAP_OPTIONS}
        options["softmax_layers"] = _layers(options["softmax_layers"])
        command(**given, options={name: value for name, value in options.items() if value is not None})

    own = [p for p in inspect.signature(command).parameters.values() if p.name != "options"]
    kind = inspect.Parameter.KEYWORD_ONLY
    added = [
        inspect.Parameter(name, kind, default=None, annotation=Annotated[type_ | None, option])
        for name, (type_, option) in SWAP_OPTIONS.items()
    ]
    parameters = [p.replace(kind=kind) for p in own] + added
    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options


# --- Printing -----------------------------------------------------------------------------------------------


def show(parts: Iterable[object]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))


def show_results(results: dict[str, Any], summary: Callable[..., Any], out: str, as_json: bool, quiet: bool) -> None:
    """What came of a training, said by one of its processes."""
    if os.environ.get("RANK", "0") != "0":
        return
    if as_json:
        print(json.dumps(results, indent=2))
    elif not quiet:
        table = summary(results)
        measured = table if table.rows else "Nothing was measured: give --valid to see the perplexity."
        show([measured, f"saved in {out}"])


@contextmanager
def calm(quiet: bool) -> Iterator[None]:
    """Leave stderr to us: libraries speak only of errors, and show their progress only to a person who looks.

    What t2r itself has to note is a line each, unless `quiet`."""
    from transformers.utils import logging as of_transformers

    ours, hub = logging.getLogger("t2r"), logging.getLogger("huggingface_hub")
    notes = logging.StreamHandler(sys.stderr)
    notes.setFormatter(logging.Formatter("t2r: note: %(message)s"))
    notes.setLevel(logging.ERROR if quiet else logging.NOTSET)
    before = of_transformers.get_verbosity(), hub.level, of_transformers.is_progress_bar_enabled()
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
        of_transformers.set_verbosity(before[0])
        hub.setLevel(before[1])
        if before[2]:
            of_transformers.enable_progress_bar()
