"""What a conversion measures of its result beside the teacher, for the page of its results: recall, samples, decoding
speed and memory.

The teacher is measured before training, so that a time budget knows how long the same will take at the end.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from t2r.bench import decoding, translating
from t2r.errors import T2RError
from t2r.evaluation.logits import evaluating
from t2r.generation.text import complete
from t2r.reporting.inspection import lengths_within, memory_by_length
from t2r.sharding import is_sharded
from t2r.storage import finite
from t2r.tasks.base import max_positions
from t2r.training.loop import processes
from t2r.training.sessions.session import Session
from t2r.training.steps.arithmetic import halve

logger = logging.getLogger(__name__)

T = TypeVar("T")

NEW_TOKENS = 48
"""Tokens of a sample."""
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0, "num_beams": 1}
TRANSLATED: dict[str, Any] = {"do_sample": False, "num_beams": 1}
ROUNDS, STEPS, BATCH = 3, 8, 8
"""Rounds of the measurement of speed, steps of a round, and lines of a batch of translations."""
SHARE = 0.01
"""The share of a time budget after which a sample ends. Speed is not measured if it takes more than four times that."""
LENGTHS, LINES = (512, 4096), (16, 64)
"""Tokens of context after which decoding is timed, and tokens of the lines that are translated."""


def measure_teacher(
    session: Session, precise: PreTrainedModel, teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Measure the recall and the samples of the teacher, before the first stage. Reserves the time for `compare`.
    `precise` is the teacher in the precision in which students are evaluated.

    Runs that are too short to be timed have no samples and no speed, which would take longer than their training.
    Models that are divided among processes have none either."""

    def measured() -> dict[str, Any]:
        recall, of_recall = timed(lambda: session.task.recall(precise))
        if session.timetable is None or is_sharded(teacher):  # processes that generate must end at the same token
            return {"recall": recall, "samples": [], "seconds": of_recall, "speed": None}
        samples, of_samples = timed(lambda: sample(session, teacher, tokenizer))
        # At the end: recall and samples of the student, and the speed of both.
        lengths = timed_lengths(teacher)
        steps = sum(lengths) if teacher.config.is_encoder_decoder else len(lengths) * (1 + STEPS)
        speed = 2 * (1 + ROUNDS) * steps * of_samples / NEW_TOKENS
        fits = session.minutes is None or speed <= 4 * SHARE * 60 * session.minutes
        return {
            "recall": recall,
            "samples": samples,
            "seconds": of_recall + of_samples,
            "speed": speed if fits else None,
        }

    known = session.run.remember("beside.teacher", measured)
    session.aside = known["seconds"] + (known["speed"] or 0.0)


def compare(
    session: Session, student: PreTrainedModel, teacher: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return what is measured of the trained student, beside the teacher: `teacher_recall`, `samples`, `speed` and
    `memory`, for results.json. What cannot be measured is left out, with a log message."""
    known = session.run.facts["beside.teacher"]

    def measured() -> dict[str, Any]:
        model = attempt("samples", lambda: in_dtype(student, teacher.dtype)) if known["samples"] else None
        if model is None:
            return {}
        own = sample(session, model, tokenizer)
        texts = [before | after for before, after in zip(known["samples"], own, strict=False)]
        speed = None if known["speed"] is None else attempt("speed", lambda: speeds(model, teacher))
        return {"samples": texts, "speed": speed}

    made = session.run.remember("beside.student", measured)
    memory = attempt("memory", lambda: memory_by_length(student, lengths_within(max_positions(teacher))))
    found = {"teacher_recall": known["recall"], **made, "memory": memory}
    return finite({name: value for name, value in found.items() if value})


def in_dtype(student: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return the student, or a copy in bfloat16 if that is the dtype of the teacher: they are compared in one dtype."""
    if student.dtype == dtype:
        return student
    copied = copy.deepcopy(student)
    halve(copied)
    return copied


def sample(session: Session, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[dict[str, str]]:
    """Let the model complete or translate the prompts of the task. The texts are under `teacher` or `model`."""
    prompts = session.task.prompts()
    who = "teacher" if model is session.job.teacher else "model"
    how = TRANSLATED if model.config.is_encoder_decoder else SAMPLED
    limit = max_positions(model)
    how = how | {"max_new_tokens": NEW_TOKENS if limit is None else min(NEW_TOKENS, limit // 2)}
    if session.minutes is not None:
        how["max_time"] = SHARE * 60 * session.minutes

    def texts() -> list[str]:
        with evaluating(model), torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
            return [x.text for x in complete(model, tokenizer, prompts, seed=0, **how)]

    written = attempt("samples", texts) or []
    return [{"prompt": prompt, who: text} for prompt, text in zip(prompts, written, strict=False)]


def speeds(student: PreTrainedModel, teacher: PreTrainedModel) -> dict[str, Any] | None:
    """Measure the tokens per second of both models in the engine, in turn."""
    lengths = timed_lengths(teacher)
    if not lengths or processes.count() > 1:
        return None
    models = {"teacher": teacher, "model": student}
    report: Any
    if teacher.config.is_encoder_decoder:
        report = translating.run(models, lengths, batch=BATCH, repeats=ROUNDS)
    else:
        report = decoding.run(models, lengths, engine=True, own=False, steps=STEPS, repeats=ROUNDS)
    points: dict[int, dict[str, Any]] = {}
    for point in report.points:
        name = point.model.partition(",")[0]
        points.setdefault(point.length, {"tokens": point.length})[name] = point.tokens_per_second
    settings = {name: getattr(report.settings, name) for name in ("batch", "dtype", "device", "threads")}
    return settings | {"points": [point for point in points.values() if len(point) == 3]}


def timed_lengths(teacher: PreTrainedModel) -> list[int]:
    """Return the lengths at which speed is measured."""
    limit = max_positions(teacher)
    if teacher.config.is_encoder_decoder:
        return [length for length in LINES if limit is None or length < limit]
    return lengths_within(limit, LENGTHS)


def attempt(what: str, measure: Callable[[], T]) -> T | None:
    """Return a measurement, or None if it fails, with a log message: a trained model is not lost for it."""
    try:
        return measure()
    except (T2RError, RuntimeError) as error:  # torch raises RuntimeError if memory is short
        logger.warning("%s cannot be measured: %s", what, " ".join(str(error).split()))
        return None


def timed(measure: Callable[[], T]) -> tuple[T, float]:
    began = time.monotonic()
    return measure(), time.monotonic() - began
