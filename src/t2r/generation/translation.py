"""Translating many lines: in batches of about the same length, in their order, to a list or to a file.

A line's translation does not depend on the lines beside it: a batch holds lines of one bucket of lengths, which decides
how long a translation may become.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from t2r.data import fingerprint
from t2r.data.parallel import encode_sources, find_file
from t2r.data.progress import progress_bar
from t2r.data.text import check_unicode
from t2r.errors import T2RError
from t2r.generation.engine import Engine
from t2r.generation.state import check_vocabulary
from t2r.generation.text import complete_batch
from t2r.model.logits import evaluating
from t2r.model.modeling import T2RModel

BEAMS, LENGTH_PENALTY = 5, 0.6
"""The paper's."""
BUCKET = 16
"""Lengths are rounded up to a multiple of this."""
TOKENS = {"cpu": 4096}
MANY = 1 << 16
"""Tokens of sources that are translated at a time, counted for each beam: on a CPU, on an accelerator."""
CHUNK = 8192
"""Lines of a file that are translated before they are written."""


def translate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lines: Sequence[str],
    *,
    beams: int = BEAMS,
    length_penalty: float = LENGTH_PENALTY,
    name: str = "line",
    first: int = 1,
    skip_long: bool = False,
    report: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """The translations of lines, in their order. An empty line stays empty.

    Args:
        beams: of beam search; 1 is greedy.
        length_penalty: of beam search.
        name, first: what the lines are called in errors, and the number of the first one.
        skip_long: leave the translation of a line empty that is longer than the model's positions. Otherwise it is an
            error.
        report: called with the number of lines that are done.
    """
    for number, line in enumerate(lines, first):
        check_unicode(line, f"{name}:{number}")
    rows = encode_sources(tokenizer, list(lines)) if lines else []
    limit = getattr(model.config, "max_position_embeddings", None)
    buckets: dict[int, list[int]] = {}
    for i, (line, row) in enumerate(zip(lines, rows, strict=True)):
        if not line.strip():
            continue
        if limit is not None and len(row) > limit:
            if skip_long:
                continue
            raise T2RError(f"{name}:{first + i}: {len(row)} tokens are beyond the {limit} positions of the model")
        check_vocabulary(model, row)
        buckets.setdefault(-(-len(row) // BUCKET) * BUCKET, []).append(i)
    done = len(lines) - sum(map(len, buckets.values()))
    texts = [""] * len(lines)
    engine = Engine(model) if isinstance(model, T2RModel) and beams == 1 else None
    options = {"num_beams": beams, "do_sample": False} | ({"length_penalty": length_penalty} if beams > 1 else {})
    at_once = TOKENS.get(model.device.type, MANY)
    with evaluating(model):
        for size in sorted(buckets):
            members = buckets[size]
            count = max(1, at_once // (size * beams))
            most = 2 * size + BUCKET
            options["max_new_tokens"] = most if limit is None else min(most, limit - 1)
            for start in range(0, len(members), count):
                batch = members[start : start + count]
                given = [lines[i] for i in batch], [rows[i] for i in batch]
                for i, completion in zip(
                    batch, complete_batch(model, tokenizer, *given, options, engine=engine), strict=True
                ):
                    texts[i] = " ".join(completion.text.split())
                done += len(batch)
                report(done)
    return texts


def write_translations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    folder: str | Path | None = None,
    *,
    beams: int = BEAMS,
    length_penalty: float = LENGTH_PENALTY,
    progress: bool = True,
) -> Path:
    """Have the model translate a file, line by line, and return the path of the translations.

    Their name is made from the model, the file and the settings: what is there already is returned at once. A run that
    is interrupted leaves a `.partial`, and the next one goes on from there. The line of a source that is empty, or
    longer than the model's positions, is empty."""
    file = find_file(source)
    made = [fingerprint.of_model(model), fingerprint.of_tokenizer(tokenizer), file.fingerprint(), beams, length_penalty]
    path = Path(folder or fingerprint.cache_folder("translations")).expanduser() / f"{fingerprint.digest(made)}.txt"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    total = sum(1 for _ in file.read_lines())
    done = complete_lines(partial)
    lines = islice(file.read_lines(), done, None)
    with (
        partial.open("a", encoding="utf-8", newline="\n") as out,
        progress_bar("the teacher translates", total, "lines", done=done, shown=progress) as report,
    ):
        while chunk := list(islice(lines, CHUNK)):
            texts = translate(
                model,
                tokenizer,
                chunk,
                beams=beams,
                length_penalty=length_penalty,
                name=source,
                first=done + 1,
                skip_long=True,
                report=lambda count, before=done: report(before + count),  # type: ignore[misc]
            )
            out.write("".join(f"{text}\n" for text in texts))
            out.flush()
            done += len(chunk)
        os.fsync(out.fileno())
    partial.replace(path)
    return path


def complete_lines(partial: Path) -> int:
    """How many lines a partial file has, after cutting off one that was not completed."""
    if not partial.exists():
        return 0
    count = size = 0
    with partial.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            count, size = count + 1, size + len(line)
        file.truncate(size)
    return count
