"""The chat of `t2r generate` in a terminal."""

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from t2r.errors import T2RError
from t2r.words import counted

COMMANDS = {
    "/help": "show this list",
    "/reset": "forget what was said; a state that was loaded stays",
    "/save FILE": "save the conversation, to go on with --load-state FILE",
}
ENDS = "Ctrl-C stops an answer, Ctrl-D ends the chat"


def converse(conversation: Any, save_state: Path | None, write: Callable[[str], None]) -> None:
    """Read a line and answer it, until the input ends. With `save_state`, save the conversation after every answer."""
    with suppress(ImportError):
        import readline  # noqa: F401  # gives `input` a history and the keys of an editor
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        with Interrupts() as interrupts:
            try:
                if obeyed(line, conversation) or not line.strip():
                    continue
                conversation.say(line, write, interrupts.asked)
                print()
                if save_state is not None:
                    conversation.save(save_state)
            except T2RError as error:  # the turn is not part of the conversation, which goes on
                tell(f"t2r: {error}")


def obeyed(line: str, conversation: Any) -> bool:
    """Do what a command says. Returns False for any other line, also one that begins with a slash."""
    word, _, rest = line.strip().partition(" ")
    if line.strip() == "/help":
        width = max(map(len, COMMANDS))
        tell("\n".join([*(f"{name:{width}}  {what}" for name, what in COMMANDS.items()), f"{ENDS}."]))
    elif line.strip() == "/reset":
        conversation.reset()
    elif word == "/save" and rest.strip():
        path = Path(rest.strip()).expanduser()
        conversation.save(path)
        tell(f"saved in {path}")
    else:
        return False
    return True


def banner(name: str, conversation: Any, load_state: Path | None, save_state: Path | None) -> str:
    """Return what a user should know before the first line."""
    model, state = conversation.model, conversation.state
    lines = [f"{name}, on {model.device} in {str(model.dtype).removeprefix('torch.')}: {kind(conversation)}."]
    if not conversation.templated:
        lines.append("Its tokenizer has no chat template: it continues your lines as one text.")
    if load_state is not None:
        messages = f" and {len(conversation.messages)} messages" if conversation.messages else ""
        lines.append(f"Continues from {load_state}, after {state.get_seq_length():,} tokens{messages}.")
    if save_state is not None:
        lines.append(f"Saves the conversation in {save_state} after every answer.")
    return "\n".join([*lines, f"{ENDS}, /help lists commands."])


def kind(conversation: Any) -> str:
    """Return whether the model is an RNN, and the memory of a conversation."""
    from t2r.capacity import human

    engine = conversation.engine
    if engine is None:
        return "not supported by the engine, so that it reads everything again for each answer"
    model, kept, layers = engine.model, engine.model.kept_layers(), engine.model.count_layers()
    if not kept:
        return f"an RNN, with a state of {human(model.make_static_cache(1).nbytes)} for any length"
    what = "a transformer" if len(kept) == layers else f"an RNN with {counted(len(kept), 'softmax layer')} of {layers}"
    if engine.obstacle is not None:
        return what
    one, two = (model.make_static_cache(1, length).nbytes for length in (1, 2))
    fixed = f"{human(2 * one - two)} and " if len(kept) < layers else ""
    return f"{what}, with a state of {fixed}{human(two - one)} for each token"


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class Interrupts:
    """Inside the `with` block, the first Ctrl-C is noted, and the second raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "Interrupts":
        self.before = signal.signal(signal.SIGINT, self.note)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self.before)

    def note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt

    def asked(self) -> bool:
        """Return whether there was a Ctrl-C."""
        return self.count > 0
