"""Conversations, rendered with the tokenizer's chat template. The loss is on the assistant's answers only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from t2r.errors import T2RError


class Part(NamedTuple):
    """A part of a document. Parts are yielded in the order of the text."""

    text: str
    loss: bool = True
    """Whether the tokens contribute to the loss."""
    ends: bool = True
    """Whether the document ends after this part."""
    closed: bool = False
    """Whether the text has its own end marker, for example from a chat template, and needs no EOS token."""


def conversation(messages: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> Iterator[Part]:
    """Yield the parts of a conversation, with loss on the assistant's answers and the markers that end its turns.

    An answer is the text that the template adds to the generation prompt. Prompt and answer are separate parts, so that
    they are tokenized separately, as in generation.
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
        raise T2RError(f"{where}: the conversation has no assistant message to train on")
    if not all(answered.startswith(prompt) for prompt, answered in turns):
        raise T2RError(f"{where}: cannot separate answers from prompts in the output of the chat template")

    if all(whole.startswith(answered) for _, answered in turns):
        yield from _split(whole, turns)
    else:
        # Templates of reasoning models rewrite earlier turns in later ones. No single text then contains every answer
        # as it was generated, so each answer becomes a document with its own prompt.
        for turn in turns:
            yield from _split(turn[1], [turn])


def render(tokenizer: PreTrainedTokenizerBase, messages: list[Any], where: str, *, prompt: bool) -> str:
    """Render a conversation as text. With `prompt`, the generation prompt is appended."""
    try:
        rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    except Exception as error:  # a template is a program that can raise any exception
        reason = " ".join(str(error).split()) or type(error).__name__
        raise T2RError(f"{where}: the chat template rejects this conversation: {reason}") from error
    if not isinstance(rendered, str):
        raise T2RError(f"{where}: the chat template returns no text")
    return rendered


def _split(text: str, turns: list[tuple[str, str]]) -> Iterator[Part]:
    done = 0
    for prompt, answered in turns:
        yield Part(text[done : len(prompt)], loss=False, ends=False)
        yield Part(text[len(prompt) : len(answered)], ends=False)
        done = len(answered)
    yield Part(text[done:], loss=False, closed=True)
