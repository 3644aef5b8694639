"""Writes the teacher's distribution of a text to disk, from where conversions read it.

Several processes may write into one folder, also on several machines that share it. Each takes the next shard that is
not there and not locked by another process.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from t2r.data.blocks import BLOCK_SIZE
from t2r.data.fingerprint import digest, of_config, of_tokenizer, of_weights
from t2r.data.progress import Report, progress_bar
from t2r.data.teacher_logits import (
    BLOCKS,
    HEADER,
    Header,
    TeacherLogits,
    Written,
    are_distributions,
    block_keys,
    read_keys,
    save_keys,
    save_shard,
    shard_path,
)
from t2r.errors import T2RError
from t2r.hub import choose_device, load_model, need_tokenizer
from t2r.model.logits import Readout, evaluating, logits_at_once, widened
from t2r.model.modeling import T2RModel
from t2r.model.top_k import TopK, top_k_of
from t2r.options import RunOptions, Sources, TeachingOptions
from t2r.options.entrance import entrance
from t2r.storage import check_named, kind_of, take_lock, writing
from t2r.tasks.base import max_positions
from t2r.tasks.language_modeling import TEACHER, LanguageModeling
from t2r.training.loop import processes
from t2r.training.sessions.session import caching
from t2r.training.steps.arithmetic import fast_sums, halve
from t2r.training.steps.job import Settings
from t2r.words import counted, duration

logger = logging.getLogger(__name__)

SHARD = 1 << 16
"""Tokens of a shard. What an interrupted process has written of one is lost."""
AT_ONCE, AT_ONCE_CPU = 16384, 2048
"""Tokens of a forward pass."""
POLL, TELL = 1.0, 60.0
"""Seconds between two looks at the shards of other processes, and between two messages without a progress bar."""


@entrance(RunOptions, TeachingOptions)
def teach(
    model: str | Path,
    out: str,
    *,
    train: Sources,
    top_k: int = TeachingOptions.top_k,
    block_size: int | None = None,
    documents: bool = False,
    temperature: float = TeachingOptions.temperature,
    device: str = RunOptions.device,
    bf16: bool | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Write the teacher's distribution of a text: of each position the `top_k` most likely tokens, and the probability
    of all others together. `convert(teacher_logits=out)` then trains without running the teacher.

    An interrupted call is resumed by the same call. Several processes may make the same call at the same time, also on
    several machines that share the folder. Each call returns when the folder is complete.

    Args:
        model: the teacher: a folder, or a hub name.
        out: the output folder.
        train: the texts, as for `convert`. Their weights have no effect.
        documents: attention does not cross document boundaries inside a block.
        bf16: compute in bfloat16. None: on a GPU.
        device: `auto`, `cpu`, `cuda`, ...
        revision: branch, tag or commit on the hub.
        trust_remote_code: whether to run code that comes with the model.
        progress: show progress bars.

    Returns what was written: the number of blocks, tokens and bytes, and the mean probability outside of the top k.
    """
    check_named(out)
    folder = Path(out)
    check_folder(folder)
    place = processes.join(choose_device(device))
    # In float32, as a conversion loads it, which compares its weights; on a GPU there is only what computes.
    teacher = load_model(str(model), dtype="float32", revision=revision, trust_remote_code=trust_remote_code)
    tokenizer = need_tokenizer(str(model), revision=revision, trust_remote_code=trust_remote_code)
    if isinstance(teacher, T2RModel):
        raise T2RError(f"{model} is a conversion: give the model that it was made from, which is its teacher")
    if teacher.config.is_encoder_decoder:
        raise T2RError(f"{model} is an encoder-decoder: t2r teach is for language models")
    how: dict[str, Any] = {"documents": documents, "joined": False, "progress": progress, "caching": caching}
    task = LanguageModeling(tokenizer, train, **how)
    if TEACHER in task.sources:
        raise T2RError("t2r teach reads texts that are there: give files to train on")
    half = Settings.on(place, bf16=bf16).bf16
    lesson = Lesson(teacher, task, place, block_size=block_size, top_k=top_k, temperature=float(temperature), bf16=half)
    lesson.header = begin(folder, lesson.header, lesson.keys)
    began, before = time.monotonic(), len(there(folder, lesson.header))
    try:
        Writer(folder, lesson, progress=progress and processes.is_main()).run()
    except KeyboardInterrupt:
        logger.warning("interrupted: the same command writes what is missing in %s", folder)
        raise
    return result(folder, lesson.header, time.monotonic() - began, resumed=before)


class Lesson:
    """A teacher and its text. Raises T2RError if they do not belong together.

    Args:
        teacher: the teacher in float32, which is moved to the device.
        place: the device.
        block_size: tokens per block. None: the default.
        top_k: the number of tokens of each position.
        bf16: compute in bfloat16.
    """

    def __init__(
        self,
        teacher: PreTrainedModel,
        task: LanguageModeling,
        place: torch.device,
        *,
        block_size: int | None,
        top_k: int,
        temperature: float,
        bf16: bool,
    ) -> None:
        size = block_size or min(BLOCK_SIZE, max_positions(teacher) or BLOCK_SIZE)
        task.check(teacher, [size])
        task.read()
        weights, config = of_weights(teacher), of_config(teacher)
        if bf16:
            halve(teacher)
        model: Any = teacher
        self.teacher: PreTrainedModel = model.to(place)
        self.task, self.items = task, task.dataset(size)
        example = task.inputs(task.collate([self.items[0]]))
        self.readout = Readout(self.teacher, {name: x.to(place) for name, x in example.items()})
        if top_k > self.readout.out_features:
            raise T2RError(f"top_k is {top_k:,}, and the model has {self.readout.out_features:,} logits: give fewer")
        self.keys = block_keys(self.items)
        self.header = Header(
            model=str(teacher.config.name_or_path),
            weights=weights,
            tokenizer=of_tokenizer(task.tokenizer),
            vocabulary=self.readout.out_features,
            block_size=size,
            documents=task.documents,
            top_k=top_k,
            temperature=temperature,
            bf16=bf16,
            blocks=len(self.items),
            shard=max(1, SHARD // size),
            text=digest(self.keys.tolist()),
            config=config,
        )

    def write(self, path: Path, blocks: range, report: Callable[[int], None]) -> None:
        """Write a shard. `report` is called with the number of its blocks that are done."""
        place, header = self.teacher.device, self.header
        most = AT_ONCE_CPU if place.type == "cpu" else AT_ONCE
        parts, rest, scored = [], 0.0, 0
        step = max(1, most // header.block_size)
        for start in range(blocks.start, blocks.stop, step):
            batch = self.task.collate([self.items[i] for i in range(start, min(start + step, blocks.stop))])
            inputs = {name: x.to(place) for name, x in self.task.inputs(batch).items()}
            with torch.autocast(place.type, torch.bfloat16, enabled=header.bf16):
                known = self.top_k(self.readout.states(inputs).flatten(0, 1))
            counts = (self.task.labels(batch) >= 0).flatten()
            rest, scored = rest + float(known.rest[counts].sum()), scored + int(counts.sum())
            if not are_distributions(known, header.vocabulary):
                raise T2RError(self.broken(start))
            parts.append(known)
            report(start + len(batch["input_ids"]) - blocks.start)
        whole = (torch.cat(x).unflatten(0, (len(blocks), header.block_size)) for x in zip(*parts, strict=True))
        save_shard(path, header, blocks.start // header.shard, TopK(*whole), Written(rest, scored))

    def broken(self, block: int) -> str:
        """Return what is said if the model does not compute a distribution."""
        half = " in bfloat16 (--no-bf16 computes in float32)" if self.header.bf16 else ""
        return (
            f"the distributions of {self.header.model} from block {block:,} on are not numbers: its logits "
            f"overflow{half}, or --temperature {self.header.temperature:g} is too small"
        )

    def top_k(self, states: Tensor) -> TopK:
        """Return the distributions of positions, in slices of what fits into memory."""
        header, parts = self.header, []
        for piece in states.split(max(1, logits_at_once(states.device) // header.vocabulary)):
            known = top_k_of(widened(self.readout(piece)), header.top_k, header.temperature)
            parts.append([x.cpu() for x in known])
        return TopK(*(torch.cat(x) for x in zip(*parts, strict=True)))


# --- The folder ---------------------------------------------------------------------------------------------


def check_folder(folder: Path) -> None:
    """Raise T2RError unless the path is free, an empty folder, or one of this command."""
    kind = kind_of(folder)
    if kind not in (None, "folder"):
        raise T2RError(f"{folder} is not a folder: give the path of a folder to create")
    if kind is None or (folder / HEADER).exists():
        return
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        raise T2RError(f"{folder} cannot be read: {error.strerror}") from error
    ours = (BLOCKS, f"{HEADER}.lock")  # of a process that was killed, or is beginning
    if others := [name for name in names if name not in ours and not name.endswith(".tmp")]:
        raise T2RError(f"{folder} has other files ({others[0]}): give another folder")


def begin(folder: Path, header: Header, keys: NDArray[Any]) -> Header:
    """Write the header of a new folder, or compare it with the one that is there, and return it. Raises T2RError if
    they differ, or if the disk has too little space."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = take_lock(folder / f"{HEADER}.lock", wait=True)
    assert lock is not None
    with lock:
        if (folder / HEADER).exists():
            known = Header.load(folder)
            check_same(folder, known, header)
            header = known
            try:
                read_keys(folder, header)
            except T2RError:
                logger.warning("%s is damaged, and is written again", folder / BLOCKS)
                save_keys(folder, keys)
        else:
            needed, free = header.bytes, shutil.disk_usage(folder).free
            if needed > free:
                raise T2RError(
                    f"{folder} needs {needed / 1e9:,.1f} GB, and its disk has {free / 1e9:,.1f}: give less text, a "
                    "smaller top_k, or another disk"
                )
            save_keys(folder, keys)
            header.save(folder)
        (folder / f"{HEADER}.lock").unlink(missing_ok=True)
    return header


def check_same(folder: Path, known: Header, header: Header) -> None:
    """Raise T2RError if a folder was begun with something else."""
    if known.weights != header.weights or known.config not in ("", header.config):
        raise T2RError(f"{folder} was begun with another model, {known.model}: give another folder")
    for name in ("block_size", "documents", "top_k", "temperature", "bf16"):
        if (one := getattr(known, name)) != (other := getattr(header, name)):
            raise T2RError(
                f"{folder} was begun with {name} {one}, not {other}: give another folder, or the same option"
            )
    if known.text != header.text:
        what = "text" if known.tokenizer == header.tokenizer else "text or another tokenizer"
        raise T2RError(f"{folder} was begun with another {what}: give another folder")
    if (known.blocks, known.vocabulary) != (header.blocks, header.vocabulary):
        raise T2RError(f"{folder / HEADER} is damaged: make the folder again by t2r teach")


def there(folder: Path, header: Header) -> list[int]:
    """Return the shards that are finished."""
    names = {path.name for path in folder.iterdir()}
    return [number for number in range(header.shards) if shard_path(folder, number).name in names]


def result(folder: Path, header: Header, seconds: float, *, resumed: int) -> dict[str, Any]:
    """Return what a complete folder has, for JSON."""
    made = TeacherLogits(folder)
    bytes_ = sum(path.stat().st_size for path in folder.iterdir() if path.suffix == ".safetensors")
    tokens = header.blocks * header.block_size
    return {
        "out": str(folder),
        "blocks": header.blocks,
        "block_size": header.block_size,
        "tokens": tokens,
        "bytes": bytes_,
        "bytes_per_token": bytes_ / tokens,
        "shards": header.shards,
        "resumed": resumed,
        "seconds": round(seconds, 1),
    } | made.to_dict()


def summary(results: dict[str, Any]) -> list[str]:
    """Return lines that say what was written."""
    return [
        f"{results['blocks']:,} blocks of {results['block_size']:,} tokens in {results['out']}: "
        f"{results['bytes'] / 1e9:,.2f} GB, {results['bytes_per_token']:,.0f} bytes per token",
        f"on average, {100 * results['rest']:.2g} % of the teacher's probability are outside of its top "
        f"{results['top_k']:,} tokens, which a conversion takes for one outcome",
    ]


# --- Shards -------------------------------------------------------------------------------------------------


class Writer:
    """Writes shards until all are there, here or by other processes."""

    def __init__(self, folder: Path, lesson: Lesson, *, progress: bool) -> None:
        self.folder, self.lesson, self.header, self.progress = folder, lesson, lesson.header, progress

    def run(self) -> None:
        header, done = self.header, there(self.folder, self.header)
        logger.info(
            "plan: %s of %s tokens, %d bytes per token: %.2f GB in %s%s",
            counted(header.blocks, "block"),
            f"{header.block_size:,}",
            header.bytes_per_token,
            header.bytes / 1e9,
            counted(header.shards, "shard"),
            f", of which {len(done):,} are there" if done else "",
        )
        before = self.blocks_of(done)
        with (
            progress_bar("teaching", header.blocks, "blocks", done=before, shown=self.progress) as bar,
            evaluating(self.lesson.teacher),
            fast_sums(self.lesson.teacher.device),
        ):
            report = Told(bar, header.blocks, before, silent=self.progress)
            while len(done := there(self.folder, header)) < header.shards:
                report.others(self.blocks_of(done))
                if not self.write_next(done, report):
                    time.sleep(POLL)

    def blocks_of(self, shards: list[int]) -> int:
        return sum(len(self.header.range(number)) for number in shards)

    def write_next(self, done: list[int], report: Callable[[int], None]) -> bool:
        """Write the next shard that no process has written or is writing. Returns whether there is one."""
        for number in sorted(set(range(self.header.shards)) - set(done)):
            path = shard_path(self.folder, number)
            with writing(self.folder):
                lock = take_lock(path.with_suffix(".lock"))
            if lock is None:
                continue
            with lock:
                if not path.exists():  # another process may have written it meanwhile
                    with writing(path):
                        for left in self.folder.glob(f".{path.name}.*.tmp"):  # of a process that was killed
                            left.unlink(missing_ok=True)
                    self.lesson.write(path, self.header.range(number), report)
                path.with_suffix(".lock").unlink(missing_ok=True)
            return True
        return False


class Told:
    """Reports blocks to a progress bar, or without one to the log, once a minute.

    Called with the blocks of the current shard; `others` are those of all shards that are finished."""

    def __init__(self, bar: Report, total: int, before: int, *, silent: bool) -> None:
        self.bar, self.total, self.before, self.silent = bar, total, before, silent
        self.finished = before
        self.began = self.told = time.monotonic()

    def others(self, finished: int) -> None:
        self.finished = finished
        self(0)

    def __call__(self, blocks: int) -> None:
        done, now = self.finished + blocks, time.monotonic()
        self.bar(done)
        if not self.silent and now - self.told >= TELL and done > self.before:
            left = (now - self.began) / (done - self.before) * (self.total - done)
            logger.info("%s of %s blocks, about %s left", f"{done:,}", f"{self.total:,}", duration(left))
            self.told = now
