"""Streaming readers for text files, JSONL and `datasets`."""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from transformers import PreTrainedTokenizerBase

from t2r.data import fingerprint
from t2r.data.chat import Part, conversation
from t2r.errors import T2RError
from t2r.storage import kind_of
from t2r.words import extra

JSON_LINES = (".jsonl", ".ndjson", ".json")
READ = 1 << 18
"""Number of bytes read at a time."""

OPEN: dict[str, Callable[[Any], Any]] = {"": nullcontext, ".gz": gzip.open, ".xz": lzma.open}
"""Functions that open a file, by its last suffix."""

Report = Callable[[int], None]
"""Called with the number of bytes of a source read so far."""


class Source(Protocol):
    """A source of documents."""

    @property
    def size(self) -> int:
        """The number of bytes to read, in the same units as reported by `read`."""

    def fingerprint(self) -> Any:
        """Return a value that changes when the text changes."""

    def read(self, tokenizer: PreTrainedTokenizerBase, lines: bool, report: Report) -> Iterator[Part]:
        """Yield the documents in order. With `lines`, each line of plain text is a document, otherwise each file."""


def find_sources(names: str | Sequence[str]) -> list[Source]:
    """Return the sources for files, globs (in sorted order) and `datasets:NAME[:CONFIG[:SPLIT]]`.

    Raises T2RError if a file does not exist or a glob has no match."""
    sources: list[Source] = []
    for name in [names] if isinstance(names, str) else names:
        if name.startswith("datasets:"):
            sources.append(DatasetSource(name))
            continue
        try:
            path = Path(name).expanduser()
        except RuntimeError as error:  # ~user with an unknown user
            raise T2RError(f"there is no file {name}: {error}") from error
        kind = kind_of(path)
        if kind == "file":
            sources.append(FileSource(path))
        elif kind == "other":
            raise T2RError(f"{name} is a device or a pipe, which cannot be read twice: give a file")
        elif kind == "folder":
            raise T2RError(f"{name} is a folder: give its files as a glob, such as {path / '*.txt'}")
        elif any(c in name for c in "*?["):
            matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
            files = [FileSource(match) for match in matches if match.is_file()]
            if not files:
                raise T2RError(f"no file matches {name}")
            sources += files
        else:
            raise T2RError(f"there is no file {name}")
    if not sources:
        raise T2RError("no text was given: give at least one file, glob or datasets:NAME")
    return sources


def whole_text(names: str | Sequence[str]) -> str:
    """Return the text of sources without documents' boundaries, for conversions that need no tokenizer."""
    found = find_sources(names)
    return "".join(part.text for source in found for part in source.read(None, False, lambda _: None))  # type: ignore[arg-type]


@dataclass(frozen=True)
class FileSource:
    """A file of JSONL (extension .jsonl, .ndjson or .json) or plain text (any other), optionally compressed (.gz or
    .xz)."""

    path: Path

    @property
    def size(self) -> int:
        return self.path.stat().st_size

    def fingerprint(self) -> Any:
        with self.reading():
            return fingerprint.of_file(self.path)

    @contextmanager
    def reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise T2RError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def read(self, tokenizer: PreTrainedTokenizerBase, lines: bool, report: Report) -> Iterator[Part]:
        with self.opened() as (file, raw):
            if self.suffixes[0] in JSON_LINES:
                parts = self._records(file, tokenizer)
            elif lines:
                parts = (Part(line.rstrip("\r\n")) for _, line in self._lines(file) if line.strip())
            else:
                parts = self._pieces(file)
            for part in parts:
                report(raw.tell())  # for a compressed file, the compressed bytes read
                yield part

    def read_lines(self, report: Report = lambda _: None) -> Iterator[str]:
        """Yield every line, also empty ones, without its line end."""
        with self.opened() as (file, raw):
            for number, line in self._lines(file):
                if number % 1024 == 0:
                    report(raw.tell())
                yield line.rstrip("\r\n")

    @property
    def suffixes(self) -> tuple[str, str]:
        """Return the suffix before a compression suffix, and the compression suffix; each may be empty."""
        found = [suffix.lower() for suffix in self.path.suffixes]
        packed = found.pop() if found and found[-1] in OPEN else ""
        return found[-1] if found else "", packed

    @contextmanager
    def opened(self) -> Iterator[tuple[BinaryIO, BinaryIO]]:
        """Open the file: the decompressed stream and the raw one."""
        _, packed = self.suffixes
        with self.reading(), self.path.open("rb") as raw, OPEN[packed](raw) as opened:
            try:
                yield io.BufferedReader(opened, READ), raw
            except (EOFError, lzma.LZMAError, gzip.BadGzipFile, zlib.error) as error:
                reason = str(error).rstrip(".")
                raise T2RError(f"{self.path} is damaged or not a {packed} file: {reason}") from error

    def _pieces(self, file: BinaryIO) -> Iterator[Part]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        read, begins = 0, True
        while data := file.read(READ):
            text = self._decode(decoder, data, read)
            read += len(data)
            yield Part(text.removeprefix("\ufeff") if begins else text, ends=False)
            begins = False
        yield Part(self._decode(decoder, b"", read))

    def _decode(self, decoder: codecs.IncrementalDecoder, data: bytes, read: int) -> str:
        pending = len(decoder.getstate()[0])  # the first bytes of an incomplete character
        try:
            return decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise self._not_utf8(error, read - pending) from error

    def _lines(self, file: BinaryIO) -> Iterator[tuple[int, str]]:
        read = 0
        for number, line in enumerate(file, 1):
            try:
                text = line.decode()
            except UnicodeDecodeError as error:
                raise self._not_utf8(error, read, f", line {number}") from error
            read += len(line)
            yield number, text.removeprefix("\ufeff") if number == 1 else text

    def _not_utf8(self, error: UnicodeDecodeError, before: int, line: str = "") -> T2RError:
        bad = error.object[error.start]
        place = f"byte {before + error.start}{line}"
        return T2RError(f"{self.path} is not UTF-8: 0x{bad:02x} at {place} ({error.reason}); convert it first")

    def _records(self, file: BinaryIO, tokenizer: PreTrainedTokenizerBase) -> Iterator[Part]:
        for number, line in self._lines(file):
            if not line.strip():
                continue
            where = f"{self.path}:{number}"
            if self.suffixes[0] == ".json" and number == 1 and line.lstrip().startswith("["):
                raise T2RError(f"{self.path} is a JSON array: write one object per line (JSONL)")
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise T2RError(f"{where}: not JSON: {error.msg} at column {error.colno}") from error
            except (ValueError, RecursionError) as error:  # integers too long, or nesting too deep
                raise T2RError(f"{where}: the JSON cannot be read: {error}") from error
            yield from _record(record, tokenizer, where)


def _record(record: Any, tokenizer: PreTrainedTokenizerBase, where: str) -> Iterator[Part]:
    """Yield the document of a JSONL line or a dataset row. If it has both, `messages` is used and `text` is ignored."""
    if isinstance(record, dict) and record.get("messages") is not None:
        for part in conversation(record["messages"], tokenizer, where):
            check_unicode(part.text, where)
            yield part
    elif isinstance(record, dict) and isinstance(record.get("text"), str):
        check_unicode(record["text"], where)
        yield Part(record["text"])
    else:
        raise T2RError(f"{where}: requires `text` (a string) or `messages` (a list)")


def check_unicode(text: str, where: str) -> None:
    """Raise T2RError for unpaired surrogates, which JSON and Python strings allow, but which cannot be encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise T2RError(
            f"{where}: the text is not valid Unicode (U+{ord(text[error.start]):04X} at character {error.start})"
        ) from error


@dataclass(frozen=True)
class DatasetSource:
    """`datasets:NAME[:CONFIG[:SPLIT]]`. The split defaults to `train`. Rows have the same fields as JSONL lines."""

    name: str

    @cached_property
    def rows(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise T2RError(f"{self.name} requires the datasets extra: {extra('datasets')}") from error
        # The split comes last, because a slice such as train[:1%] contains a colon.
        _, name, config, split = (*self.name.split(":", 3), "", "")[:4]
        try:
            return datasets.load_dataset(name, config or None, split=split or "train")
        except Exception as error:  # errors of datasets, file systems and networks
            reason = " ".join(str(error).split())
            raise T2RError(f"cannot load {self.name}: {reason}") from error

    @property
    def _files(self) -> list[Path]:
        return [Path(file["filename"]) for file in self.rows.cache_files]

    @property
    def size(self) -> int:
        return sum(path.stat().st_size for path in self._files)

    def fingerprint(self) -> Any:
        return [self.name, [fingerprint.of_file(path) for path in self._files]]

    def read(self, tokenizer: PreTrainedTokenizerBase, lines: bool, report: Report) -> Iterator[Part]:
        size, count = self.size, len(self.rows)
        for index, row in enumerate(self.rows):
            report(size * index // count)
            yield from _record(row, tokenizer, f"{self.name}, row {index}")
