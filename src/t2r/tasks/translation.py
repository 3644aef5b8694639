"""The translation task: parallel text, the target predicted from the source, measured by BLEU."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from t2r.data.blocks import IGNORED
from t2r.data.fingerprint import digest, of_tokenizer
from t2r.data.mixture import exact, readings_of_shares, warn_of_shares
from t2r.data.parallel.blocks import PairBlocks
from t2r.data.parallel.corpus import Pair, ParallelCorpus, encode_sources, encode_targets, tokenize_pairs
from t2r.data.parallel.joined import JoinedCorpus
from t2r.data.parallel.lines import LineSource, SomeLines, find_file, parse_pairs, read_pairs
from t2r.data.pieces import warn_of_target_pieces
from t2r.data.progress import progress_bar
from t2r.errors import T2RError
from t2r.evaluation.translation import metrics, score, token_scores
from t2r.generation.teacher import WritingSpeed
from t2r.generation.translation import time_translation, translate, translations_path, write_translations
from t2r.options import RunOptions, Sources
from t2r.tasks.base import Task, exchanged, max_positions, number
from t2r.words import counted

logger = logging.getLogger(__name__)

TEACHER = "teacher"
"""Target name that stands for translations by the teacher."""
MEASURED = 2048
"""Tokens per batch in evaluation."""
SAMPLE = 1000
"""Number of lines from which the tokens of a file, and the time of their translation, are estimated at most."""
SMALLEST = 512
"""Tokens of the smallest block to which one is divided."""
LONGER = 1.5
"""A warning is given if the lines that are measured are longer than the training text by more than this factor."""
FAR, LEAST = 0.1, 1.0
"""A student is far from its teacher if its BLEU is lower by more than this fraction, and by more than this number."""
DOUBTFUL = math.log(200.0)
"""A teacher with a higher loss per token is taken for one that does not know these languages."""
SEARCH = 8
"""Assumed cost of a beam search per beam, relative to one forward pass over the line."""
SAMPLES = 3
"""Lines whose translations are shown beside the teacher's."""


class Translation(Task):
    """Translation of a source sentence into a target sentence.

    Args:
        tokenizer: the model's tokenizer. Targets are tokenized with `text_target`.
        source: files of source sentences, one per line, optionally with weights (`t2r.data.mixture`).
        target: the file of targets of each source, or `teacher`: the teacher translates the source.
        valid_source: source sentences to evaluate on.
        valid_target: references of `valid_source`.
        beams: beams of the search, in evaluation and for the teacher's translations.
        teacher_beams: beams for the teacher's translations, if other than `beams`; 1: greedy search, which is faster.
        length_penalty: length penalty of the beam search.
        join: groups of 1, 2, ... up to this many neighboring pairs, in turn, become one pair.
        limit: maximum number of lines to evaluate.
        seed: seed for grouping pairs of equal length into blocks.
        progress: whether to show progress bars.
        caching: context manager in which caches are written.
    """

    name = "translation"
    pipeline_tag = "translation"
    measured_in = "lines"
    fewest_blocks = 2
    one_shape = False
    packed = False

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        source: Sources | None,
        target: Sources | None,
        valid_source: str | None = None,
        valid_target: str | None = None,
        *,
        beams: int = RunOptions.beams,
        teacher_beams: int | None = None,
        length_penalty: float = RunOptions.length_penalty,
        join: int = 1,
        limit: int | None = None,
        seed: int = 0,
        progress: bool = True,
        caching: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.tokenizer = tokenizer
        self.pairs = parse_pairs(source, target, for_all=(TEACHER,))
        if (valid_source is None) != (valid_target is None):
            raise T2RError("to measure translations, give both a source and a target: --valid-src and --valid-tgt")
        self.valid_source, self.valid_target = valid_source, valid_target
        self.beams, self.length_penalty, self.limit = beams, length_penalty, limit
        self.teacher_beams = beams if teacher_beams is None else teacher_beams
        if join < 1:
            raise T2RError(f"join must be at least 1; got {join}")
        self.join = join
        self.seed, self.progress, self.caching = seed, progress, caching
        self.corpora: dict[int, ParallelCorpus] = {}
        """By the number of the pair."""
        self.valid: list[tuple[str, str]] = []
        self.valid_lengths: list[int] = []
        self.positions: int | None = None
        self.block_sizes: list[int] = []
        self.longest: int | None = None
        """The maximum length of a pair that every stage can read. None: no limit."""
        self.vocabularies: tuple[int, int] | None = None
        """The numbers of embeddings of sources and of targets."""
        self.pad = 0
        self.shift: Callable[[Tensor], Tensor] = shifted
        self.asked: dict[int, tuple[int, int]] = {}
        """The numbers of lines, and of tokens as estimated, of the sources that the teacher translates."""
        self.translated = 1.0
        """The fraction of these lines that the teacher translates."""
        self.blocks: dict[int, PairBlocks] = {}

    # --- Data -----------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, Any]:
        joined = {} if self.join == 1 else {"join": self.join}
        return joined | {
            "pairs": list(map(str, self.pairs)),
            "valid": None if self.valid_source is None else [self.valid_source, self.valid_target],
            "valid_text": digest(self.valid) if self.valid else None,
            "limit": self.limit,
            "beams": self.beams,
            "teacher_beams": self.teacher_beams,
            "length_penalty": self.length_penalty,
        }

    def check(self, model: PreTrainedModel, block_sizes: Iterable[int]) -> None:
        if not model.config.is_encoder_decoder:
            raise T2RError(f"{model.config.model_type} is a language model: train it on text (--train), not on pairs")
        if not self.pairs:
            raise T2RError("no parallel text was given: name files of sources and targets (--src, --tgt) to train on")
        warn_of_shares([pair.weighted for pair in self.pairs])
        for pair in self.pairs:
            find_file(pair.source)
            if pair.target != TEACHER:
                find_file(pair.target)
        self.positions = max_positions(model)
        self.block_sizes = sorted(set(block_sizes), reverse=True)
        self.longest = min([*self.block_sizes, *([] if self.positions is None else [self.positions])], default=None)
        sides: Any = model.get_input_embeddings(), model.get_output_embeddings()
        self.vocabularies = sides[0].weight.shape[0], sides[1].weight.shape[0]
        self.pad = model.config.pad_token_id or 0
        self.shift = shift_of(model)
        if self.valid_source is not None or any(pair.target != TEACHER for pair in self.pairs):
            warn_of_target_pieces(self.tokenizer)
        if self.valid_source is not None and self.valid_target is not None:
            metrics()
            self.valid = self.read_valid(self.valid_source, self.valid_target)

    def read_valid(self, source: str, target: str) -> list[tuple[str, str]]:
        """Read the evaluation lines. None is skipped, because scores are comparable only on the same lines."""
        lines = list(read_pairs(find_file(source), find_file(target)))[: self.limit]
        if not lines:
            raise T2RError(f"{source} has no lines")
        ours, theirs = (list(side) for side in zip(*lines, strict=True))
        coded = zip(encode_sources(self.tokenizer, ours), encode_targets(self.tokenizer, theirs), strict=True)
        for number_, (pair, ids) in enumerate(zip(lines, coded, strict=True), 1):
            for name, text, side in zip((source, target), pair, ids, strict=True):
                if not text.strip():
                    raise T2RError(f"{name}:{number_} is empty: translations are measured on whole pairs")
                if self.positions is not None and len(side) > self.positions:
                    raise T2RError(
                        f"{name}:{number_}: {len(side)} tokens are beyond the {self.positions} positions of the model"
                    )
            self.valid_lengths.append(max(map(len, ids)))
        return lines

    def read(self) -> None:
        """Tokenize the pairs of files, or take them from the cache."""
        key = of_tokenizer(self.tokenizer)
        with self.caching():
            for i, pair in enumerate(self.pairs):
                if pair.target != TEACHER:
                    corpus = tokenize_pairs(
                        pair.source, pair.target, self.tokenizer, progress=self.progress, tokenizer_key=key
                    )
                    self.corpora[i] = self.joined(corpus)
        self.blocks.clear()
        self.check_vocabulary()
        self.asked = {
            i: size_of(pair.source, self.tokenizer) for i, pair in enumerate(self.pairs) if pair.target == TEACHER
        }

    def joined(self, corpus: ParallelCorpus) -> ParallelCorpus:
        """Return the pairs of a corpus, or those of neighboring lines, joined as far as they fit into all blocks."""
        if self.join == 1:
            return corpus
        special = set(self.tokenizer.all_special_ids) - {self.tokenizer.unk_token_id}
        return JoinedCorpus(corpus, self.join, special, self.longest)

    @property
    def text_key(self) -> str | None:
        return digest([corpus.key for _, corpus in sorted(self.corpora.items())]) if self.corpora else None

    def longest_sides(self, block_size: int) -> tuple[int, int]:
        """Return the tokens of the longest source, and of the longest target, of all pairs that fit into a block."""
        longest = self.dataset(block_size).longest
        kept = [(corpus, corpus.lengths <= longest) for corpus in self.corpora.values()]
        sides = [(corpus.source_lengths[fits], corpus.target_lengths[fits]) for corpus, fits in kept if fits.any()]
        sources, targets = (max(int(own.max()) for own in side) for side in zip(*sides, strict=True))
        return sources, targets

    @property
    def asked_of_teacher(self) -> int:
        """Return the estimated number of tokens of the sources that the teacher translates."""
        return sum(tokens for _, tokens in self.asked.values())

    def writing_speed(self, teacher: PreTrainedModel, length: int) -> WritingSpeed | None:
        """Time the search on lines of the first source that is not translated yet. Cached translations take no time."""
        if not self.asked:
            return None
        missing = [i for i in self.asked if not self.is_translated(teacher, i)]
        if not missing:
            return WritingSpeed(0.0, 1e-12, 1)
        first, total = self.pairs[missing[0]].source, self.asked[missing[0]][0]
        lines = list(SomeLines(find_file(first), min(SAMPLE, total), total).read_lines())
        token = time_translation(teacher, self.tokenizer, lines, self.teacher_beams, self.length_penalty)
        share = sum(self.asked[i][1] for i in missing) / self.asked_of_teacher
        return WritingSpeed(0.0, max(1e-12, share * token), 1)

    def is_translated(self, teacher: PreTrainedModel, pair: int) -> bool:
        """Return whether all lines of a source are translated already."""
        file, search = find_file(self.pairs[pair].source), (self.teacher_beams, self.length_penalty)
        return translations_path(teacher, self.tokenizer, file, None, *search).exists()

    def told_writing(self, tokens: int, asked: int) -> str:
        total = sum(lines for lines, _ in self.asked.values())
        if tokens >= asked:
            return f"the teacher translates {total:,} lines"
        faster = " (more with --teacher-beams 1)" if self.teacher_beams > 1 else ""
        return f"the teacher translates {round(total * tokens / asked):,} of {total:,} lines{faster}"

    def smallest_block(self, block_size: int) -> int:
        """Pairs are padded together in any number."""
        return min(block_size, SMALLEST)

    def prepare(self, teacher: PreTrainedModel | None, longest: int) -> list[str]:
        """Tokenize the pairs and the teacher's translations, or take them from the cache."""
        if not self.corpora:
            self.read()
        for i, pair in enumerate(self.pairs):
            if pair.target != TEACHER:
                continue
            if teacher is None:
                raise T2RError("there is no teacher to translate the sources: name files of targets")
            lines: LineSource = find_file(pair.source)
            name, total = f"{pair.source}, translated by the teacher", self.asked[i][0]
            if self.translated < 1 and not self.is_translated(teacher, i):
                lines = SomeLines(lines, max(1, round(self.translated * total)), total)
                name = f"{lines.path}, translated by the teacher"
            with self.caching():
                written = write_translations(
                    teacher,
                    self.tokenizer,
                    lines,
                    beams=self.teacher_beams,
                    length_penalty=self.length_penalty,
                    progress=self.progress,
                )
                corpus = tokenize_pairs(
                    lines, str(written), self.tokenizer, name=name, as_tokens=True, progress=self.progress
                )
                self.corpora[i] = self.joined(corpus)
        self.blocks.clear()
        self.check_vocabulary()
        for size in self.block_sizes or filter(None, [longest]):  # 0: nothing is trained
            self.dataset(size).notices()
        self.warn_of_short_pairs()
        return [corpus.key for _, corpus in sorted(self.corpora.items())]

    def check_vocabulary(self) -> None:
        """Raise T2RError if the tokenizer does not belong to the model."""
        for corpus in self.corpora.values():
            for side, size in zip((corpus.source, corpus.target), self.vocabularies or (), strict=False):
                side.check_vocabulary(size)

    def warn_of_short_pairs(self) -> None:
        """Warn if the lines that are measured are longer than those that are learned."""
        pairs = sum(map(len, self.corpora.values()))
        learned, measured = self.tokens / pairs, sum(self.valid_lengths) / max(1, len(self.valid_lengths))
        if measured > LONGER * learned:
            logger.warning(
                "pairs of the training text have %.0f tokens in the mean, and those of %s have %.0f: an RNN loses most "
                "on lines that are longer than what it learned; join neighboring lines (--join 4), or add longer ones",
                learned,
                self.valid_source,
                measured,
            )

    @property
    def tokens(self) -> int:
        """Return the number of training tokens. A pair counts as its longer side."""
        return sum(int(corpus.lengths.sum()) for corpus in self.corpora.values())

    @property
    def epoch_tokens(self) -> int:
        there = sorted(self.corpora)
        if not there:
            return 0
        weighted = [self.pairs[i].weighted for i in there]
        counts = [int(self.corpora[i].lengths.sum()) for i in there]
        if weighted[0].share is None:
            readings = [exact(entry.readings or 1.0) for entry in weighted]
        else:
            readings = readings_of_shares([exact(entry.share) for entry in weighted], counts)
        return round(sum(times * count for times, count in zip(readings, counts, strict=True)))

    def dataset(self, block_size: int) -> PairBlocks:
        """Return the blocks of the corpora that are available."""
        if block_size not in self.blocks:
            there = sorted(self.corpora)
            self.blocks[block_size] = PairBlocks(
                [self.pairs[i].weighted for i in there],
                [self.corpora[i] for i in there],
                block_size,
                positions=self.positions,
                seed=self.seed,
            )
        return self.blocks[block_size]

    def example(self, rows: int, length: int) -> dict[str, Tensor]:
        """Return a batch of pairs of median length among those that are not too long, or of random tokens if there are
        no pairs yet."""
        for corpus in self.corpora.values():
            by_length = np.argsort(corpus.lengths, kind="stable")
            if self.longest is not None:
                by_length = by_length[corpus.lengths[by_length] <= self.longest]
            if not len(by_length):
                continue
            middle = len(by_length) // 2
            count = max(1, rows * length // int(corpus.lengths[by_length[middle]]))
            chosen = by_length[(middle + np.arange(count) - count // 2) % len(by_length)]
            return self.collate([corpus.take(chosen)])
        tokens = min(length, 32)
        ids = torch.randint(min(self.vocabularies or (2,)), (max(1, rows * length // tokens), tokens)).numpy()
        return self.collate([[Pair(row, row) for row in ids]])

    def told_data(self) -> str:
        names = []
        for pair in self.pairs:
            target = "translations by the base model" if pair.target == TEACHER else f"`{Path(pair.target).name}`"
            names.append(f"`{Path(pair.source).name}` with {target}{pair.weighted.told}")
        joined = "" if self.join == 1 else f", of up to {self.join} neighboring lines each"
        pairs = counted(sum(map(len, self.corpora.values())), "pair")
        return f"{', '.join(names)}: {pairs}{joined}, {self.tokens:,} tokens"

    def mixture(self, read: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
        total = sum(map(sum, read.values()))
        sources = []
        for i, pair in enumerate(self.pairs):
            if i not in self.corpora:
                return []
            own = {stage: tokens[i] for stage, tokens in read.items()}
            size = {"pairs": len(self.corpora[i]), "tokens": int(self.corpora[i].lengths.sum())}
            size |= {} if self.join == 1 else {"join": self.join}
            sources.append(pair.weighted.record(own, total) | {"target": pair.target} | size)
        return sources

    # --- Batches --------------------------------------------------------------------------------------------

    def rows_of(self, item: Sequence[Pair]) -> int:
        return len(item)

    def collate(self, items: Sequence[Sequence[Pair]]) -> dict[str, Tensor]:
        """Collate the pairs of these blocks, padded on the right."""
        pairs = [pair for block in items for pair in block]
        sources, targets = zip(*pairs, strict=True)
        ids, mask = padded(sources, self.pad)
        labels, _ = padded(targets, IGNORED)
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "decoder_input_ids": self.shift(labels),
            "labels": labels,
        }

    def in_few_shapes(self, batch: dict[str, Tensor], block_size: int) -> dict[str, Tensor]:
        """Return the batch of a block with its full width and number of rows.

        Rows that the block lacks are copies of others without labels: they add nothing to the loss."""
        labels = batch["labels"]
        rows, width = self.dataset(block_size).shape_of(max(labels.shape[1], batch["input_ids"].shape[1]))
        chosen = torch.arange(max(rows, len(labels))) % len(labels)
        filled = {}
        for name, x in batch.items():
            padding = {"labels": IGNORED, "attention_mask": 0}.get(name, self.pad)
            x = x if x.dim() == 1 else torch.nn.functional.pad(x, (0, width - x.shape[1]), value=padding)
            filled[name] = x[chosen]
        filled["labels"][len(labels) :] = IGNORED
        return filled

    def labels(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the labels, unshifted: the decoder inputs are shifted instead."""
        return batch["labels"]

    def real_positions(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the positions that predict a token. The padding of targets is not matched in a transfer."""
        return batch["labels"] >= 0

    def disturbed(self, batch: dict[str, Tensor], share: float | Tensor) -> dict[str, Tensor]:
        """Add token noise to sources and decoder inputs. Padding and the decoder's start token are kept."""
        source = exchanged(batch["input_ids"], share, batch["attention_mask"].bool())
        ids, labeled = batch["decoder_input_ids"], batch["labels"] >= 0
        target = torch.cat([ids[:, :1], exchanged(ids[:, 1:], share, labeled[:, 1:])], dim=1)
        return batch | {"input_ids": source, "decoder_input_ids": target}

    # --- Measuring and telling ------------------------------------------------------------------------------

    def windows(self, model: PreTrainedModel, teacher_tokens: int | None = None) -> tuple[int, int]:
        """Return the number of lines, and the cost of one line in tokens, beam search included."""
        if not self.valid:
            return 0, 0
        count = min(len(self.valid), self.limit or len(self.valid))
        mean = sum(self.valid_lengths) / len(self.valid_lengths)
        return count, round(mean * (1 + SEARCH * self.beams))

    def restrict(self, *, teacher_tokens: int | None = None, windows: int | None = None) -> None:
        if teacher_tokens is not None:
            self.translated = teacher_tokens / self.asked_of_teacher
        self.limit = self.limit if windows is None else windows

    def measure(self, model: PreTrainedModel, teacher: PreTrainedModel | None = None) -> dict[str, Any] | None:
        if not self.valid:
            return None
        lines = self.valid[: self.limit]
        sources, references = (list(side) for side in zip(*lines, strict=True))
        coded = zip(encode_sources(self.tokenizer, sources), encode_targets(self.tokenizer, references), strict=True)
        pairs = [Pair(*(np.array(side, dtype=np.int64) for side in ids)) for ids in coded]
        pairs.sort(key=lambda pair: len(pair.target))
        measured: dict[str, Any] = dict(token_scores(model, map(self.collate, batched(pairs)), teacher))
        with progress_bar("translating", len(lines), "lines", shown=self.progress) as report:
            texts = translate(
                model,
                self.tokenizer,
                sources,
                beams=self.beams,
                length_penalty=self.length_penalty,
                name=str(self.valid_source),
                report=report,
            )
        return measured | score(texts, references) | {"lines": len(lines)}

    @staticmethod
    def doubt(teacher: Mapping[str, Any]) -> str | None:
        if teacher["loss"] is not None and teacher["loss"] <= DOUBTFUL:
            return None
        return f"its loss is {number(teacher['loss'], 1) or 'not finite'} per token, and its BLEU {teacher['bleu']:.1f}"

    @staticmethod
    def gap(teacher: Mapping[str, Any], student: Mapping[str, Any]) -> str | None:
        own, best = student["bleu"], teacher["bleu"]
        if best - own <= max(LEAST, FAR * best):
            return None
        return f"its BLEU is {own:.1f} instead of {best:.1f} ({own - best:+.1f})"

    def prompts(self) -> list[str]:
        return [source for source, _ in self.valid[:SAMPLES]]

    def told(self, measured: dict[str, Any]) -> str:
        return f"BLEU {measured['bleu']:.2f}, chrF {measured['chrf']:.2f}, loss {measured['loss']:.3f} per token"

    @staticmethod
    def table(
        measured: Sequence[tuple[str, dict[str, Any] | None]], *, compared: bool
    ) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        found = [(name, values) for name, values in measured if values is not None]
        rows: list[tuple[str, ...]] = []
        for name, values in found:
            cells = [number(values[key], digits) for key, digits in (("bleu", 2), ("chrf", 2), ("loss", 3))]
            if compared:
                first = found[0][1]["bleu"]
                gap = f"{values['bleu'] - first:+.2f}" if values["bleu"] is not None and first is not None else ""
                cells = [cells[0], gap, *cells[1:], number(values["kl"], 4)]
            rows.append((name, *cells))
        if compared:
            return ("model", "BLEU", "against the teacher", "chrF", "loss per token", "KL to the teacher"), rows
        return ("model", "BLEU", "chrF", "loss per token"), rows


def size_of(source: str, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return the number of lines of a file, and of its tokens, estimated from some lines. Raises T2RError if it has no
    text."""
    lines = list(find_file(source).read_lines())
    if not any(line.strip() for line in lines):
        raise T2RError(f"{source} has no text for the teacher to translate: give source sentences, one per line")
    some = lines[:: -(-len(lines) // SAMPLE)]
    tokens = round(len(lines) * sum(map(len, encode_sources(tokenizer, some))) / len(some))
    return len(lines), max(1, tokens)


def batched(pairs: Sequence[Pair]) -> Iterable[list[list[Pair]]]:
    """Group pairs, sorted by length, into batches of one block each."""
    batch: list[Pair] = []
    for pair in pairs:
        longest = max(len(side) for each in (*batch, pair) for side in each)
        if batch and (len(batch) + 1) * longest > MEASURED:
            yield [batch]
            batch = []
        batch.append(pair)
    if batch:
        yield [batch]


def padded(rows: Sequence[NDArray[np.int64]], padding: int) -> tuple[Tensor, Tensor]:
    """Return rows of tokens padded on the right, and their mask. Much faster than torch's `pad_sequence`."""
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(mask.shape, padding, dtype=np.int64)
    ids[mask] = np.concatenate(rows)
    return torch.from_numpy(ids), torch.from_numpy(mask.astype(np.int64))


def shift_of(model: Any) -> Callable[[Tensor], Tensor]:
    """Return the model's function from labels to decoder inputs."""
    own = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if own is None:
        start, pad = model.config.decoder_start_token_id, model.config.pad_token_id
        return lambda labels: shifted(labels, start, pad)
    return lambda labels: own(labels.clone())  # FSMT's modifies its argument


def shifted(labels: Tensor, start: int = 0, pad: int = 0) -> Tensor:
    """Shift labels to the right by one, after the decoder's start token."""
    ids = labels.new_full(labels.shape, start)
    ids[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] < 0, pad)
    return ids
