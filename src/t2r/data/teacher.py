"""A corpus that the teacher writes itself, so that a conversion needs nothing but the model, or more than there is of
the text it is for.

It is JSONL, a line a sample. A run that is interrupted leaves a `.partial` with what it had written, and the
next one goes on from there: each batch has a random seed of its own, so both write the same file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from t2r.data import fingerprint
from t2r.data.blocks import BLOCK_SIZE, check_block_size
from t2r.data.corpus import JoinedCorpus, TokenCorpus
from t2r.data.progress import progress_bar
from t2r.errors import T2RError

CONTINUED = 48
"""Tokens of a text that the teacher goes on from."""
MEMORY = 32 << 30
"""What an accelerator is taken to have that does not say."""


def write_corpus(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path | None = None,
    *,
    tokens: int = 10_000_000,
    length: int = BLOCK_SIZE,
    continues: TokenCorpus | JoinedCorpus | None = None,
    batch_size: int | None = None,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    progress: bool = True,
) -> Path:
    """Have the model write at least so many tokens of text, and return the path of the JSONL file.

    Every sample starts with the BOS token (or EOS, which stands between documents, where there is no BOS; or
    a random token where there is neither) and has `length` tokens. It does not stop at EOS: the teacher goes
    on to the next document or turn, as in the text it was trained on. Special tokens stay in the text, so the
    file is best tokenised with `add_eos=False`.

    With a corpus to continue, a sample starts with 48 tokens from anywhere in it (or with half a sample, if that
    is less): more text of that kind than there is.

    The file's name is made from the model and all the settings: what is there already is returned at once.
    Only one process may write the same corpus at a time.

    Args:
        folder: where the file goes; by default `teacher` in `T2R_CACHE` or in `~/.cache/t2r`.
        tokens: rounded up to whole batches.
        length: tokens of a sample.
        continues: the corpus from which samples start.
        batch_size: samples at a time; by default 64, on an accelerator as many as have their keys and values in a
            quarter of its memory, up to 4,096, and no more than are asked for. Part of the settings, because the random
            numbers depend on it.
        temperature: of the sampling.
        top_p: of the sampling. With both at 1, the teacher's own distribution.
    """
    check_block_size(length, getattr(model.config.get_text_config(), "max_position_embeddings", None))
    if batch_size is None:
        batch_size = min(fitting_batch(model, length), max(1, math.ceil(tokens / length)))
    if tokens < 1 or batch_size < 1:
        raise T2RError(f"tokens ({tokens}) and batch_size ({batch_size}) must be at least 1")
    if temperature <= 0 or not 0 < top_p <= 1:
        raise T2RError(f"temperature ({temperature}) must be above 0, and top_p ({top_p}) in (0, 1]")
    batches = math.ceil(tokens / (batch_size * length))
    settings: list[Any] = [batches, length, batch_size, temperature, top_p, seed]
    if continues is not None:
        settings.append(continues.key)  # which is made from what is in it
    key = fingerprint.digest([fingerprint.of_model(model), fingerprint.of_tokenizer(tokenizer), settings])
    path = Path(folder or fingerprint.cache_folder("teacher")).expanduser() / f"{key}.jsonl"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)

    def start() -> Tensor:
        if continues is None:
            return first_tokens(tokenizer, batch_size)
        return excerpts(continues, batch_size, min(CONTINUED, length // 2))

    partial = path.with_suffix(".partial")
    done = resume(partial, batch_size)
    size = batch_size * length
    with (
        partial.open("a", encoding="utf-8", newline="\n") as file,
        generating(model, sampling(tokenizer, length, temperature, top_p)),
        progress_bar("the teacher writes", batches * size, "tokens", done=done * size, shown=progress) as report,
    ):
        for number in range(done, batches):

            def written(count: int, before: int = number * size) -> None:
                report(before + count)

            for text in sample(model, tokenizer, start, f"{seed}/{number}", report=written):
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            file.flush()
            report((number + 1) * size)
        os.fsync(file.fileno())
    partial.replace(path)
    return path


def resume(partial: Path, batch_size: int) -> int:
    """How many batches a partial file has, after cutting off one that was not completed."""
    if not partial.exists():
        return 0
    ends = [0]
    with partial.open("r+b") as file:
        for line in file:
            if not line.endswith(b'"}\n'):
                break
            ends.append(ends[-1] + len(line))
        done = (len(ends) - 1) // batch_size
        file.truncate(ends[done * batch_size])
    return done


def sampling(
    tokenizer: PreTrainedTokenizerBase, length: int, temperature: float = 1.0, top_p: float = 1.0
) -> GenerationConfig:
    return GenerationConfig(
        do_sample=True,
        max_length=length,
        temperature=temperature,
        top_k=0,
        top_p=top_p,
        pad_token_id=tokenizer.pad_token_id or 0,  # never used, but asked for
    )


@contextmanager
def generating(model: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """The model in evaluation mode with this configuration alone.

    Passed to `generate` as an argument it would be completed from the model's own, which may have a
    repetition penalty, and which names the EOS token to stop at.
    """
    own, training = model.generation_config, model.training
    model.generation_config = config
    model.eval()
    try:
        yield
    finally:
        model.generation_config = own
        model.train(training)


class Counter(StoppingCriteria):
    """Never stops; reports the number of tokens written so far. The first tokens of samples count too."""

    def __init__(self, report: Callable[[int], None]) -> None:
        self.report = report

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.report(input_ids.numel())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def fitting_batch(model: PreTrainedModel, length: int) -> int:
    """How many samples to write at a time. A power of two that model and machine decide on, and not the memory that
    happens to be free: the same command writes the same corpus."""
    if model.device.type == "cpu":
        return 64
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    bytes_ = 2 * config.num_hidden_layers * heads * size * length * model.dtype.itemsize
    on_gpu = model.device.type == "cuda"
    memory = torch.cuda.get_device_properties(model.device).total_memory if on_gpu else MEMORY
    return 1 << min(12, max(1, memory // 4 // bytes_).bit_length() - 1)


def sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    start: Callable[[], Tensor],
    seed: str,
    *,
    report: Callable[[int], None] = lambda tokens: None,
) -> list[str]:
    """A batch of texts, which depends on the seed alone; the caller's random numbers stay as they are.

    `report` is called with the number of tokens after each step."""
    device = model.device
    accelerator = device.type != "cpu"
    devices, kind = ([device.index or 0], device.type) if accelerator else ([], "cuda")
    with torch.random.fork_rng(devices, device_type=kind):
        torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big"))
        given = start().to(device)
        criteria = StoppingCriteriaList([Counter(report)])
        mask = torch.ones_like(given)
        out = model.generate(given, attention_mask=mask, stopping_criteria=criteria)  # type: ignore[operator]
    texts = tokenizer.batch_decode(out.cpu(), clean_up_tokenization_spaces=False)
    # A sample may start or stop in the middle of a character.
    return [text.strip("\ufffd") for text in texts]


class WritingSpeed(NamedTuple):
    """Seconds in which a teacher writes one token of each of `n` samples at a time: `fixed + n * row`."""

    fixed: float
    row: float
    rows: int
    """As many samples at a time as it writes when it is asked for much."""

    def seconds(self, tokens: int, length: int) -> float:
        """For so many tokens in samples of this length, as `write_corpus` writes them."""
        rows = min(self.rows, max(1, math.ceil(tokens / length)))
        return math.ceil(tokens / (rows * length)) * length * (self.fixed + rows * self.row)

    def tokens(self, seconds: float, length: int) -> int:
        """How many are written in so many seconds: whole batches, or as many samples at a time as there is time for."""
        batches = int(seconds / (length * (self.fixed + self.rows * self.row)))
        if batches:
            return batches * self.rows * length
        return max(0, int((seconds / length - self.fixed) / self.row)) * length


LONGER = 1.25
"""By what a step takes longer in the middle of a sample than at its start, where it is timed."""


def writing_speed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int) -> WritingSpeed:
    """Time the first few tokens of samples, for a few samples at a time and for many."""
    many = fitting_batch(model, length)
    few = max(1, many // 8)
    seconds = []
    with generating(model, sampling(tokenizer, min(5, length))):
        for rows in (few, many):
            times: list[float] = []
            sample(
                model,
                tokenizer,
                lambda rows=rows: first_tokens(tokenizer, rows),  # type: ignore[misc]
                "speed",
                report=lambda _, times=times: times.append(time.perf_counter()),  # type: ignore[misc]
            )
            steps = sorted(after - before for before, after in pairwise(times)) or [1e-3]
            seconds.append(steps[len(steps) // 2] * LONGER)
    row = max((seconds[1] - seconds[0]) / max(1, many - few), 1e-9)
    return WritingSpeed(max(0.0, seconds[1] - many * row), row, many)


def first_tokens(tokenizer: PreTrainedTokenizerBase, batch_size: int) -> Tensor:
    """The tokens that samples start with, of shape [batch, 1]."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return torch.full((batch_size, 1), token)
    return torch.randint(len(tokenizer), (batch_size, 1))


def excerpts(corpus: TokenCorpus | JoinedCorpus, batch_size: int, length: int) -> Tensor:
    """Stretches from anywhere in a corpus, of shape [batch, length]."""
    length = min(length, len(corpus))
    places = torch.randint(len(corpus) - length + 1, (batch_size,)).tolist()
    return torch.from_numpy(np.stack([corpus.read(place, place + length) for place in places]))
