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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from t2r.data import fingerprint
from t2r.data.blocks import BLOCK_SIZE, check_block_size
from t2r.data.corpus import TokenCorpus
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
    continues: TokenCorpus | None = None,
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
            quarter of its memory, up to 4,096. Part of the settings, because the random numbers depend on it.
        temperature: of the sampling.
        top_p: of the sampling. With both at 1, the teacher's own distribution.
    """
    check_block_size(length, getattr(model.config.get_text_config(), "max_position_embeddings", None))
    batch_size = fitting_batch(model, length) if batch_size is None else batch_size
    if tokens < 1 or batch_size < 1:
        raise T2RError(f"tokens ({tokens}) and batch_size ({batch_size}) must be at least 1")
    if temperature <= 0 or not 0 < top_p <= 1:
        raise T2RError(f"temperature ({temperature}) must be above 0, and top_p ({top_p}) in (0, 1]")
    batches = math.ceil(tokens / (batch_size * length))
    settings: list[Any] = [batches, length, batch_size, temperature, top_p, seed]
    if continues is not None:
        settings.append(continues.folder.name)  # which is made from what is in it
    key = fingerprint.digest([fingerprint.of_model(model), fingerprint.of_tokenizer(tokenizer), settings])
    path = Path(folder or fingerprint.cache_folder("teacher")).expanduser() / f"{key}.jsonl"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)

    config = GenerationConfig(
        do_sample=True,
        max_length=length,
        temperature=temperature,
        top_k=0,
        top_p=top_p,
        pad_token_id=tokenizer.pad_token_id or 0,  # never used, but asked for
    )

    def start() -> Tensor:
        if continues is None:
            return first_tokens(tokenizer, batch_size)
        return excerpts(continues, batch_size, min(CONTINUED, length // 2))

    partial = path.with_suffix(".partial")
    done = resume(partial, batch_size)
    columns = (TextColumn("the teacher writes"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        partial.open("a", encoding="utf-8", newline="\n") as file,
        generating(model, config),
        Progress(*columns, console=Console(stderr=True), disable=not progress) as bar,
    ):
        task = bar.add_task("", total=batches, completed=done)
        for number in range(done, batches):
            for text in sample(model, tokenizer, start, f"{seed}/{number}"):
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            file.flush()
            bar.advance(task)
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
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, start: Callable[[], Tensor], seed: str
) -> list[str]:
    """A batch of texts, which depends on the seed alone; the caller's random numbers stay as they are."""
    device = model.device
    accelerator = device.type != "cpu"
    devices, kind = ([device.index or 0], device.type) if accelerator else ([], "cuda")
    with torch.random.fork_rng(devices, device_type=kind):
        torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big"))
        given = start().to(device)
        out = model.generate(given, attention_mask=torch.ones_like(given))  # type: ignore[operator]
    texts = tokenizer.batch_decode(out.cpu(), clean_up_tokenization_spaces=False)
    # A sample may start or stop in the middle of a character.
    return [text.strip("\ufffd") for text in texts]


def first_tokens(tokenizer: PreTrainedTokenizerBase, batch_size: int) -> Tensor:
    """The tokens that samples start with, of shape [batch, 1]."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return torch.full((batch_size, 1), token)
    return torch.randint(len(tokenizer), (batch_size, 1))


def excerpts(corpus: TokenCorpus, batch_size: int, length: int) -> Tensor:
    """Stretches from anywhere in a corpus, of shape [batch, length]."""
    length = min(length, len(corpus))
    places = torch.randint(len(corpus) - length + 1, (batch_size,)).tolist()
    return torch.from_numpy(np.stack([corpus.tokens[place : place + length] for place in places]).astype("int64"))
