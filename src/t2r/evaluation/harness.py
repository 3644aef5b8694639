"""Evaluation on tasks of lm-eval, for swapped and other models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from t2r.errors import T2RError
from t2r.evaluation.inputs import refuse_seq2seq
from t2r.hub import load_config, load_model, load_tokenizer
from t2r.surgery.adapters import repaired
from t2r.words import extra


def harness(
    model: str | Path | PreTrainedModel,
    tasks: Sequence[str],
    *,
    tokenizer: Tokenizer | None = None,
    task_folder: str | Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    batch_size: int = 8,
    dtype: str = "float32",
    device: str = "auto",
) -> dict[str, dict[str, Any]]:
    """Run tasks of lm-eval, or custom tasks with YAML files in `task_folder`, and return the metrics of each task."""
    manager = find_tasks(tasks, task_folder)
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    if not isinstance(model, PreTrainedModel):
        source = str(model)
        refuse_seq2seq(load_config(source), source)
        tokenizer = load_tokenizer(source) if tokenizer is None else tokenizer
        model = load_model(source, dtype=dtype, device=device)
    model = repaired(model)
    if tokenizer is None:
        raise T2RError("a model given as an object, or saved without a tokenizer, requires the tokenizer argument")
    if tokenizer.eos_token_id is None and tokenizer.bos_token_id is None:
        raise T2RError("tasks require a tokenizer with a BOS or EOS token, which begins texts without context")
    report = simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        num_fewshot=num_fewshot,
    )
    results: dict[str, dict[str, Any]] = report["results"]
    return results


def find_tasks(tasks: Sequence[str], task_folder: str | Path | None = None) -> Any:
    """Return lm-eval's task manager for these tasks. Raises T2RError if a task is unknown or its data is missing."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise T2RError(f"lm-eval is not installed: {extra('lm-eval')}") from error
    if task_folder is not None and not Path(task_folder).is_dir():
        raise T2RError(f"there is no folder {task_folder}")
    path = None if task_folder is None else str(task_folder)
    # lm-eval reads thousands of files to find its own tasks, so they are included only if needed.
    for its_own in (False, True):
        manager = TaskManager(include_path=path, include_defaults=its_own)
        unknown = sorted(set(tasks) - set(manager.all_tasks))
        if not unknown:
            break
    else:
        raise T2RError(f"lm-eval has no task {', '.join(unknown)}")
    try:
        manager.load(list(tasks))
    except Exception as error:  # a missing file, the Hub is not reachable, wrong fields in a task's file or its data
        told = " ".join(str(error).split()) or type(error).__name__
        raise T2RError(f"the data of {', '.join(tasks)} cannot be read: {told}") from error
    return manager
