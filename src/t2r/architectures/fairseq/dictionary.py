"""fairseq dictionaries: one word and its count per line, after four special words that are not in the file."""

from __future__ import annotations

from pathlib import Path

from t2r.errors import T2RError

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
OVERWRITE = "#fairseq:overwrite"


def read_dictionary(path: str) -> list[str]:
    """Return all words in the order of their ids. Duplicates must be marked with `#fairseq:overwrite`.

    Raises T2RError if the file is not a fairseq dictionary."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise T2RError(f"{path} cannot be read as a dictionary: {error}") from error
    words, numbers = list(SPECIAL), {word: number for number, word in enumerate(SPECIAL)}
    for at, line in enumerate(lines, 1):
        line = line.rstrip()
        if not line and at == len(lines):
            break
        word, space, count = line.removesuffix(OVERWRITE).rstrip(" ").rpartition(" ")
        if not space or not count.isascii() or not count.isdigit():
            raise T2RError(f"{path}, line {at}: expected a word and its count, as in fairseq's dict.txt; got {line!r}")
        if word in SPECIAL:
            raise T2RError(f"{path}, line {at}: {word} is a special word of fairseq and must not be in the file")
        if word in numbers:
            if not line.endswith(OVERWRITE):
                raise T2RError(f"{path}, line {at}: {word!r} is a duplicate: this is not a fairseq dictionary")
            words[numbers[word]] = f"<overwritten-{numbers[word]}>"  # no text contains this word
        numbers[word] = len(words)
        words.append(word)
    return words


def check_size(path: str, words: list[str], rows: int) -> None:
    if len(words) != rows:
        raise T2RError(
            f"{path} has {len(words):,} words, including fairseq's {len(SPECIAL)} special words, but the checkpoint "
            f"was trained with {rows:,}: pass the dictionary of its training data"
        )
