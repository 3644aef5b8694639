"""Evaluation of several models on the same texts, with the first model as the reference."""

import gc
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from t2r.config import T2RConfig
from t2r.errors import T2RError
from t2r.evaluation.generation import DISTANCES, fitting_distances
from t2r.evaluation.harness import find_tasks
from t2r.evaluation.inputs import Text, encode, has_position_table, positions_of, read_text, refuse_seq2seq
from t2r.evaluation.measurement import Asked, Measurement
from t2r.evaluation.perplexity import WINDOW
from t2r.evaluation.translation import evaluate_translation
from t2r.evaluation.variants import Variant, swap_of
from t2r.hub import auto_class, load_config, load_model, load_tokenizer
from t2r.options import RunOptions, check
from t2r.options.entrance import entrance
from t2r.surgery.adapters import repaired

logger = logging.getLogger(__name__)

Model = str | Path | PreTrainedModel

LONG_DISTANCES = (*DISTANCES, 1024, 4096, 16384)


@entrance(RunOptions)
def evaluate(
    models: Model | Sequence[Model],
    text: str | Path | Sequence[str | Path] | None = None,
    *,
    source: str | Path | None = None,
    reference: str | Path | None = None,
    beams: int = RunOptions.beams,
    length_penalty: float = RunOptions.length_penalty,
    bleu_tokenize: str = RunOptions.bleu_tokenize,
    source_language: str | None = None,
    target_language: str | None = None,
    outputs: str | Path | None = None,
    variants: Sequence[str] = (),
    tasks: Sequence[str] = (),
    task_folder: str | Path | None = None,
    tokenizer: Tokenizer | None = None,
    teacher: Model | None = None,
    window: int | Sequence[int] | None = None,
    stride: int | None = None,
    limit: int | None = None,
    tail: bool = False,
    batch_size: int | None = None,
    dtype: str = "float32",
    device: str = RunOptions.device,
    generation: bool = True,
    distances: Sequence[int] | None = None,
    trials: int = RunOptions.trials,
    seed: int = 0,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Evaluate models on texts, on lm-eval tasks, or on both.

    Returns a dictionary for each model and variant, for JSON or for `tables`. KL and agreement are relative to the
    `teacher`, or to the first model if there is no teacher. Ratios of perplexity are relative to the first model.
    Models given by name are loaded once, one at a time, so that only the reference and one other model are in memory.

    With several texts or windows, `measured` is a list of the results for each text and window. The first of them is
    also stored at the top level, as for a single text and window.

    Args:
        models: folders, names on the Hub, or model objects.
        text: a file or a glob, or several.
        source: file of source sentences for translation models, instead of `text`. Measures BLEU, chrF and more (see
            `evaluate_translation`); of the other arguments only `limit` (lines), `dtype`, `device`, `tokenizer` and
            `progress` apply.
        reference: file of references of `source`.
        beams: beams of the search that translates `source`.
        length_penalty: length penalty of the beam search.
        bleu_tokenize: sacrebleu's tokenizer for BLEU, for example `zh` for Chinese references.
        source_language, target_language: for multilingual translation models, codes of their tokenizers.
        outputs: folder to save the translations in, one file per model.
        variants: variants to evaluate, `MODEL:window=TOKENS,sinks=TOKENS` or `MODEL:state=DTYPE,every=TOKENS` (see
            `Variant`). MODEL is one of `models`, or the last part of its path.
        tasks: tasks of lm-eval, or custom tasks with YAML files in `task_folder`.
        task_folder: folder of custom tasks.
        tokenizer: the tokenizer. Required if the first model is a model object.
        teacher: the model for KL and agreement.
        window: tokens per window, or several values. None: 512, or fewer if a model has fewer positions.
        stride: tokens by which the window advances, and that are scored in each window. None: half the window.
        limit: maximum number of windows of each text, or of examples of a task.
        tail: whether to score the tokens at the end that do not fill a window.
        batch_size: windows per batch. None: chosen by device.
        dtype: `auto` (as saved), `float32`, `bfloat16` or `float16`.
        device: `auto` (a GPU if available), `cpu`, `cuda`, ...
        generation: whether to measure repetition (of models, not of variants) and recall, on the first text.
        distances: distances of recall. None: those up to half a window.
        trials: trials of recall at each distance.
        seed: random seed for sampling and recall.
        progress: whether to show progress bars.

    Raises T2RError if the models cannot be compared, for example because their tokenizers differ.
    """
    models = [models] if isinstance(models, str | Path | PreTrainedModel) else list(models)
    if not models:
        raise T2RError("give at least one model")
    texts = [] if text is None else [text] if isinstance(text, str | Path) else list(text)
    if source is not None or reference is not None:
        if source is None or reference is None:
            raise T2RError("to measure translations, give both sources and references: --src and --ref")
        if texts or tasks or variants or teacher is not None:
            raise T2RError("translations are measured alone: give no text, task, variant or teacher beside --src")
        searched = {"beams": beams, "length_penalty": length_penalty}
        check(RunOptions, {"limit": limit, "dtype": dtype, "device": device, **searched})
        return evaluate_translation(
            models,
            source,
            reference,
            tokenizer=tokenizer,
            beams=beams,
            length_penalty=length_penalty,
            tokenize=bleu_tokenize,
            source_language=source_language,
            target_language=target_language,
            limit=limit,
            dtype=dtype,
            device=device,
            outputs=outputs,
            progress=progress,
        )
    if source_language or target_language:
        raise T2RError("languages are for translation: give --src and --ref")
    if not texts and not tasks:
        raise T2RError("nothing to measure: give --text FILE, --task NAME, or both; or --src and --ref")
    wanted: list[int | None] = [window] if window is None or isinstance(window, int) else [*window] or [None]
    for size in wanted:
        given = {"window": size, "stride": stride, "limit": limit, "dtype": dtype, "device": device, "seed": seed}
        check(RunOptions, given if batch_size is None else given | {"batch_size": batch_size})
    of_model = _variants(variants, models)
    if variants and not texts:
        raise T2RError("variants require a text: give --text FILE")
    if tasks:
        find_tasks(tasks, task_folder)  # raises before the models are measured
    if tokenizer is None:
        tokenizer = _tokenizer_of(models[0])
    everyone = [*models, *([] if teacher is None else [teacher])]
    read = {str(name): encode(tokenizer, read_text(name, tokenizer)) for name in texts}
    _check(everyone, list(read.values()))
    windows = [_windows(everyone, size, stride) for size in wanted]
    asked = Asked(
        tokenizer=tokenizer,
        texts=read,
        windows=windows,
        limit=limit,
        tail=tail,
        batch_size=batch_size,
        generation=generation,
        distances=_distances(everyone, tokenizer, windows) if distances is None and generation else distances or (),
        recall_required=distances is not None,
        trials=trials,
        seed=seed,
        tasks=tasks,
        task_folder=task_folder,
        progress=progress,
    )
    return _measured(models, of_model, teacher, asked, dtype, device)


def _measured(
    models: Sequence[Model],
    variants: Sequence[Sequence[Variant]],
    teacher: Model | None,
    asked: Asked,
    dtype: str,
    device: str,
) -> list[dict[str, Any]]:
    """Measure each model and its variants. Only the reference and one other model are in memory."""
    against = None if teacher is None or not asked.texts else _loaded(teacher, dtype, device)
    measurement, results = Measurement(asked, against), []
    for entry, own_variants in zip(models, variants, strict=True):
        again = against is not None and teacher is not None and _title(entry) == _title(teacher)
        model = against if again and isinstance(entry, str | Path) else _loaded(entry, dtype, device)
        assert model is not None
        for variant in (None, *own_variants):
            result = measurement.of(model, _title(entry), variant)
            if asked.tasks and variant is None:
                saved = None if isinstance(entry, PreTrainedModel) else load_tokenizer(str(entry))
                result["tasks"] = measurement.tasks(model, saved or asked.tokenizer)
            results.append(result)
        del model
        gc.collect()  # models contain reference cycles, and the next model needs the memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return results


def _variants(given: Sequence[str], models: Sequence[Model]) -> list[list[Variant]]:
    """Return the variants of each model. Raises T2RError if a variant does not apply to its model."""
    found: list[list[Variant]] = [[] for _ in models]
    titles = [_title(source) for source in models]
    for text in given:
        name, _, options = text.rpartition(":")
        named = [i for i, title in enumerate(titles) if name in (title, Path(title).name)]
        if len(named) != 1:
            raise T2RError(
                f"variant {text!r}: write MODEL:window=TOKENS or MODEL:state=DTYPE, where MODEL is one of "
                f"{', '.join(titles)}"
            )
        variant, source = Variant.parse(options), models[named[0]]
        _check_variant(variant, source)
        found[named[0]].append(variant)
    return found


def _check_variant(variant: Variant, source: Model) -> None:
    """Raise T2RError if a variant does not apply to a model, which is not loaded for this."""
    config = _config(source)
    refuse_seq2seq(config, _title(source))
    if isinstance(source, PreTrainedModel):
        variant.check(config, swap_of(source))
    else:
        variant.check(config, config if isinstance(config, T2RConfig) else None)


def _windows(models: Sequence[Model], window: int | None, stride: int | None) -> tuple[int, int]:
    """Return window and stride. The default window fits every model. A larger window is allowed with a warning, except
    for models with a table of positions, which cannot read it."""
    configs = [(_title(source), _config(source)) for source in models]  # models given as objects may share a title
    limits = [(name, positions_of(config), config) for name, config in configs]
    fewest = min((limit for _, limit, _ in limits if limit is not None), default=WINDOW)
    if window is None:
        window = min(WINDOW, fewest)
        if stride is not None and stride >= window:
            raise T2RError(f"stride {stride} must be less than the window {window}: set window too")
        if window < WINDOW:
            logger.warning("windows of %d tokens instead of %d: a model has only %d positions", window, WINDOW, fewest)
    beyond = [found for found in limits if found[1] is not None and window > found[1]]
    for name, limit, config in beyond:
        if has_position_table(config):
            raise T2RError(f"{name} has {limit} positions, less than a window of {window} tokens: give a smaller one")
    for name, limit, _ in beyond:
        logger.warning(
            "a window of %d tokens is longer than the %d positions of %s: results beyond them are not meaningful",
            window,
            limit,
            name,
        )
    return window, max(1, window // 2) if stride is None else stride


def _distances(models: Sequence[Model], tokenizer: Tokenizer, windows: Sequence[tuple[int, int]]) -> list[int]:
    """Return the distances of recall that fit into the windows and every model."""
    positions = map(positions_of, map(_config, models))
    fewest = min((n for n in positions if n is not None), default=None)
    return fitting_distances(tokenizer, max(size for size, _ in windows), fewest, LONG_DISTANCES)


def _tokenizer_of(source: Model) -> Tokenizer:
    if isinstance(source, PreTrainedModel):
        raise T2RError("a model given as an object requires the tokenizer argument")
    if (tokenizer := load_tokenizer(str(source))) is None:
        load_config(str(source))  # raises if there is no model
        raise T2RError(f"{source} has no tokenizer: save the tokenizer it was trained with to that folder")
    return tokenizer


def _check(models: Sequence[Model], texts: Sequence[Text]) -> None:
    """Raise T2RError if the models cannot be compared, before the first one is measured.

    Perplexities are comparable only over the same tokens, and distributions only over the same vocabulary. A folder
    without a tokenizer is assumed to use that of the first model.
    """
    sizes = []
    for source in models:
        config = _config(source)
        refuse_seq2seq(config, _title(source))
        auto_class(config)
        sizes.append((_title(source), getattr(config.get_text_config(), "vocab_size", None)))
        if isinstance(source, PreTrainedModel) or not texts:
            continue
        tokenizer = load_tokenizer(str(source))
        if tokenizer is not None and not all(
            torch.equal(encode(tokenizer, text.string).token_ids, text.token_ids) for text in texts
        ):
            raise T2RError(
                f"the tokenizer of {source} tokenizes this text differently, so perplexities per token are not "
                "comparable: evaluate the models one at a time, and compare their bits per byte"
            )

    if texts and len({size for _, size in sizes if size is not None}) > 1:
        found = ", ".join(f"{name} has {size}" for name, size in sizes)
        raise T2RError(f"the models must have the same vocabulary size: {found}")


def _config(source: Model) -> Any:
    return source.config if isinstance(source, PreTrainedModel) else load_config(str(source))


def _loaded(source: Model, dtype: str, device: str) -> PreTrainedModel:
    if isinstance(source, PreTrainedModel):
        return repaired(source)
    return load_model(str(source), dtype=dtype, device=device)


def _title(source: Model) -> str:
    return type(source).__name__ if isinstance(source, PreTrainedModel) else str(source)
