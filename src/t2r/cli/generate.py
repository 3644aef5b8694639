"""t2r generate"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from t2r.cli.chat import ENDS, banner, converse, tell
from t2r.cli.common import (
    RUN,
    Device,
    Dtype,
    Model,
    Quiet,
    Revision,
    SourceLanguage,
    TargetLanguage,
    TrustRemoteCode,
    calm,
    flag,
    print_json,
    shows_progress,
    takes,
)
from t2r.cli.remote import Remote, RemoteConversation, complete, fields_of, is_remote
from t2r.errors import T2RError
from t2r.options import GenerationOptions, options_of
from t2r.storage import kind_of


class Given(NamedTuple):
    """What the user gave to the command."""

    prompts: list[str]
    document: str
    """The same text, unchanged, for a state."""


@takes("options", options_of(GenerationOptions).values())
def generate(
    model: Model,
    options: dict[str, Any],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            help="Prompts, or text to translate. [default: the lines of --file or of standard input; in a terminal, "
            "start a chat]"
        ),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="A file of prompts, one per line.")] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Treat prompts as messages, formatted with the model's chat template.")
    ] = False,
    batch_size: Annotated[int, flag(RUN["batch_size"], help="Prompts per batch.")] = RUN["batch_size"].default,
    seed: Annotated[int | None, flag(RUN["seed"])] = None,
    load_state: Annotated[
        Path | None,
        typer.Option(help="Continue from a saved state, of a document or a chat, instead of reading it again."),
    ] = None,
    save_state: Annotated[
        Path | None,
        typer.Option(
            help="Read the whole input as one document and save the state to this file. Generates nothing. With "
            "--chat, the document begins a message; in a terminal, the chat is saved after every answer."
        ),
    ] = None,
    source_language: SourceLanguage = None,
    target_language: TargetLanguage = None,
    dtype: Dtype = RUN["dtype"].default,
    device: Device = RUN["device"].default,
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per prompt, with speed and state size.")
    ] = False,
) -> None:
    """Complete or translate prompts.

    The model may be swapped or not, or the address of a server (t2r serve). Only generated text is printed: streamed
    for one prompt, one line each for several.
    In a terminal, without a prompt, it starts a chat.

    To read a long document once and query it many times, save its state with --save-state and use --load-state. With a
    chat model, use --chat both times. A chat that was saved is resumed by --load-state.
    """
    given = _given(prompts, file)
    if is_remote(model):
        refused: dict[str, Any] = {"--json": as_json, "--load-state": given and load_state}
        refused |= {"--save-state": given and save_state}
        refused |= {"--source-language": source_language, "--target-language": target_language}
        _on_server(model, given, chat, fields_of(options, seed), load_state, save_state, refused, quiet)
        return
    if save_state is not None:
        _check_place(save_state, file)
        if given is None and not chat:
            raise T2RError(
                "no document: give one as an argument, with --file, or on standard input, or --chat to save a chat"
            )

    from t2r.generation.chat import Conversation
    from t2r.generation.state import describe_state, read_document, refuse_stateless
    from t2r.generation.text import generate as run
    from t2r.hub import load, need_tokenizer

    with calm(quiet or as_json):
        hub: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        loaded = load(model, dtype=dtype, device=device, **hub)
        tokenizer = need_tokenizer(model, **hub)
        state: Any = None
        if load_state is not None or save_state is not None:
            refuse_stateless(loaded)
        if load_state is not None:
            state = loaded.load_state(load_state)
        if given is None:
            conversation = Conversation(loaded, tokenizer, state, seed=seed, **options)
            if not quiet:
                tell(banner(model, conversation, load_state, save_state))
            converse(conversation, save_state, _write)
            return
        if save_state is not None:
            with _progress(quiet or as_json) as on_tokens:
                state = read_document(loaded, tokenizer, given.document, state, on_tokens, chat=chat)
            state.save(save_state)
            if as_json or not quiet:
                _say(describe_state(save_state), save_state, as_json)
            return
        own = loaded.generation_config
        ways = [options.get(name) or getattr(own, name) or 1 for name in ("num_beams", "num_return_sequences")]
        stream = len(given.prompts) == 1 and not as_json and ways == [1, 1]

        def show(completion: Any) -> None:
            if as_json:
                print_json(asdict(completion), indent=None)
            elif stream:
                print()
            else:
                for text in (completion.text, *completion.alternatives):
                    print(" ".join(text.splitlines()), flush=True)

        run(
            loaded,
            given.prompts,
            tokenizer=tokenizer,
            batch_size=batch_size,
            chat=chat,
            seed=seed,
            on_text=_write if stream else None,
            on_completion=show,
            state=state,
            source_language=source_language,
            target_language=target_language,
            **options,
        )


def _on_server(
    url: str,
    given: Given | None,
    chat: bool,
    fields: dict[str, Any],
    load_state: Path | None,
    save_state: Path | None,
    refused: dict[str, Any],
    quiet: bool,
) -> None:
    """Complete prompts, or chat, on a server."""
    for flag_, value in refused.items():
        if value:
            raise T2RError(f"{flag_} is not possible with the address of a server: omit it, or give a model")
    remote = Remote(url)
    if given is None:
        with remote.understood():
            (name, *_) = [each["id"] for each in remote.json("/v1/models")["data"]]
        conversation = RemoteConversation(remote, fields, load_state)
        if not quiet:
            tell(f"{name} at {remote.url}.\n{ENDS}, /help lists commands.")
        converse(conversation, save_state, _write)
        return
    for prompt in given.prompts:
        pieces = complete(remote, prompt, chat, fields) if prompt.strip() else iter(())
        if len(given.prompts) == 1:
            for piece in pieces:
                _write(piece)
            print()
        else:
            print(" ".join("".join(pieces).splitlines()), flush=True)


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _say(facts: dict[str, Any], path: Path, as_json: bool) -> None:
    if as_json:
        print_json(facts, indent=None)
    else:
        print(f"read {facts['tokens']:,} tokens; saved a state of {facts['bytes']:,} bytes in {path}")


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on stderr, in a terminal only."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=not shows_progress(quiet)) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _check_place(path: Path, file: Path | None) -> None:
    """Raise T2RError if a state cannot be saved here. The state is saved last, so this is checked first.

    It may replace the state that it continues."""
    from t2r.attention.state_file import STATE

    STATE.check(path, inputs=[file])
    if kind_of(path.absolute().parent) != "folder":
        raise T2RError(f"cannot save the state: the folder {path.absolute().parent} does not exist")


def _given(arguments: list[str] | None, file: Path | None) -> Given | None:
    """Return the arguments, or the lines of the file or of standard input. None: start a chat."""
    if arguments and file is not None:
        raise T2RError("give prompts as arguments or with --file, not both")
    if arguments:
        given, where = Given(arguments, "\n".join(arguments)), "the arguments"
    elif file is not None:
        try:
            text = file.read_bytes().decode("utf-8")
        except OSError as error:
            raise T2RError(f"{file} cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise T2RError(f"{file} cannot be read: {error}") from error
        given, where = _lines(text), str(file)
    elif sys.stdin is None or sys.stdin.isatty():
        return None
    else:
        given, where = _lines(_standard_input()), "standard input"
    if not any(prompt.strip() for prompt in given.prompts):
        raise T2RError(f"no prompt in {where}: give one per line, not all of them blank")
    return given


def _lines(text: str) -> Given:
    """Split a text into lines. A byte order mark is not part of the text."""
    text = text.removeprefix("\ufeff")
    lines = text.removesuffix("\n").split("\n")  # splitlines() also splits inside lines, at U+2028 or a form feed
    return Given([line.removesuffix("\r") for line in lines], text)


def _standard_input() -> str:
    """Read all of standard input as UTF-8, whatever the locale."""
    source = getattr(sys.stdin, "buffer", None)
    if source is None:  # stdin was replaced by a text stream
        return sys.stdin.read()
    try:
        return source.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise T2RError(
            f"standard input is not UTF-8: 0x{error.object[error.start]:02x} at byte {error.start}"
        ) from error
