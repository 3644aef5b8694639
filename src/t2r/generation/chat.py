"""Conversations in which each answer continues from the state of the previous turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from t2r.attention.cache import T2RCache
from t2r.data.chat import render
from t2r.data.text import check_unicode
from t2r.errors import T2RError
from t2r.generation.engine import Engine, ForGenerate
from t2r.generation.engine.sequences import Group
from t2r.generation.state import check_vocabulary
from t2r.generation.text import Stream, check_lengths, checked_options, refused_options, special_tokens
from t2r.model.modeling import T2RModel


class Turn(NamedTuple):
    """A turn of the user that is not yet answered."""

    messages: list[dict[str, str]]
    """All messages, with this turn."""
    text: str
    """The text of the conversation, with this turn."""
    new: str
    """The end of the text, which the model has not read."""
    state: T2RCache | None
    """The state before the new text."""
    unread: list[int]
    """Generated tokens before the new text that are not in the state."""


class Conversation:
    """A conversation with a language model.

    With a chat template, turns are chat messages; otherwise they are lines of one text. A swapped model keeps its state
    between turns and reads only the new tokens. Other models read the whole text in every turn.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        state: a state to continue from, for a swapped model.
        seed: random seed for sampling.
        options: options of `model.generate`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        state: T2RCache | None = None,
        *,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        if model.config.is_encoder_decoder:
            raise T2RError("a conversation requires a language model: give texts to translate as arguments or on stdin")
        self.model, self.tokenizer, self.state = model, tokenizer, state
        # An answer is streamed, which beam search does not allow: the model's own defaults are not used.
        ways = {name: options.get(name) or 1 for name in ("num_beams", "num_return_sequences")}
        self.options = checked_options(model, options | ways)
        if any(way > 1 for way in ways.values()):
            raise T2RError("a conversation has one answer at a time: omit num_beams and num_return_sequences")
        self.messages: list[dict[str, str]] = []
        self.engine = Engine(model, rows=1) if isinstance(model, T2RModel) else None
        self.text = ""
        """The text of the conversation, as read by the model."""
        self.unread: list[int] = []
        """Generated tokens that are not yet in the state."""
        self.templated = bool(tokenizer.chat_template) and state is None
        if seed is not None:
            torch.manual_seed(seed)

    def say(self, line: str, on_text: Callable[[str], None] | None = None) -> str:
        """Add a user turn and return the answer. `on_text` is called with each piece of it.

        A turn that fails is not part of the conversation."""
        check_unicode(line, "the message")
        begins = not self.text and self.state is None
        turn = self.turn(line)
        new = self.tokenizer(turn.new, add_special_tokens=begins and not self.templated, verbose=False).input_ids
        check_vocabulary(self.model, new)
        ids = [*turn.unread, *new]
        with refused_options():
            written, state = self.answer(ids, turn.state, on_text)
        stops, _ = special_tokens(self.model, self.tokenizer, self.options)
        said = str(self.tokenizer.decode([t for t in written if t not in stops], skip_special_tokens=True))
        # The text includes the special tokens that the model has generated.
        self.text = turn.text + str(self.tokenizer.decode(written, skip_special_tokens=False))
        self.messages = [*turn.messages, {"role": "assistant", "content": said}]
        if isinstance(self.model, T2RModel):
            self.state, self.unread = state, written[-1:]  # the last token has not been an input
        else:
            self.unread = [*ids, *written]
        return said

    def turn(self, line: str) -> Turn:
        """Return a turn of the user, with what precedes it."""
        messages = [*self.messages, {"role": "user", "content": line}]
        if not self.templated:
            new = f"\n{line}" if self.text else line
            return Turn(messages, self.text + new, new, self.state, self.unread)
        text = render(self.tokenizer, messages, "the message", prompt=True)
        if not text.startswith(self.text):  # the template has changed earlier turns: read everything again
            return Turn(messages, text, text, None, [])
        return Turn(messages, text, text[len(self.text) :], self.state, self.unread)

    def answer(
        self, ids: list[int], state: T2RCache | None, on_text: Callable[[str], None] | None
    ) -> tuple[list[int], Any]:
        """Return the tokens of the answer to these tokens, and the state after them."""
        _, pad = special_tokens(self.model, self.tokenizer, self.options)
        options: dict[str, Any] = {"pad_token_id": pad, "tokenizer": self.tokenizer, **self.options}
        if on_text is not None:
            options["streamer"] = Stream(self.tokenizer, on_text)
        given = torch.tensor([ids], device=self.model.device)
        check_lengths(self.model, [ids], self.options)
        if self.engine is not None:
            try:
                how = {"attention_mask": torch.ones_like(given), **options}
                group = self.engine._attempt(given, state=state, keep_state=True, **how)
                assert isinstance(group, Group)  # options with beams are refused
                return group.sequences[0].tokens, group.sequences[0].state
            except ForGenerate as reason:
                self.engine._say_elsewhere(reason)
        options = {"return_dict_in_generate": True, **options}
        if state is None:
            out = self.model.generate(given, attention_mask=torch.ones_like(given), **options)
        else:
            out = self.model.continue_from(state, given, **options)
        return out.sequences[0, given.shape[1] :].tolist(), out.past_key_values
