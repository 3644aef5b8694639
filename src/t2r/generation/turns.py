"""Turns of a conversation as its chat template renders them, also after a state.

A template renders a whole conversation. A state needs only what is new: the rendered text without its beginning, which
the model has read. A document may be part of the state: it is then the beginning of a message of the user, or a text
before the conversation. It is not among the messages, so a state does not hold its text.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from t2r.data.chat import render
from t2r.errors import T2RError

MARK = "⟨t2r⟩"
"""Stands for the content of a message, to find its place in the rendered text."""


class Transcript(NamedTuple):
    """What was said before a state."""

    messages: list[dict[str, str]]
    text: str
    """The rendered messages, as the model has read them. It may end inside a message that is not yet complete."""
    document: bool
    """Whether the state has read a text that is not in the messages."""

    def of_state(self, tokens: int) -> dict[str, Any]:
        """Return the transcript as an attribute of a state with this number of tokens."""
        return {**self._asdict(), "tokens": tokens}


BEGINNING = Transcript([], "", False)


def transcript_of(state: Any, tokenizer: PreTrainedTokenizerBase) -> Transcript:
    """Return what was said before a state. None: nothing.

    A state without a conversation has read a plain text, and the conversation begins after it."""
    if state is None:
        return BEGINNING
    chat = state.chat
    if chat is not None and chat["tokens"] == state.get_seq_length():  # otherwise, more was read after it
        return Transcript(*(chat[name] for name in Transcript._fields))
    return Transcript([], first_token(tokenizer), True)


def first_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the BOS token, if the template begins with it and does not use it elsewhere.

    A text before the conversation has begun with it already."""
    bos = tokenizer.bos_token
    if not tokenizer.chat_template or not isinstance(bos, str) or not bos:
        return ""
    text = rendered(tokenizer, [], MARK)
    return bos if text.startswith(bos) and text.count(bos) == 1 else ""


def rendered(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], line: str, where: str = "the message"
) -> str:
    """Render a conversation with a new message of the user, up to where the answer begins."""
    return render(tokenizer, [*messages, by_user(line)], where, prompt=True)


def by_user(line: str) -> dict[str, str]:
    return {"role": "user", "content": line}


def opened(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    """Return the text of a conversation up to the content of the next message of the user."""
    head, found, _ = rendered(tokenizer, messages, MARK).partition(MARK)
    if not found:
        raise T2RError("the chat template does not show messages as they are: it cannot continue from a state")
    return head


def next_turn(tokenizer: PreTrainedTokenizerBase, said: Transcript, text: str, new: list[dict[str, str]]) -> str:
    """Return the end of a conversation's `text`, after what was said before: these new messages.

    If the template changes earlier messages, what was said stays as it was read."""
    if text.startswith(said.text):
        return text[len(said.text) :]
    if not said.messages:
        return text
    last = [*said.messages[:-1], {**said.messages[-1], "content": MARK}]
    _, _, rest = render(tokenizer, [*last, *new], "the message", prompt=True).partition(MARK)
    # The end of an answer may have been generated.
    both = next((n for n in range(len(rest), 0, -1) if said.text.endswith(rest[:n])), 0)
    return rest[both:]


def refuse_no_template(tokenizer: PreTrainedTokenizerBase) -> None:
    if not tokenizer.chat_template:
        raise T2RError("the model's tokenizer has no chat template: omit --chat (chat=True)")
