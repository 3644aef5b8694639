"""Single tokens as clients see them: the bytes that each adds to a text, which may be a part of a character."""

from __future__ import annotations

import functools
import json
import math
import re

from transformers import PreTrainedTokenizerBase

from t2r.generation.engine.sequences import LogProbability

LOWEST = -9999.0
"""OpenAI's number for a token that is impossible. JSON has no infinities."""
BYTE = re.compile("<0x([0-9A-F]{2})>")
"""How tokenizers with a byte fallback name the token of a byte."""
SPACE = "\u2581"
"""What SentencePiece writes for a space."""


class TokenTexts:
    """The texts of single tokens of a tokenizer. `decode` has them without their spaces, and bytes only as U+FFFD."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.added = {int(token): str(about) for token, about in tokenizer.added_tokens_decoder.items()}
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        state = "" if decoder is None else json.dumps(json.loads(decoder.__getstate__()))
        self.letters = letters() if '"ByteLevel"' in state else None
        """If tokens are written in letters that stand for bytes, the byte of each letter."""
        self.known: dict[int, bytes] = {}

    def bytes_of(self, token: int) -> bytes:
        """Return what a token adds to a text."""
        if token not in self.known:
            self.known[token] = self.found(token)
        return self.known[token]

    def found(self, token: int) -> bytes:
        if token in self.added:
            return self.added[token].encode()
        name = self.tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):  # a model may have more tokens than its tokenizer
            return b""
        if self.letters is not None and all(letter in self.letters for letter in name):
            return bytes(self.letters[letter] for letter in name)
        if (byte := BYTE.fullmatch(name)) is not None:
            return bytes([int(byte[1], 16)])
        if SPACE in name:
            return name.replace(SPACE, " ").encode()
        # A second token has what some tokenizers remove at the beginning of a text.
        one, two = (str(self.tokenizer.decode([token] * times)) for times in (1, 2))
        return (two[len(one) :] if two.startswith(one) else one).encode()

    def name(self, token: int) -> str:
        """Return the text of a token, or in OpenAI's form the bytes of a part of a character."""
        found = self.bytes_of(token)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def top(self, logprobs: LogProbability) -> dict[str, float]:
        """Return the most likely tokens by name. Of tokens with one name, it has the most likely one."""
        named: dict[str, float] = {}
        for token, value in logprobs.top:
            named.setdefault(self.name(token), finite(value))
        return named


def finite(value: float) -> float:
    """Return a log-probability as a number of JSON."""
    return LOWEST if value == -math.inf else value


@functools.cache
def letters() -> dict[str, int]:
    """Return the bytes for which the letters of byte-level tokens stand, as GPT-2 has defined them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
