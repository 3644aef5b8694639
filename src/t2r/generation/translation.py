"""Translation of many lines, in batches of similar length, to a list or to a file.

A line's translation does not depend on the lines beside it: a batch holds lines of one bucket of lengths, which decides
how long a translation may become. Every model that t2r supports translates in the engine, also if it is not swapped. In
a greedy search, lines that have ended make room for the next ones, so that no line waits for the slowest.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from t2r.data import fingerprint
from t2r.data.parallel.corpus import encode_sources, encode_targets, languages
from t2r.data.parallel.lines import LineSource, find_file
from t2r.data.progress import progress_bar
from t2r.data.text import check_unicode
from t2r.errors import T2RError
from t2r.generation.engine import Engine, ForGenerate
from t2r.generation.engine.arguments import check_texts
from t2r.generation.engine.softmax import on_the_engine
from t2r.generation.state import check_vocabulary
from t2r.generation.text import padded, run, special_tokens, until_stop
from t2r.model.logits import evaluating, logits_at_once
from t2r.options import RunOptions, check
from t2r.storage import resumable_file

logger = logging.getLogger(__name__)

BEAMS, LENGTH_PENALTY = RunOptions.beams, RunOptions.length_penalty
"""The paper's."""
BUCKET = 16
"""The smallest difference between the lengths of two buckets."""
TOKENS = {"cpu": 4096}
MANY = 1 << 16
"""Source tokens per batch, times beams: on a CPU, and on an accelerator."""
CACHE = 1 << 33
"""Bytes of the caches of a batch, at most."""
PARTS = 4
"""In a greedy search, as many lines are read at a time as are a quarter of the running batch."""
FORMAT = 2
"""Of cached translations. In format 1, a translation that a forced EOS token ended at its limit was not empty."""
CHUNK = 131072
"""Lines of a file per write, at most. Many, so that the batches of each bucket of lengths are full."""
FIRST = {"cpu": 256}
"""Lines of the first write, if fewer. The next ones have as many lines as take the time of `INTERVAL`."""
TIMED = {"cpu": (1, 8, 32)}
TIMED_IN_BATCHES = (64, 256, 1024)
"""Numbers of lines whose translation is timed: on a CPU, and on an accelerator. The first is a warm-up."""
ENOUGH = 5.0
"""Seconds after which no more lines are timed."""
INTERVAL = 180.0
"""Seconds between writes: an interrupted run loses at most about this much work."""


def bucket_of(length: int) -> int:
    """Return the bucket of a source length: 16, 32, 48, 64, 96, 128, 192, 256, 384, ...

    A batch runs until its longest translation ends. Wide buckets of long lines keep the number of batches small."""
    step = max(BUCKET, 1 << max(0, (length - 1).bit_length() - 2))
    return -(-length // step) * step


def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lines: Sequence[str],
    *,
    beams: int = BEAMS,
    length_penalty: float = LENGTH_PENALTY,
    name: str = "line",
    report: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """Translate lines, in order. The translation of an empty line is empty.

    Args:
        model: an encoder-decoder.
        tokenizer: its tokenizer.
        lines: the source sentences.
        beams: beams of the search; 1: greedy search.
        length_penalty: length penalty of the beam search.
        name: name of the source in errors.
        report: called with the number of finished lines.

    Raises T2RError for a line with more tokens than the model has positions.
    """
    tokens = translate_to_tokens(model, tokenizer, lines, beams, length_penalty, name=name, report=report)
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    return [" ".join(text.split()) if row else "" for text, row in zip(texts, tokens, strict=True)]


def translate_to_tokens(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    lines: Sequence[str],
    beams: int,
    length_penalty: float,
    *,
    name: str,
    first: int = 1,
    whole: bool = False,
    report: Callable[[int], None] = lambda done: None,
) -> list[list[int]]:
    """Translate lines to token ids, including the end token.

    `first` is the line number of the first line, for errors. With `whole`, lines that are too long for the model and
    translations that do not end give no tokens. Otherwise the former raise T2RError and the latter are truncated."""
    check_texts("lines", lines)
    check(RunOptions, {"beams": beams, "length_penalty": length_penalty})
    for number, line in enumerate(lines, first):
        check_unicode(line, f"{name}:{number}")
    rows = encode_sources(tokenizer, list(lines)) if lines else []
    limit = getattr(model.config, "max_position_embeddings", None)
    buckets: dict[int, list[int]] = {}
    for i, (line, row) in enumerate(zip(lines, rows, strict=True)):
        if not line.strip():
            continue
        if limit is not None and len(row) > limit:
            if whole:
                continue
            raise T2RError(f"{name}:{first + i}: {len(row)} tokens are beyond the {limit} positions of the model")
        buckets.setdefault(bucket_of(len(row)), []).append(i)
    check_vocabulary(model, [max(rows[i]) for batch in buckets.values() for i in batch if rows[i]])
    done = len(lines) - sum(map(len, buckets.values()))
    found: list[list[int]] = [[] for _ in lines]
    stops, pad = special_tokens(model, tokenizer)
    ready = for_engine(model)
    with evaluating(model, ready):
        for size in sorted(buckets):
            most = 2 * size + BUCKET if limit is None else min(2 * size + BUCKET, limit - 1)
            options: dict[str, Any] = {"num_beams": beams, "do_sample": False, "pad_token_id": pad}
            options |= {"max_new_tokens": most} | ({"length_penalty": length_penalty} if beams > 1 else {})
            batch = sorted(buckets[size], key=lambda i: -len(rows[i]))  # the longest first: they end last
            for number, tokens in search(model, ready, [rows[i] for i in batch], size, options):
                ended = until_stop(tokens, stops)
                unfinished = ended[-1] not in stops or len(ended) == most  # an EOS token may be forced at the limit
                found[batch[number]] = [] if whole and unfinished else ended
                done += 1
                report(done)
    return found


def for_engine(model: Any) -> Any:
    """Return the model as the engine decodes it, or None, with a message in the log, if it cannot."""
    try:
        if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
            raise T2RError("the model is on several devices")
        ready = on_the_engine(model)
        if (obstacle := Engine(ready).obstacle) is not None:
            raise T2RError(obstacle)
    except T2RError as reason:
        logger.warning("translating with model.generate(), which is slower than the engine: %s", reason)
        return None
    return ready


def search(
    model: Any, ready: Any, rows: Sequence[list[int]], size: int, options: dict[str, Any]
) -> Iterator[tuple[int, list[int]]]:
    """Translate sources of up to `size` tokens. Yields the number of each and its tokens, in any order.

    Caches have one size for all batches, so that the decoding step is captured once."""
    beams, length = options["num_beams"], 1 + options["max_new_tokens"]  # a decoder starts with one token
    count = min(len(rows), lines_at_once(model, ready, size, length, beams))

    def batches(count: int) -> Iterator[dict[str, Any]]:
        for start in range(0, len(rows), count):
            ids, mask = padded(rows[start : start + count], options["pad_token_id"], left=False)
            yield {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device), **options}

    limit = count if beams == 1 else None
    engine = None if ready is None else Engine(ready, rows=limit, max_length=length, source_length=size)
    if engine is not None and beams == 1:
        by_row = ready.t2r_family.positions_by_row  # otherwise a batch must end before the next can start
        part = max(1, count // PARTS) if by_row and len(rows) > count else count
        try:
            yield from engine.generate_each(batches(part))
            return
        except ForGenerate as reason:
            engine._say_elsewhere(reason)
            engine = None
    number = 0
    for batch in batches(-(-len(rows) // -(-len(rows) // count))):  # of even size, so that one decoding step fits all
        ids = batch.pop("input_ids")
        sequences, _ = run(model, engine, ids, None, batch)
        for tokens in sequences[:, 1:].tolist():
            yield number, tokens
            number += 1


def lines_at_once(model: Any, ready: Any, size: int, length: int, beams: int) -> int:
    """Return how many lines to translate at a time, by their tokens, and by the sizes of logits and caches."""
    tokens = TOKENS.get(model.device.type, MANY) // size
    logits = logits_at_once(model.device) // model.get_output_embeddings().weight.shape[0]
    held = tokens if ready is None else CACHE // ready.row_bytes(length, size)
    return max(1, min(tokens, logits, held) // beams)


def write_translations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str | LineSource,
    folder: str | Path | None = None,
    *,
    beams: int = BEAMS,
    length_penalty: float = LENGTH_PENALTY,
    progress: bool = True,
) -> Path:
    """Translate a file, or some of its lines, line by line, and return the path of the translations.

    Translations are token ids separated by spaces, because tokenizing their text may give other tokens. The file is
    cached under a name made from the model, the source and the settings. A `.partial` file, written every few minutes,
    is where the next run continues. If another process is writing the file, the call waits for it.

    The line of an empty source, of a source that is too long for the model, or of a translation that does not end is
    empty."""
    file = find_file(source) if isinstance(source, str) else source
    after = after_the_end(model, tokenizer)
    path = translations_path(model, tokenizer, file, folder, beams, length_penalty)
    with resumable_file(path) as resumed:
        if resumed is None:
            return path
        out, done = resumed
        total = sum(1 for _ in file.read_lines())
        lines = islice(file.read_lines(), done, None)
        with progress_bar("the teacher translates", total, "lines", done=done, shown=progress) as report:
            count = min(FIRST.get(model.device.type, CHUNK), CHUNK)
            while chunk := list(islice(lines, count)):
                began = time.perf_counter()
                found = translate_to_tokens(
                    model,
                    tokenizer,
                    chunk,
                    beams,
                    length_penalty,
                    name=str(file.path),
                    first=done + 1,
                    whole=True,
                    report=lambda count, before=done: report(before + count),  # type: ignore[misc]
                )
                out.write("".join(f"{' '.join(map(str, row + after if row else row))}\n" for row in found))
                out.flush()
                done += len(chunk)
                count = next_count(len(chunk), time.perf_counter() - began)
    return path


def translations_path(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    file: LineSource,
    folder: str | Path | None = None,
    beams: int = BEAMS,
    length_penalty: float = LENGTH_PENALTY,
) -> Path:
    """Return where the translations of these lines are cached."""
    settings = [FORMAT, file.fingerprint(), beams, length_penalty, languages(tokenizer)]
    settings += after_the_end(model, tokenizer)
    made = [fingerprint.of_model(model), fingerprint.of_tokenizer(tokenizer), settings]
    return Path(folder or fingerprint.cache_folder("translations")).expanduser() / f"{fingerprint.digest(made)}.txt"


def time_translation(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, lines: Sequence[str], beams: int, length_penalty: float
) -> float:
    """Return the seconds per source token of a search. Full batches may take less: a search of a few lines takes almost
    as long as that of one.

    The lines are those of the bucket of the median length, so that one decoding step is captured or recorded."""
    coded = sorted(zip(map(len, encode_sources(tokenizer, list(lines))), lines, strict=True))
    limit = getattr(model.config, "max_position_embeddings", None) or math.inf
    coded = [(length, line) for length, line in coded if line.strip() and length <= limit]
    if not coded:
        return 0.0
    bucket = bucket_of(coded[len(coded) // 2][0])
    alike = [(length, line) for length, line in coded if bucket_of(length) == bucket]
    token = seconds = 0.0
    for number, count in enumerate(TIMED.get(model.device.type, TIMED_IN_BATCHES)):
        if number > 1 and seconds >= ENOUGH:
            break
        chosen = alike[:: -(-len(alike) // count)]
        began = time.perf_counter()
        translate_to_tokens(model, tokenizer, [line for _, line in chosen], beams, length_penalty, name="line")
        seconds = time.perf_counter() - began
        token = seconds / sum(length for length, _ in chosen)
    return token


def after_the_end(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return what follows the end token in targets: in mBART's, the language, with which its decoder starts.

    The model's shift of labels takes the decoder's first token from there."""
    stops, _ = special_tokens(model, tokenizer)
    start = model.generation_config.decoder_start_token_id
    (coded,) = encode_targets(tokenizer, ["a"])
    return [start] if start not in stops and coded[-1:] == [start] else []


def next_count(lines: int, seconds: float) -> int:
    """Return how many lines to translate before the next write, if that many took this long."""
    return min(CHUNK, max(1, int(lines * INTERVAL / max(seconds, 1e-6))))
