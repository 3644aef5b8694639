"""The longest beginning of a list of tokens that is known."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

BASE, MODULUS = 1_000_003, (1 << 61) - 1


def hashes(tokens: Sequence[int]) -> Iterator[int]:
    """Yield a hash of the first token, of the first two, and so on."""
    value = 0
    for token in tokens:
        value = (value * BASE + token + 1) % MODULUS
        yield value


class Prefixes:
    """Known lists of tokens, each with ids. A text is searched in one pass, however many lists there are."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int, int], dict[str, Sequence[int]]] = {}
        """By model, length and hash, the lists with their ids. The newest id is the last."""

    def key(self, model: str, tokens: Sequence[int]) -> tuple[str, int, int]:
        value = 0
        for value in hashes(tokens):  # noqa: B007
            pass
        return model, len(tokens), value

    def add(self, model: str, tokens: Sequence[int], id: str) -> None:
        if tokens:
            self.known.setdefault(self.key(model, tokens), {})[id] = tokens

    def remove(self, model: str, tokens: Sequence[int], id: str) -> None:
        if not tokens:
            return
        key = self.key(model, tokens)
        ids = self.known[key]
        del ids[id]
        if not ids:
            del self.known[key]

    def longest(self, model: str, tokens: Sequence[int]) -> str | None:
        """Return the newest id of the longest list with which these tokens begin, and after which some follow."""
        places = [
            (model, length, value)
            for length, value in enumerate(hashes(tokens[:-1]), 1)
            if (model, length, value) in self.known
        ]
        for key in reversed(places):
            for id, known in reversed(self.known[key].items()):
                if list(known) == list(tokens[: key[1]]):  # hashes may be equal by chance, or on purpose
                    return id
        return None
