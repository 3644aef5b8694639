"""A tokenized corpus on disk: a folder of flat arrays and a header.

    tokens.bin      the tokens of all documents, in order
    starts.bin      the start of each document
    unscored.bin    alternating starts and ends of the ranges without loss
    header.json     the type and length of each array, and a checksum of the header

The folder is renamed to its final name after all files are on disk, so the output of an interrupted run is never used.
Files that are truncated later are detected by their length.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from t2r.data.fingerprint import digest
from t2r.errors import T2RError

FORMAT = 1
ABANDONED = 24 * 3600
"""Seconds without a write after which a temporary folder is considered abandoned."""


class TokenCorpus:
    """A memory-mapped tokenized corpus. It is pickled as its path, so that workers open it themselves."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.header = read_header(self.folder)
        if self.header is None:
            raise T2RError(f"{folder} is not a complete token cache: tokenize the corpus again")
        self.tokens = self._array("tokens")
        self.starts = self._array("starts")
        self.unscored = self._array("unscored")

    def _array(self, name: str) -> NDArray[Any]:
        assert self.header is not None
        dtype = np.dtype(self.header["arrays"][name]["dtype"])
        if not self.header["arrays"][name]["bytes"]:  # empty files cannot be mapped
            return np.empty(0, dtype)
        return np.memmap(self.folder / f"{name}.bin", dtype, mode="r")

    def __len__(self) -> int:
        """The number of tokens."""
        return len(self.tokens)

    @property
    def key(self) -> str:
        """A name that changes with the content."""
        return self.folder.name

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.starts)

    def check_vocabulary(self, size: int) -> None:
        """Raise T2RError if a token is outside a vocabulary of this size."""
        highest = int(self.tokens.max()) if len(self) else -1
        if highest >= size:
            raise T2RError(
                f"the text has token {highest}, but the model's vocabulary ends at {size - 1}: the tokenizer does not "
                "belong to the model"
            )

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the tokens of a range."""
        return self.tokens[start:stop].astype(np.int64)

    def scored(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return which tokens of a range contribute to the loss."""
        # Starts and ends alternate, so a token after an odd number of them is inside a range without loss.
        return np.searchsorted(self.unscored, np.arange(start, stop), side="right") % 2 == 0

    def positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the distance of each token from the start of its document or from `start`, whichever is nearer."""
        index = np.arange(start, stop)
        document = np.searchsorted(self.starts, index, side="right") - 1
        return index - np.maximum(self.starts[document], start)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenCorpus, (self.folder,)


class Beginning(TokenCorpus):
    """The first `count` tokens of a corpus. The others are held out."""

    def __init__(self, folder: str | Path, count: int):
        super().__init__(folder)
        self.tokens = self.tokens[:count]
        self.starts, self.unscored = (places[places < count] for places in (self.starts, self.unscored))

    @property
    def key(self) -> str:
        return f"{super().key}:{len(self)}"

    def __reduce__(self) -> tuple[Any, ...]:
        return Beginning, (self.folder, len(self))


class JoinedCorpus:
    """A concatenation of corpora."""

    def __init__(self, corpora: Sequence[TokenCorpus]) -> None:
        self.corpora = list(corpora)
        self.ends = np.cumsum([len(corpus) for corpus in self.corpora])

    def __len__(self) -> int:
        """The number of tokens."""
        return int(self.ends[-1])

    @property
    def key(self) -> str:
        """A name that changes with the content."""
        names = [corpus.key for corpus in self.corpora]
        return names[0] if len(names) == 1 else digest(names)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[TokenCorpus, int, int]]:
        """Yield the corpora and their ranges that make up this range."""
        index = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop and index < len(self.corpora):
            corpus, end = self.corpora[index], int(self.ends[index])
            before = end - len(corpus)
            yield corpus, start - before, min(stop, end) - before
            start, index = end, index + 1

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the tokens of a range."""
        return np.concatenate([corpus.read(a, b) for corpus, a, b in self.pieces(start, stop)])

    def scored(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return which tokens of a range contribute to the loss."""
        return np.concatenate([corpus.scored(a, b) for corpus, a, b in self.pieces(start, stop)])

    def positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the distance of each token from the start of its document or from `start`, whichever is nearer."""
        return np.concatenate([corpus.positions(a, b) for corpus, a, b in self.pieces(start, stop)])


def read_header(folder: Path) -> dict[str, Any] | None:
    """Return the header of a cache, or None if the cache is missing, incomplete or damaged."""
    try:
        header = json.loads((folder / "header.json").read_text("utf-8"))
        checksum = header.pop("checksum")
        arrays = header["arrays"].items() if checksum == digest(header) and header["format"] == FORMAT else ()
        sizes = [(folder / f"{name}.bin").stat().st_size == array["bytes"] for name, array in arrays]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return header if sizes and all(sizes) else None


class CorpusWriter:
    """Writes a cache to a temporary folder, which `commit` renames. Without `commit`, the folder is removed."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]):
        self.folder = folder
        self.count = 0
        self._dtypes = {"tokens": dtype, "starts": np.dtype(np.int64), "unscored": np.dtype(np.int64)}
        self._inside = False  # whether a document is open
        self._scored = True
        self._last: int | None = None  # the last token

    def __enter__(self) -> CorpusWriter:
        parent = self.folder.parent
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob(f"{'[0-9a-f]' * len(self.folder.name)}.*.tmp"):  # temporary folders of caches only
            with suppress(FileNotFoundError):  # its process has just removed it
                if time.time() - max(file.stat().st_mtime for file in (left, *left.iterdir())) > ABANDONED:
                    shutil.rmtree(left, ignore_errors=True)
        # Each process writes its own folder, because several may start at the same time.
        self._temporary = Path(tempfile.mkdtemp(prefix=f"{self.folder.name}.", suffix=".tmp", dir=parent))
        self._files = {name: (self._temporary / f"{name}.bin").open("wb") for name in self._dtypes}
        return self

    def add(self, ids: Sequence[int], scored: bool = True) -> None:
        """Append tokens to the current document, or start a document."""
        if not len(ids):
            return
        if not self._inside:
            self._write("starts", [self.count])
            self._inside = True
        if scored != self._scored:
            self._write("unscored", [self.count])
            self._scored = scored
        self._write("tokens", ids)
        self._last = ids[-1]
        self.count += len(ids)

    def end_document(self, eos: int | None, scored: bool) -> None:
        """End the current document with the EOS token, if one is given. Empty documents are skipped.

        No EOS token is added if the document already ends with it, as in word-level text, where newlines are EOS."""
        if self._inside and eos is not None and self._last != eos:
            self.add([eos], scored)
        self._inside = False

    def _write(self, name: str, values: Sequence[int]) -> None:
        self._files[name].write(np.asarray(values, self._dtypes[name]).tobytes())

    def commit(self, about: dict[str, Any]) -> None:
        """Write the header and rename the folder to its final name."""
        header: dict[str, Any] = {"format": FORMAT, **about, "arrays": {}}
        for name, file in self._files.items():
            header["arrays"][name] = {"dtype": self._dtypes[name].str, "bytes": file.tell()}
            file.flush()
            os.fsync(file.fileno())
            file.close()
        text = json.dumps({**header, "checksum": digest(header)}, indent=1)
        (self._temporary / "header.json").write_text(text, "utf-8")
        if read_header(self.folder) is None:  # otherwise another process has written it
            shutil.rmtree(self.folder, ignore_errors=True)
            try:
                self._temporary.rename(self.folder)
            except OSError:
                if read_header(self.folder) is None:
                    raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            with suppress(OSError):  # on a full disk, what is still buffered cannot be written
                file.close()
        shutil.rmtree(self._temporary, ignore_errors=True)
