"""Converts a pretrained language or translation model into an RNN: swap, train, evaluate, save.

A finished conversion is continued in the same way: its own weights are trained further."""

from __future__ import annotations

import copy
import logging
import time
from contextlib import nullcontext
from typing import Any

from rich.table import Table
from transformers import PreTrainedModel

from t2r.attention.recurrence import exact_attention
from t2r.config import OPTIONS, T2RConfig
from t2r.model.merge import merge, mergeable_sites
from t2r.model.swap import swap
from t2r.options import Conversion
from t2r.options.calls import flat
from t2r.pipelines import beside
from t2r.pipelines.common import advice, complete
from t2r.pipelines.continuation import remember_origin
from t2r.pipelines.preparation import Start, prepare
from t2r.pipelines.sharded import Shards
from t2r.reporting.inspection_tables import state_lines
from t2r.surgery.frozen import unfreeze
from t2r.surgery.undo import undoing
from t2r.training.planning.plan import trainable
from t2r.training.sessions.card import recall_lines
from t2r.training.sessions.session import Session, as_table, table_of
from t2r.training.steps.arithmetic import without_denormals

logger = logging.getLogger(__name__)

WRONG = "is this the right text, language and tokenizer?"


@flat(Conversion)
@without_denormals()
def convert(given: Conversion) -> dict[str, Any]:
    """Convert a language model: swap, train, evaluate, save. Returns the results, which are also saved.

    A finished conversion is continued by giving its folder as the `model`, and another one as `out`: its weights are
    trained further, in the stages of the recipe except transfers. An interrupted conversion is resumed by the same
    call.

    Args:
        model: a folder, a hub name, or a model, which is modified; a model requires `tokenizer`. A t2r model (not a
            merged one) is trained further, with its own swap.
        out: the output folder. The unfinished run is kept in `out.run`.

    Options of the swap override the recipe's. A `feature_map` uses its own defaults of `feature_size`, `init`,
    `activation`, `key_weights` and `shared`. `softmax_layers="auto:N"` keeps the N most sensitive layers, measured
    after the first stage.
    """
    began = time.monotonic()
    start = prepare(given)
    how: dict[str, Any] = {"minutes": given.minutes, "began": began, "restart": given.restart, "logits": start.logits}
    facts, settings = start.facts, start.settings
    with (
        undoing(start.base) as swapped,
        Session(given.out, start.plan, start.task, settings, start.place, facts, **how) as session,
    ):
        shards = Shards.of(given, session, start.base if start.teacher is None else start.teacher)
        if shards is not None:
            student, frozen, reference = shards.models(start.base, start.config, continued=start.teacher is not None)
            swapped.keep()
            start.base, start.teacher = student, reference  # frees the memory of the main process
        else:
            student, frozen = start.models()
        session.plan = trainable(session.plan, student)
        if given.merged and shards is None:
            mergeable_sites(student)  # raises before training if merging is not possible
        session.prepare(student, frozen, scans=start.auto is not None)
        swapped.keep()

        results = measure_before(session, start, student, frozen)
        student, trained = train_stages(session, student, frozen, start.config, start.auto, shards)
        results |= trained
        results = complete(results | {"recall": session.recall(student), "merged": bool(given.merged)}, session)
        if (far := advice(start.task, results, limited=given.minutes is not None)) is not None:
            results["advice"] = far
        student = student.eval() if shards is None else shards.whole(student)
        if given.merged and student.device.type != "meta":
            merge(student, force=True)
        remember_origin(student.t2r_config, start.origin)  # type: ignore[arg-type]
        results |= beside.compare(session, student, frozen, start.tokenizer)
        state = [*state_lines(student), *recall_lines(results["recall"], results.get("teacher_recall", ()))]
        session.save(student, start.tokenizer, results, compared=True, overwrite=given.overwrite, state=state)
        if far is not None:
            logger.warning("%s", far)
    return results


def measure_before(session: Session, start: Start, student: PreTrainedModel, frozen: PreTrainedModel) -> dict[str, Any]:
    """Measure the teacher, and the student before it is trained. Both are evaluated in float32."""
    swaps, teacher = start.teacher is None, start.teacher or student
    with exact_attention(student) if swaps else nullcontext():
        measured = session.measure("teacher", teacher)
        beside.measure_teacher(session, teacher, frozen, start.tokenizer)
    start.teacher = None  # frees its memory
    del teacher
    if measured is not None and (doubt := start.task.doubt(measured)) is not None:
        logger.warning("the teacher does not know the text that is measured: %s; %s", doubt, WRONG)
    results: dict[str, Any] = {"task": start.task.name, "teacher": measured}
    if start.planned is not None:
        results["planned"] = start.planned.to_dict()
    if start.logits is not None:
        results["teacher_logits"] = start.logits.to_dict()
    before = "swapped" if swaps else "before"
    results[before] = session.measure(before, student, frozen)
    return results


def train_stages(
    session: Session,
    student: PreTrainedModel,
    teacher: PreTrainedModel,
    config: T2RConfig,
    auto: int | None,
    shards: Shards | None = None,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Train all stages and measure the model after each. With `auto`, softmax is restored in this many layers after the
    first stage. Returns the trained model and the results."""
    results: dict[str, Any] = {"stages": {}}
    for index, stage in enumerate(session.plan.stages):
        student = session.train(student, stage)
        results["stages"][stage.name] = session.measure(stage, student, teacher)
        if auto is not None and index == 0:
            results["sensitivity"] = scan = session.most_sensitive(student, stage.block_size)
            kept = sorted(int(layer) for layer, _ in scan[:auto])
            logger.info("most sensitive layers, which keep softmax attention: %s", kept)
            if shards is not None:
                student = shards.swap_again(student, config, kept)
            else:
                student = with_softmax(student, teacher, config, kept)
    return student, results


def summary(results: dict[str, Any]) -> Table:
    """Return the table of the results, in the order in which they were measured."""
    return as_table(*table_of(results, compared=True))


def with_softmax(
    student: PreTrainedModel, teacher: PreTrainedModel, config: T2RConfig, kept: list[int]
) -> PreTrainedModel:
    """Return the student after a transfer, with softmax restored in the `kept` layers."""
    weights = student.state_dict()
    # A transfer trains only the maps, so the student is swapped again from the teacher, with the trained maps.
    base = copy.deepcopy(teacher).float()
    chosen = T2RConfig(**{name: getattr(config, name) for name in OPTIONS})
    chosen.softmax_layers = kept
    again = swap(base, chosen)
    again.load_state_dict({name: weights[name] for name in again.state_dict()})
    again.config.use_cache = student.config.use_cache
    unfreeze(again)
    return again
