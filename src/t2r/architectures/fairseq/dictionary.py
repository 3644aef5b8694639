"""fairseq's dictionaries: a word and its count on each line, after four special words that are never written."""

from __future__ import annotations

from pathlib import Path

from t2r.errors import T2RError

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
OVERWRITE = "#fairseq:overwrite"


def read_dictionary(path: str) -> list[str]:
    """All words in the order of their numbers. One that is in it twice must say that it means to be."""
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
            raise T2RError(f"{path}, line {at}: {word} is one of fairseq's own words, which are in no dictionary")
        if word in numbers:
            if not line.endswith(OVERWRITE):
                raise T2RError(f"{path}, line {at}: {word!r} is there twice: it is not fairseq's dictionary")
            words[numbers[word]] = f"<overwritten-{numbers[word]}>"  # nobody can say it any more
        numbers[word] = len(words)
        words.append(word)
    return words


def check_size(path: str, words: list[str], rows: int) -> None:
    if len(words) != rows:
        raise T2RError(
            f"{path} has {len(words):,} words, with fairseq's {len(SPECIAL)} special ones, and the checkpoint was "
            f"trained with {rows:,}: give the dictionary that lay beside its training data"
        )
