"""A tokenised corpus on disk: a folder of flat arrays, and a header without which they are not believed.

    tokens.bin      every token of every document, in order
    starts.bin      where each document starts
    unscored.bin    where the stretches that are not to be learned from start and stop, in turns
    header.json     the type and length of each array, and a checksum of the header itself

The folder gets its name only when all of it is on the disk. So what a killed run leaves behind is never
found, and what was cut off afterwards is told by its length.
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
"""Seconds without a write after which a temporary folder belongs to a run that was killed."""


class TokenCorpus:
    """The tokens of a corpus, memory-mapped. It pickles as its path, so that workers open it themselves."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.header = read_header(self.folder)
        if self.header is None:
            raise T2RError(f"{folder} is not a complete token cache: tokenise the corpus again")
        self.tokens = self._array("tokens")
        self.starts = self._array("starts")
        self.unscored = self._array("unscored")

    def _array(self, name: str) -> NDArray[Any]:
        assert self.header is not None
        dtype = np.dtype(self.header["arrays"][name]["dtype"])
        if not self.header["arrays"][name]["bytes"]:  # nothing cannot be mapped
            return np.empty(0, dtype)
        return np.memmap(self.folder / f"{name}.bin", dtype, mode="r")

    def __len__(self) -> int:
        """How many tokens."""
        return len(self.tokens)

    @property
    def key(self) -> str:
        """A name that changes when the content does."""
        return self.folder.name

    @property
    def documents(self) -> int:
        """How many documents."""
        return len(self.starts)

    def check_vocabulary(self, size: int) -> None:
        """Refuse tokens that a model with a vocabulary of this size does not have."""
        highest = int(self.tokens.max()) if len(self) else -1
        if highest >= size:
            raise T2RError(
                f"the text has token {highest}, and the model's vocabulary ends at {size - 1}: this is not the model's "
                "tokenizer"
            )

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """These tokens."""
        return self.tokens[start:stop].astype(np.int64)

    def scored(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Which of these tokens are to be learned from."""
        # Starts and stops take turns, so behind an odd number of them a token lies in a stretch.
        return np.searchsorted(self.unscored, np.arange(start, stop), side="right") % 2 == 0

    def positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """Each token's distance from the start of its document, or from `start` if that is nearer."""
        index = np.arange(start, stop)
        document = np.searchsorted(self.starts, index, side="right") - 1
        return index - np.maximum(self.starts[document], start)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenCorpus, (self.folder,)


class JoinedCorpus:
    """Corpora one after the other, read as one. Each document stays in its corpus."""

    def __init__(self, corpora: Sequence[TokenCorpus]) -> None:
        self.corpora = list(corpora)
        self.ends = np.cumsum([len(corpus) for corpus in self.corpora])

    def __len__(self) -> int:
        """How many tokens."""
        return int(self.ends[-1])

    @property
    def key(self) -> str:
        """A name that changes when the content does."""
        names = [corpus.folder.name for corpus in self.corpora]
        return names[0] if len(names) == 1 else digest(names)

    def pieces(self, start: int, stop: int) -> Iterator[tuple[TokenCorpus, int, int]]:
        """The stretches of corpora that lie between these two tokens."""
        index = int(np.searchsorted(self.ends, start, side="right"))
        while start < stop and index < len(self.corpora):
            corpus, end = self.corpora[index], int(self.ends[index])
            before = end - len(corpus)
            yield corpus, start - before, min(stop, end) - before
            start, index = end, index + 1

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """These tokens."""
        return np.concatenate([corpus.read(a, b) for corpus, a, b in self.pieces(start, stop)])

    def scored(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Which of these tokens are to be learned from."""
        return np.concatenate([corpus.scored(a, b) for corpus, a, b in self.pieces(start, stop)])

    def positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """Each token's distance from the start of its document, or from `start` if that is nearer."""
        return np.concatenate([corpus.positions(a, b) for corpus, a, b in self.pieces(start, stop)])


def read_header(folder: Path) -> dict[str, Any] | None:
    """The header of a cache, or None unless everything is there as it says."""
    try:
        header = json.loads((folder / "header.json").read_text("utf-8"))
        checksum = header.pop("checksum")
        arrays = header["arrays"].items() if checksum == digest(header) and header["format"] == FORMAT else ()
        sizes = [(folder / f"{name}.bin").stat().st_size == array["bytes"] for name, array in arrays]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return header if sizes and all(sizes) else None


class CorpusWriter:
    """Writes a cache beside its place, and moves it there on `commit`; without that, nothing remains."""

    def __init__(self, folder: Path, dtype: np.dtype[Any]):
        self.folder = folder
        self.count = 0
        self._dtypes = {"tokens": dtype, "starts": np.dtype(np.int64), "unscored": np.dtype(np.int64)}
        self._inside = False  # a document
        self._scored = True
        self._last: int | None = None  # token

    def __enter__(self) -> CorpusWriter:
        parent = self.folder.parent
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob(f"{'[0-9a-f]' * len(self.folder.name)}.*.tmp"):  # ours, and nobody else's
            with suppress(FileNotFoundError):  # its run has just ended
                if time.time() - max(file.stat().st_mtime for file in (left, *left.iterdir())) > ABANDONED:
                    shutil.rmtree(left, ignore_errors=True)
        # Each process writes its own, because several may start at the same time.
        self._temporary = Path(tempfile.mkdtemp(prefix=f"{self.folder.name}.", suffix=".tmp", dir=parent))
        self._files = {name: (self._temporary / f"{name}.bin").open("wb") for name in self._dtypes}
        return self

    def add(self, ids: Sequence[int], scored: bool = True) -> None:
        """Append tokens to the document at hand, or begin one."""
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
        """What follows is another document. One without any tokens is none, and gets no end; nor does one that has
        its end already (where a line end is the EOS token, as in word-level text)."""
        if self._inside and eos is not None and self._last != eos:
            self.add([eos], scored)
        self._inside = False

    def _write(self, name: str, values: Sequence[int]) -> None:
        self._files[name].write(np.asarray(values, self._dtypes[name]).tobytes())

    def commit(self, about: dict[str, Any]) -> None:
        """All is written: give it its name."""
        header: dict[str, Any] = {"format": FORMAT, **about, "arrays": {}}
        for name, file in self._files.items():
            header["arrays"][name] = {"dtype": self._dtypes[name].str, "bytes": file.tell()}
            file.flush()
            os.fsync(file.fileno())
            file.close()
        text = json.dumps({**header, "checksum": digest(header)}, indent=1)
        (self._temporary / "header.json").write_text(text, "utf-8")
        if read_header(self.folder) is None:  # or another process was faster
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
            file.close()
        shutil.rmtree(self._temporary, ignore_errors=True)
