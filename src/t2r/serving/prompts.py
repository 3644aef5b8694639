"""What the model reads: the tokens of a text or of messages, at the beginning or after a state."""

from __future__ import annotations

from typing import NamedTuple

from t2r.data.chat import render
from t2r.errors import T2RError
from t2r.generation.turns import BEGINNING, Transcript, first_token, next_turn, opened
from t2r.serving.errors import ApiError
from t2r.serving.served import ServedModel
from t2r.serving.stored import Stored

Messages = list[dict[str, str]]


class Prompt(NamedTuple):
    """Tokens to read."""

    tokens: list[int]
    """After the state, if there is one."""
    stored: Stored | None = None
    """The state from which to read. None: from the beginning, or from a state that has read the same tokens."""
    said: Transcript | None = None
    """What was said when the tokens have been read. None: they are a plain text."""


def of_text(model: ServedModel, text: str, stored: Stored | None = None) -> Prompt:
    """Return the prompt that is a plain text."""
    return checked(model, Prompt([*unread(stored), *model.encode(text, special=stored is None)], stored))


def of_messages(model: ServedModel, messages: Messages, stored: Stored | None = None) -> Prompt:
    """Return the prompt of a conversation, or of new messages after a state, up to where the answer begins."""
    if model.translates:
        return checked(model, Prompt(model.encode(source_of(messages), special=True)))
    if not model.templated:
        raise ApiError(
            f"{model.name} has no chat template: use /v1/completions", param="model", code="no_chat_template"
        )
    said = BEGINNING if stored is None else stored.transcript
    if said is None:  # after a plain text
        said = Transcript([], first_token(model.tokenizer), True)
    whole = [*said.messages, *messages]
    try:
        text = render(model.tokenizer, whole, "messages", prompt=True)
        new = next_turn(model.tokenizer, said, text, messages)
    except T2RError as error:
        raise ApiError(str(error), param="messages") from error
    if not said.messages and not text.startswith(said.text):
        raise ApiError("these messages cannot follow the document: begin with one of the user", param="messages")
    after = Transcript(whole, said.text + new, said.document)
    return checked(model, Prompt([*unread(stored), *model.encode(new)], stored, after))


def of_document(model: ServedModel, text: str, chat: bool, stored: Stored | None = None) -> Prompt:
    """Return what is read of a document. With `chat`, it is the beginning of a message, which a question completes."""
    if not chat:
        return of_text(model, text, stored)
    said = BEGINNING if stored is None else stored.transcript or Transcript([], first_token(model.tokenizer), True)
    try:
        head = opened(model.tokenizer, said.messages)
    except T2RError as error:
        raise ApiError(str(error), param="text") from error
    inside = said.document and said.text == head
    if not head.startswith(said.text):
        raise ApiError("the chat template changes earlier messages: no document can follow them", param="text")
    new = ("" if inside else head[len(said.text) :]) + text.rstrip() + "\n\n"
    return checked(
        model, Prompt([*unread(stored), *model.encode(new)], stored, Transcript(said.messages, head, document=True))
    )


def source_of(messages: Messages) -> str:
    """Return the text to translate: the last message. A translation does not depend on those before it."""
    for message in messages:
        if message["role"] not in ("user", "assistant"):
            raise ApiError("a translation model reads no system messages", param="messages")
    if messages[-1]["role"] != "user":
        raise ApiError("the last message must be of the user: it is translated", param="messages")
    return messages[-1]["content"]


def unread(stored: Stored | None) -> list[int]:
    return [] if stored is None else stored.unread


def checked(model: ServedModel, prompt: Prompt) -> Prompt:
    if not prompt.tokens or (prompt.stored is not None and len(prompt.tokens) <= len(prompt.stored.unread)):
        raise ApiError("there is nothing to read: the prompt has no tokens", param="prompt")
    check_tokens(model, prompt.tokens)
    return prompt


def check_tokens(model: ServedModel, tokens: list[int]) -> None:
    """Raise ApiError for tokens that the model does not have."""
    if model.translates:
        return  # of a source, which has a vocabulary of its own; the engine checks it
    if min(tokens) < 0 or max(tokens) >= model.vocabulary:
        raise ApiError(f"the tokens of {model.name} are 0 to {model.vocabulary - 1}", param="prompt")
