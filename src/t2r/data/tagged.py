"""Plain sentences from a Chinese corpus whose words have tags, such as the People's Daily of January 1998.

    python -m t2r.data.tagged 199801.txt news1998.zh

Each line of such a file is a paragraph of words with tags: `[中央/n 人民/n 广播/vn 电台/n]nt 播出/v 。/w`.
"""

from __future__ import annotations

import re
import string
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from t2r.data.text import whole_text
from t2r.storage import write_text

WORD = re.compile(r"\[?(.*?)/\w+(?:\]\w*)?(?:\s+|$)")
DATE = re.compile(r"^\d{8}-\d\d-\d{3}-\d{3}/m\s+")
"""The number of a paragraph, which some editions have."""
SENTENCE = re.compile(r"[^。！？]+[。！？]*[”』」）]*")
WIDE = {ord(plain) + 0xFEE0: plain for plain in string.ascii_letters + string.digits}
"""Letters and digits as wide as Chinese characters, as old texts have them, and plain ones."""
SHORTEST = 6
"""Shorter sentences, such as names of authors, are left out."""


def sentences(lines: Iterable[str]) -> Iterator[str]:
    """Join the words of each paragraph, and divide it into sentences."""
    for line in lines:
        text = "".join(WORD.findall(DATE.sub("", line.strip()))).translate(WIDE)
        yield from (found for found in SENTENCE.findall(text) if len(found) >= SHORTEST)


def prepare(source: str, out: str | Path) -> None:
    """Write the sentences of a tagged file, which may be compressed, one per line."""
    lines = whole_text(source).split("\n")
    write_text(out, "".join(f"{sentence}\n" for sentence in sentences(lines)))


if __name__ == "__main__":
    prepare(*sys.argv[1:3])
