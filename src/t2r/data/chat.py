"""Conversations: rendered with the tokenizer's chat template, to be learned from the answers only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from t2r.errors import T2RError


class Part(NamedTuple):
    """A stretch of a document; parts follow each other in the order of the text."""

    text: str
    loss: bool = True
    """Whether to learn from it."""
    ends: bool = True
    """Whether the document ends here."""
    closed: bool = False
    """Whether the text has its own end mark (a chat template writes one), and needs no EOS token."""


def conversation(messages: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> Iterator[Part]:
    """The parts of a conversation, with loss on what the assistant says and on the marks that end its turn.

    An answer is what the template adds to the prompt that a model is given when it is asked for the answer.
    Prompt and answer are separate parts, as they are when the model generates.
    """
    if not tokenizer.chat_template:
        raise T2RError(f"{where}: the tokenizer has no chat template for `messages`: set one, or give `text`")
    if not isinstance(messages, list) or not all(isinstance(m, dict) and "role" in m for m in messages):
        raise T2RError(f"{where}: `messages` must be a list of objects with `role` and `content`")

    def upto(count: int, prompt: bool = False) -> str:
        return render(tokenizer, messages[:count], where, prompt=prompt)

    turns = [(upto(i, True), upto(i + 1)) for i, m in enumerate(messages) if m["role"] == "assistant"]
    whole = upto(len(messages))
    if not turns:
        raise T2RError(f"{where}: a conversation without an assistant's answer has nothing to learn from")
    if not all(answered.startswith(prompt) for prompt, answered in turns):
        raise T2RError(f"{where}: cannot tell the answers from the prompts in what the chat template renders")

    if all(whole.startswith(answered) for _, answered in turns):
        yield from _split(whole, turns)
    else:
        # Templates of thinking models rewrite earlier turns as the conversation goes on. Then no one text
        # shows every answer as it was given, so each becomes a document of its own, as the model sees it.
        for turn in turns:
            yield from _split(turn[1], [turn])


def render(tokenizer: PreTrainedTokenizerBase, messages: list[Any], where: str, *, prompt: bool) -> str:
    """A conversation as text; with `prompt`, up to where the model is to answer."""
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    except Exception as error:  # a template is a program, and fails in any way
        reason = " ".join(str(error).split()) or type(error).__name__
        raise T2RError(f"{where}: the chat template refuses this conversation: {reason}") from error
    if not isinstance(rendered, str):
        raise T2RError(f"{where}: the chat template gives no text")
    return rendered


def _split(text: str, turns: list[tuple[str, str]]) -> Iterator[Part]:
    done = 0
    for prompt, answered in turns:
        yield Part(text[done : len(prompt)], loss=False, ends=False)
        yield Part(text[len(prompt) : len(answered)], ends=False)
        done = len(answered)
    yield Part(text[done:], loss=False, closed=True)
