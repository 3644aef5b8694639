"""Text from tokens as they are generated, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

PENDING = 16
"""Tokens after which text is passed on although it ends in the middle of a character."""


class Detokenizer:
    """Turns tokens into pieces of text. The pieces together are the text of all tokens.

    A few of the last tokens are decoded again with each new one, because a character may consist of several tokens.
    With the last tokens of the text `before`, the first piece begins with its space, if it has one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, before: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.tokens = [*before]
        if self.decoded(self.tokens).endswith("\ufffd"):  # what follows may change its end
            self.tokens = []
        self.start, self.done = 0, len(self.tokens)
        """The tokens before `done` have been passed on. Those from `start` are decoded again."""
        self.count = 0
        """The number of tokens that were added."""

    def decoded(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def add(self, tokens: Sequence[int], last: bool = False) -> str:
        """Return the text that these tokens complete. With `last`, no tokens follow."""
        self.tokens += tokens
        self.count += len(tokens)
        before, now = self.decoded(self.tokens[self.start : self.done]), self.decoded(self.tokens[self.start :])
        unfinished = now.endswith("\ufffd") and len(self.tokens) - self.done < PENDING
        if len(now) <= len(before) or (unfinished and not last):
            return ""
        self.start, self.done = self.done, len(self.tokens)
        return now[len(before) :]


class StopStrings:
    """Passes text on up to the first of some strings. What may be the beginning of one is held back."""

    def __init__(self, strings: Sequence[str]) -> None:
        self.strings = strings
        self.held = ""
        self.found = False

    def add(self, text: str, last: bool = False) -> str:
        """Return the text that is certainly before a stop string. With `last`, no text follows."""
        self.held += text
        places = [place for place in map(self.held.find, self.strings) if place >= 0]
        if places:
            self.found = True
            text, self.held = self.held[: min(places)], ""
            return text
        keep = 0 if last else max((beginning(self.held, string) for string in self.strings), default=0)
        text, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return text


def beginning(text: str, string: str) -> int:
    """Return the length of the longest end of a text with which the string begins."""
    longest = min(len(text), len(string) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(string[:n])), 0)
