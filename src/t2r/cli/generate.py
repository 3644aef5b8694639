"""t2r generate"""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from t2r.cli.common import Dtype, Model, Quiet, Revision, TrustRemoteCode, calm
from t2r.errors import T2RError


def generate(
    model: Model,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(help="Prompts, or texts to translate. [default: the lines of --file or of a pipe]"),
    ] = None,
    file: Annotated[Path | None, typer.Option(help="A file of prompts, one a line.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts are messages: use the model's chat template.")] = False,
    batch_size: Annotated[int, typer.Option(help="Prompts at once.")] = 8,
    max_new_tokens: Annotated[int | None, typer.Option(help="[default: 128]")] = None,
    min_new_tokens: Annotated[int | None, typer.Option()] = None,
    do_sample: Annotated[bool | None, typer.Option(help="[default: the model's own]")] = None,
    temperature: Annotated[float | None, typer.Option()] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    num_beams: Annotated[int | None, typer.Option()] = None,
    length_penalty: Annotated[float | None, typer.Option()] = None,
    repetition_penalty: Annotated[float | None, typer.Option()] = None,
    num_return_sequences: Annotated[int | None, typer.Option()] = None,
    seed: Annotated[int | None, typer.Option(help="Of sampling.")] = None,
    load_state: Annotated[
        Path | None, typer.Option(help="Continue from a saved state: prompts ask about what it has read.")
    ] = None,
    save_state: Annotated[
        Path | None,
        typer.Option(help="Read the prompt (a whole --file or pipe) into a state and save it; nothing is generated."),
    ] = None,
    dtype: Dtype = "auto",
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, ...")] = "auto",
    revision: Revision = None,
    trust_remote_code: TrustRemoteCode = False,
    quiet: Quiet = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON object per prompt, with speed and bytes of state.")
    ] = False,
) -> None:
    """Complete prompts, or translate them with a translation model; swapped or not.

    Only what is new is printed: as it comes for one prompt, a line each for several. Options without a word
    here mean what they mean to transformers.

    A long document can be read once, with --save-state, and asked many times, with --load-state.
    """
    texts = _prompts(prompts, file)
    given = {
        "max_new_tokens": max_new_tokens,
        "min_new_tokens": min_new_tokens,
        "do_sample": do_sample,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "num_beams": num_beams,
        "length_penalty": length_penalty,
        "repetition_penalty": repetition_penalty,
        "num_return_sequences": num_return_sequences,
    }
    options = {name: value for name, value in given.items() if value is not None}
    stream = len(texts) == 1 and not as_json and (num_beams or 1) == 1 and (num_return_sequences or 1) == 1

    from t2r.generation.state import describe_state, read_document, refuse_stateless
    from t2r.generation.text import complete
    from t2r.hub import load_model, load_tokenizer

    with calm(quiet or as_json):
        loaded: Any = load_model(
            model, dtype=dtype, device=device, revision=revision, trust_remote_code=trust_remote_code
        )
        tokenizer = load_tokenizer(model, revision=revision, trust_remote_code=trust_remote_code)
        if tokenizer is None:
            raise T2RError(f"{model} has no tokenizer: save the one it was trained with into that folder")
        if load_state is not None or save_state is not None:
            refuse_stateless(loaded)
        state = None if load_state is None else loaded.load_state(load_state)
        if save_state is not None:
            with _progress(quiet or as_json) as on_tokens:
                state = read_document(loaded, tokenizer, "\n".join(texts), state, on_tokens)
            state.save(save_state)
            if not quiet:
                _say(describe_state(save_state), save_state, as_json)
            return
        for completion in complete(
            loaded,
            tokenizer,
            texts,
            batch_size=batch_size,
            chat=chat,
            seed=seed,
            on_text=_write if stream else None,
            state=state,
            **options,
        ):
            if as_json:
                print(json.dumps(asdict(completion), ensure_ascii=False), flush=True)
            elif stream:
                print()
            else:
                for text in (completion.text, *completion.alternatives):
                    print(" ".join(text.splitlines()), flush=True)


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _say(facts: dict[str, Any], path: Path, as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts))
    else:
        print(f"{facts['tokens']:,} tokens read; their state is {facts['bytes']:,} bytes, in {path}")


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, for a person who looks."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), disable=quiet or not sys.stderr.isatty()) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _prompts(arguments: list[str] | None, file: Path | None) -> list[str]:
    """The prompts, wherever they come from."""
    if arguments and file is not None:
        raise T2RError("give prompts as arguments or by --file, not both")
    if arguments:
        prompts, where = arguments, "the arguments"
    elif file is not None:
        try:
            prompts, where = file.read_text(encoding="utf-8").splitlines(), str(file)
        except (OSError, UnicodeDecodeError) as error:
            raise T2RError(f"{file} cannot be read: {error}") from error
    elif sys.stdin.isatty():
        raise T2RError("no prompt: give one as an argument, by --file, or through a pipe")
    else:
        prompts, where = sys.stdin.read().splitlines(), "the standard input"
    if not any(prompt.strip() for prompt in prompts):
        raise T2RError(f"there is no prompt in {where}: one a line, not all of them blank")
    return prompts
