"""A corpus that the teacher writes itself, so that a conversion needs nothing but the model.

It is JSONL, a line a sample. A run that is interrupted leaves a `.partial` with what it had written, and the
next one goes on from there: each batch has a random seed of its own, so both write the same file.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from t2r.data import fingerprint
from t2r.data.blocks import BLOCK_SIZE, check_block_size
from t2r.errors import T2RError


def write_corpus(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path | None = None,
    *,
    tokens: int = 10_000_000,
    length: int = BLOCK_SIZE,
    batch_size: int = 64,
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

    The file's name is made from the model and all the settings: what is there already is returned at once.
    Only one process may write the same corpus at a time.

    Args:
        folder: where the file goes; by default `teacher` in `T2R_CACHE` or in `~/.cache/t2r`.
        tokens: rounded up to whole batches.
        length: tokens of a sample.
        batch_size: samples at a time. Part of the settings, because the random numbers depend on it.
        temperature: of the sampling.
        top_p: of the sampling. With both at 1, the teacher's own distribution.
    """
    check_block_size(length, getattr(model.config.get_text_config(), "max_position_embeddings", None))
    if tokens < 1 or batch_size < 1:
        raise T2RError(f"tokens ({tokens}) and batch_size ({batch_size}) must be at least 1")
    if temperature <= 0 or not 0 < top_p <= 1:
        raise T2RError(f"temperature ({temperature}) must be above 0, and top_p ({top_p}) in (0, 1]")
    batches = math.ceil(tokens / (batch_size * length))
    settings = [batches, length, batch_size, temperature, top_p, seed]
    key = fingerprint.digest([fingerprint.of_model(model), fingerprint.of_tokenizer(tokenizer), settings])
    path = Path(folder or fingerprint.cache_folder("teacher")).expanduser() / f"{key}.jsonl"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)

    config = GenerationConfig(
        do_sample=True,
        max_new_tokens=length - 1,
        temperature=temperature,
        top_k=0,
        top_p=top_p,
        pad_token_id=tokenizer.pad_token_id or 0,  # never used, but asked for
    )
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
            for text in sample(model, tokenizer, batch_size, f"{seed}/{number}"):
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


def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int, seed: str) -> list[str]:
    """A batch of texts, which depends on the seed alone; the caller's random numbers stay as they are."""
    device = model.device
    accelerator = device.type != "cpu"
    devices, kind = ([device.index or 0], device.type) if accelerator else ([], "cuda")
    with torch.random.fork_rng(devices, device_type=kind):
        torch.manual_seed(int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big"))
        start = first_tokens(tokenizer, batch_size).to(device)
        out = model.generate(start, attention_mask=torch.ones_like(start))  # type: ignore[operator]
    texts = tokenizer.batch_decode(out.cpu(), clean_up_tokenization_spaces=False)
    # A sample may stop in the middle of a character.
    return [text.rstrip("\ufffd") for text in texts]


def first_tokens(tokenizer: PreTrainedTokenizerBase, batch_size: int) -> Tensor:
    """The tokens that samples start with, of shape [batch, 1]."""
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return torch.full((batch_size, 1), token)
    return torch.randint(len(tokenizer), (batch_size, 1))
