"""Language modeling: text in blocks, each token predicted from those before it, measured by perplexity."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from t2r.data import TokenCorpus, check_block_size, tokenize_corpus, write_corpus
from t2r.data.blocks import IGNORED
from t2r.data.corpus import JoinedCorpus
from t2r.data.fingerprint import of_tokenizer
from t2r.data.mixture import MixedBlocks, Sources, exact, parse_sources, readings_of_shares, warn_of_shares
from t2r.data.progress import progress_bar
from t2r.errors import T2RError
from t2r.evaluation import Text, encode, perplexity, read_text
from t2r.evaluation.generation import DISTANCES, recall, recall_tokens
from t2r.evaluation.perplexity import WINDOW
from t2r.surgery.adapters import family_of
from t2r.tasks.base import Task, exchanged

TEACHER = "teacher"
"""Among the texts to train on: what the teacher itself writes."""
TEACHER_TOKENS = 10_000_000
"""How much that is."""

logger = logging.getLogger(__name__)

RECALL_TRIALS = 32
"""Of recall, at each distance."""


class LanguageModeling(Task):
    """The next token of a text.

    Args:
        tokenizer: of the model.
        train: text files, globs, JSONL or `datasets:` names, each with a weight or without (`t2r.data.mixture`);
            `teacher` among them: text that the teacher writes.
        valid: a text to measure perplexity on.
        documents: keep documents apart inside a block.
        teacher_tokens: how much the teacher writes.
        limit: measure on so many windows only.
        longest: the longest window to measure with. None: as long as the model can read, at most 512.
        seed: of what the teacher writes.
        caching: a context in which caches of the text are written.
    """

    name = "language_modeling"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        train: Sources,
        valid: str | None = None,
        *,
        documents: bool = False,
        teacher_tokens: int = TEACHER_TOKENS,
        limit: int | None = None,
        longest: int | None = None,
        seed: int = 0,
        progress: bool = True,
        caching: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.tokenizer = tokenizer
        self.mixed = parse_sources(train)
        self.sources = [entry.source for entry in self.mixed]
        self.valid, self.documents, self.teacher_tokens, self.limit = valid, documents, teacher_tokens, limit
        self.longest, self.seed, self.progress, self.caching = longest, seed, progress, caching
        self.corpora: dict[str, TokenCorpus] = {}
        self.text: Text | None = None
        self.vocabulary: int | None = None

    # --- Data -----------------------------------------------------------------------------------------------

    @property
    def uniform(self) -> bool:  # type: ignore[override]
        return not self.documents

    def describe(self) -> dict[str, Any]:
        return {
            "train": list(map(str, self.mixed)),
            "teacher_tokens": self.teacher_tokens if TEACHER in self.sources else None,
            "valid": self.valid,
            "limit": self.limit,
            "documents": self.documents,
        }

    def check(self, model: PreTrainedModel, block_sizes: Iterable[int]) -> None:
        if model.config.is_encoder_decoder:
            raise T2RError(f"only language models are trained on text; {model.config.model_type} is an encoder-decoder")
        if not self.sources:
            raise T2RError("no text was given: name at least one file, glob or datasets:NAME to train on")
        warn_of_shares(self.mixed)
        for size in block_sizes:
            check_block_size(size, max_positions(model))
        self.vocabulary = model.config.get_text_config().vocab_size
        if self.valid is not None:
            self.text = encode(self.tokenizer, read_text(self.valid, self.tokenizer))

    def read(self) -> None:
        """The tokens of each text, which stay in the cache."""
        key = of_tokenizer(self.tokenizer)
        with self.caching():
            self.corpora = {
                source: tokenize_corpus(source, self.tokenizer, progress=self.progress, tokenizer_key=key)
                for source in self.sources
                if source != TEACHER
            }

    @property
    def asked_of_teacher(self) -> int:
        return self.teacher_tokens if TEACHER in self.sources else 0

    def example(self, rows: int, length: int) -> dict[str, Tensor]:
        """Of the text, or before there is any, of random tokens."""
        if self.corpora or self.vocabulary is None:
            return {name: x[:, :length] for name, x in super().example(rows, length).items()}
        ids = torch.randint(self.vocabulary, (rows, length))
        return {"input_ids": ids, "labels": ids}

    def prepare(self, teacher: PreTrainedModel | None, longest: int) -> list[str]:
        """The tokens of the texts, and of what the teacher writes. Both stay in the cache."""
        if not self.corpora:
            self.read()
        if TEACHER in self.sources:
            with self.caching():
                self.corpora[TEACHER] = self.written_by(teacher, longest)
        for corpus in self.corpora.values():
            if self.vocabulary is not None:
                corpus.check_vocabulary(self.vocabulary)
        return [self.corpora[source].key for source in self.sources]

    def written_by(self, teacher: PreTrainedModel | None, length: int) -> TokenCorpus:
        if teacher is None:
            raise T2RError("there is no teacher to write text: name text files to train on")
        written = write_corpus(
            teacher,
            self.tokenizer,
            tokens=self.teacher_tokens,
            length=length,
            continues=JoinedCorpus(list(self.corpora.values())) if self.corpora else None,
            seed=self.seed,
            progress=self.progress,
        )
        # What the teacher wrote has its own marks between documents.
        return tokenize_corpus(str(written), self.tokenizer, add_eos=False, progress=self.progress)

    @property
    def tokens(self) -> int:
        """How many there are to train on."""
        return sum(map(len, self.corpora.values()))

    @property
    def epoch_tokens(self) -> int:
        there = [entry for entry in self.mixed if entry.source in self.corpora]
        if not there:
            return 0
        counts = [len(self.corpora[entry.source]) for entry in there]
        if there[0].share is None:
            return round(sum((entry.readings or 1.0) * count for entry, count in zip(there, counts, strict=True)))
        readings = readings_of_shares([exact(entry.share) for entry in there], counts)
        return round(sum(times * count for times, count in zip(readings, counts, strict=True)))

    def told_data(self) -> str:
        names = []
        for entry in self.mixed:
            name = "text that the base model wrote" if entry.source == TEACHER else f"`{Path(entry.source).name}`"
            if entry.share is not None:
                name += f" ({entry.share:g} % of what is read)"
            elif entry.readings not in (None, 1):
                name += f" ({entry.readings:g} readings)"
            names.append(name)
        return f"{', '.join(names)}: {self.tokens:,} tokens"

    def mixture(self, read: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
        if not self.corpora:
            return []
        total = sum(map(sum, read.values()))
        sources = []
        for index, entry in enumerate(self.mixed):
            own = {stage: tokens[index] for stage, tokens in read.items()}
            sources.append(
                {
                    "source": entry.source,
                    "readings": None if entry.share is not None else entry.readings or 1.0,
                    "share": entry.share,
                    "tokens": len(self.corpora[entry.source]),
                    "read": own,
                    "share_read": round(100 * sum(own.values()) / total, 3) if total else None,
                }
            )
        return sources

    def dataset(self, block_size: int) -> MixedBlocks:
        """The blocks of what there is so far."""
        there = [entry for entry in self.mixed if entry.source in self.corpora]
        corpora = [self.corpora[entry.source] for entry in there]
        return MixedBlocks(there, corpora, block_size, documents=self.documents, apart=(TEACHER,))

    # --- Loss -----------------------------------------------------------------------------------------------

    def labels(self, batch: dict[str, Tensor]) -> Tensor:
        """Shifted by one: a position predicts the next token, and the last position none."""
        return pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)

    def disturbed(self, inputs: dict[str, Tensor], share: float | Tensor) -> dict[str, Tensor]:
        return inputs | {"input_ids": exchanged(inputs["input_ids"], share)}

    # --- Measuring and telling ------------------------------------------------------------------------------

    def window(self, model: PreTrainedModel) -> int:
        return min(WINDOW, self.longest or WINDOW, max_positions(model) or WINDOW)

    def windows(self, model: PreTrainedModel) -> tuple[int, int]:
        window = self.window(model)
        if self.text is None or len(self.text.token_ids) < window:
            return 0, window
        count = (len(self.text.token_ids) - window) // (window // 2) + 1
        return min(count, self.limit or count), window

    def restrict(self, *, teacher_tokens: int | None = None, windows: int | None = None) -> None:
        self.teacher_tokens = self.teacher_tokens if teacher_tokens is None else teacher_tokens
        self.limit = self.limit if windows is None else windows

    def measure(self, model: PreTrainedModel, teacher: PreTrainedModel | None = None) -> dict[str, Any] | None:
        if self.text is None:
            return None
        window = self.window(model)
        count, _ = self.windows(model)
        with progress_bar("measuring", count, "windows", shown=self.progress) as report:
            result = perplexity(
                model,
                self.text,
                window=window,
                stride=window // 2,
                limit=self.limit,
                teacher=teacher,
                progress=lambda done, _: report(done),
            )
        return {
            "perplexity": result.perplexity,
            "word_perplexity": result.word_perplexity,
            "bits_per_byte": result.bits_per_byte,
            "kl": result.mean_kl,
            "tokens": result.tokens,
            "window": window,
            "windows": count,
        }

    def recall(self, model: PreTrainedModel) -> list[dict[str, Any]]:
        if self.text is None:
            return []
        windows, window = self.windows(model)
        fewest = max_positions(model)
        try:
            rest = recall_tokens(self.tokenizer)
            distances = [d for d in DISTANCES if 2 * d <= window and (fewest is None or d + rest <= fewest)]
            trials = max(1, min(RECALL_TRIALS, windows))  # where little is measured, of recall too
            measured = recall(model, self.tokenizer, self.text.string, distances=distances, trials=trials)
        except T2RError as error:  # this tokenizer does not tell enough words apart, or the text is too short
            logger.info("recall is not measured: %s", error)
            return []
        return [row._asdict() for row in measured]

    def told(self, measured: dict[str, Any]) -> str:
        return f"perplexity {measured['perplexity']:.3f}"

    @staticmethod
    def table(
        measured: Sequence[tuple[str, dict[str, Any] | None]], *, compared: bool
    ) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        found = [(name, values) for name, values in measured if values is not None]
        rows: list[tuple[str, ...]] = []
        if not compared:
            keys = {"perplexity": 2, "word_perplexity": 2, "bits_per_byte": 3}
            header = ("model", "perplexity per token", "per word", "bits per byte")
            return header, [
                (name, *(number(values[key], digits) for key, digits in keys.items())) for name, values in found
            ]
        for name, values in found:
            own, first = values["perplexity"], found[0][1]["perplexity"]
            ratio = f"{own / first - 1:+.1%}" if own and first else ""
            rows.append((name, number(own, 2) or "not finite", ratio, number(values["kl"], 4)))
        return ("model", "perplexity", "against the teacher", "KL to the teacher"), rows


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def max_positions(model: PreTrainedModel) -> int | None:
    """How many tokens the model can read at most; None: any number."""
    positions: int | None = getattr(model.config, "max_position_embeddings", None)
    try:
        return family_of(model).max_positions(model) or positions
    except T2RError:  # a family that we do not know
        return positions
