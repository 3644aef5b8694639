"""Conversations in which each answer continues from the state of the previous turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from t2r.attention.cache import T2RCache
from t2r.data.text import check_unicode
from t2r.errors import T2RError
from t2r.generation.engine import ForGenerate, engine_for
from t2r.generation.engine.sequences import Group
from t2r.generation.state import check_vocabulary, refuse_stateless
from t2r.generation.text import Stream, check_lengths, checked_options, refused_options, special_tokens
from t2r.generation.turns import BEGINNING, Transcript, by_user, next_turn, rendered, transcript_of


class Point(NamedTuple):
    """A point in a conversation, from which it can go on."""

    said: Transcript
    state: T2RCache | None
    """The state after what was said. None: nothing was read, or the model has no state."""
    unread: list[int]
    """Tokens after the state that were said and not read. For a model without a state, all tokens."""


class Conversation:
    """A conversation with a language model.

    With a chat template, turns are chat messages; otherwise they are lines of one text. The state is kept between
    turns, so that only new tokens are read. Models that the engine does not support read the whole text in every turn,
    unless they are swapped.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        state: a state to continue from, for a swapped model: that of a document, or of a conversation that was saved.
            It is not modified.
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
        if state is not None:
            refuse_stateless(model)
            state.check_prompts(1, model)
        self.model, self.tokenizer = model, tokenizer
        # An answer is streamed, which beam search does not allow: the model's own defaults are not used.
        ways = {name: options.get(name) or 1 for name in ("num_beams", "num_return_sequences")}
        self.options = checked_options(model, options | ways)
        if any(way > 1 for way in ways.values()):
            raise T2RError("a conversation has one answer at a time: omit num_beams and num_return_sequences")
        self.engine = engine_for(model, rows=1)
        self.templated = bool(tokenizer.chat_template)
        self.first = self.now = Point(transcript_of(state, tokenizer), state, [])
        said = self.now.said
        self.start: Point | None = self.first
        """Where everything is read again if the template changes earlier turns. None: the state after a document alone
        is not known."""
        if said.messages:
            self.start = None if said.document else Point(BEGINNING, None, [])
        if seed is not None:
            torch.manual_seed(seed)

    @property
    def messages(self) -> list[dict[str, str]]:
        """What was said, as chat messages."""
        return self.now.said.messages

    @property
    def state(self) -> T2RCache | None:
        """The state after the last turn, without the last token."""
        return self.now.state

    def say(
        self,
        line: str,
        on_text: Callable[[str], None] | None = None,
        stop: Callable[[], bool] | None = None,
    ) -> str:
        """Add a user turn and return the answer.

        A turn that fails is not part of the conversation.

        Args:
            line: what the user says.
            on_text: called with each piece of the answer.
            stop: called after each token. If it returns True, the answer ends there. What was generated is part of the
                conversation."""
        check_unicode(line, "the message")
        said, before, new = self.turn(line)
        begins = not before.said.text and before.state is None
        ids = self.tokenizer(new, add_special_tokens=begins and not self.templated, verbose=False).input_ids
        check_vocabulary(self.model, ids)
        ids = [*before.unread, *ids]
        with refused_options():
            written, state = self.answer(ids, before.state, on_text, stop)
        stops, _ = special_tokens(self.model, self.tokenizer, self.options)
        answer = str(self.tokenizer.decode([t for t in written if t not in stops], skip_special_tokens=True))
        # The text includes the special tokens that the model has generated.
        text = said.text + str(self.tokenizer.decode(written, skip_special_tokens=False))
        said = Transcript([*said.messages, {"role": "assistant", "content": answer}], text, said.document)
        # The last token has not been an input.
        self.now = Point(said, state, [*ids, *written] if state is None else written[-1:])
        return answer

    def turn(self, line: str) -> tuple[Transcript, Point, str]:
        """Return the conversation with a turn of the user, the point from which to read, and the text to read there."""
        now = self.now
        messages = [*now.said.messages, by_user(line)]
        if not self.templated:
            new = f"\n{line}" if now.said.text else line
            return Transcript(messages, now.said.text + new, now.said.document), now, new
        text = rendered(self.tokenizer, now.said.messages, line)
        start = self.start
        if not text.startswith(now.said.text) and start is not None and text.startswith(start.said.text):
            now = start  # the template has changed earlier turns
        new = next_turn(self.tokenizer, now.said, text, [by_user(line)])
        return Transcript(messages, now.said.text + new, now.said.document), now, new

    def answer(
        self,
        ids: list[int],
        state: T2RCache | None,
        on_text: Callable[[str], None] | None,
        stop: Callable[[], bool] | None,
    ) -> tuple[list[int], T2RCache | None]:
        """Return the tokens of the answer to these tokens, and the state after them, if there is one."""
        _, pad = special_tokens(self.model, self.tokenizer, self.options)
        options: dict[str, Any] = {"pad_token_id": pad, "tokenizer": self.tokenizer, **self.options}
        if on_text is not None:
            options["streamer"] = Stream(self.tokenizer, on_text)
        if stop is not None:
            options["stopping_criteria"] = StoppingCriteriaList([*options.get("stopping_criteria", ()), Stop(stop)])
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
            assert self.engine is not None
            out = self.engine.model.continue_from(state, given, **options)
        held = out.past_key_values
        return out.sequences[0, given.shape[1] :].tolist(), held if isinstance(held, T2RCache) else None

    def reset(self) -> None:
        """Forget what was said since the beginning. The state that was given to the conversation stays."""
        self.now = self.first

    @torch.no_grad()
    def save(self, path: str | Path) -> None:
        """Save the state of the conversation, with its messages. `Conversation(..., state=model.load_state(path))`
        resumes it.

        Raises T2RError if the model has no state, nothing was said, or the file cannot be written."""
        refuse_stateless(self.model)
        said, state, unread = self.now
        if state is None:
            raise T2RError("nothing was said yet: there is no state to save")
        state = state.fork()
        if unread:
            self.model(input_ids=torch.tensor([unread], device=self.model.device), past_key_values=state)
        state.chat = said.of_state(state.get_seq_length())
        state.save(path)
        self.now = Point(said, state, [])  # so that a conversation that is resumed goes on in the same way


class Stop(StoppingCriteria):
    """Ends a sequence when a function returns True."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        self.asked = asked

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return torch.full((len(input_ids),), self.asked(), dtype=torch.bool, device=input_ids.device)
