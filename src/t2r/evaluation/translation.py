"""Evaluation of translation models: scores of their translations, and cross entropy and KL divergence per token."""

from __future__ import annotations

import gc
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from t2r.data.languages import set_languages
from t2r.data.parallel.corpus import encode_sources
from t2r.data.parallel.lines import find_file, read_pairs
from t2r.data.progress import progress_bar
from t2r.errors import T2RError
from t2r.evaluation.bleu import (
    BLEU_TOKENIZE,
    bleu_by_length,
    copy_accuracy,
    language_of,
    metrics,
    paired_bootstrap,
    score,
    tokenized_bleu,
)
from t2r.evaluation.sizes import translation_memory
from t2r.generation.translation import translate
from t2r.hub import load_config, load_model, need_tokenizer
from t2r.model.logits import Readout, evaluating, logits_at_once, widened
from t2r.options import RunOptions
from t2r.storage import Output, kind_of, writing
from t2r.surgery.adapters import repaired

logger = logging.getLogger(__name__)

TRANSLATIONS_NAME = re.compile(r"\d+-.*\.txt")
"""The names of files of translations. They are plain text, which has no mark."""


def token_scores(
    model: PreTrainedModel,
    batches: Iterable[Mapping[str, Tensor]],
    teacher: PreTrainedModel | None = None,
) -> dict[str, float | int | None]:
    """Return the mean cross entropy per target token and, with a teacher, KL(teacher || model) and the share of tokens
    for which both have the same most likely token. Batches contain `labels` for each decoder position."""
    loss = kl = same = 0.0
    tokens = 0
    readouts: list[Readout] = []
    with evaluating(model, teacher):
        for batch in batches:
            labels = batch["labels"].to(model.device).flatten()
            inputs = {name: x.to(model.device) for name, x in batch.items() if name != "labels"}
            if not readouts:
                readouts = [Readout(part, inputs) for part in (model, teacher) if part is not None]
            scored = labels >= 0
            states = [readout.states(inputs).flatten(0, 1)[scored] for readout in readouts]
            labels = labels[scored]
            size = max(1, logits_at_once(model.device) // readouts[0].out_features)
            for start in range(0, len(labels), size):
                here = slice(start, start + size)
                logits = [widened(readout(x[here])) for readout, x in zip(readouts, states, strict=True)]
                loss += cross_entropy(logits[0], labels[here], reduction="sum").item()
                if teacher is not None:
                    log_q, log_p = (x.log_softmax(-1) for x in logits)
                    kl += (log_p.exp() * (log_p - log_q)).sum().item()
                    same += (logits[0].argmax(-1) == logits[1].argmax(-1)).sum().item()
            tokens += len(labels)
    if not tokens:
        raise T2RError("there are no target tokens to score")
    compared = {"kl": kl / tokens, "agreement": same / tokens} if teacher is not None else {"kl": None}
    return {"loss": loss / tokens, **compared, "tokens": tokens}


def evaluate_translation(
    models: Sequence[str | Path | PreTrainedModel],
    source: str | Path,
    reference: str | Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    beams: int = RunOptions.beams,
    length_penalty: float = RunOptions.length_penalty,
    tokenize: str = BLEU_TOKENIZE,
    source_language: str | None = None,
    target_language: str | None = None,
    limit: int | None = None,
    dtype: str = "float32",
    device: str = "auto",
    outputs: str | Path | None = None,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Return the scores of each model on a test set, and the differences from the first model.

    The arguments are those of `evaluate`; `tokenize` is its `bleu_tokenize`. Each result has BLEU and chrF with their
    signatures, the paper's tokenized BLEU, BLEU by source length, and the share of numbers and names that were copied.
    The memory of causal and of cross attention is that of a translation of the mean length of the sources.
    With several models, intervals and p-values of a paired bootstrap against the first are added."""
    metrics(tokenize)  # fails early
    if outputs is not None and kind_of(outputs) in ("file", "other"):
        raise T2RError(f"{outputs} is not a folder: give a folder to save the translations in")
    for model in models:
        config = model.config if isinstance(model, PreTrainedModel) else load_config(str(model))
        if not config.is_encoder_decoder:
            raise T2RError(f"{model_name(model)} is a language model: only encoder-decoders translate sources")
    pairs = list(read_pairs(find_file(str(source)), find_file(str(reference))))[:limit]
    if not pairs:
        raise T2RError(f"{source} has no lines")
    sources, references = (list(side) for side in zip(*pairs, strict=True))
    results: list[dict[str, Any]] = []
    systems: list[list[str]] = []
    lengths: list[int] = []
    language: str | None = language_of(reference, target_language)
    try:
        tokenized_bleu([""], [""], str(language))
    except T2RError as reason:  # it must not end the command after the translations, which take long
        logger.warning("tokenized BLEU is left out: %s", reason)
        language = None
    if outputs is not None:  # before the translations, which take long
        places = [translations_file(outputs, number, model) for number, model in enumerate(models)]
        for path in places:
            TRANSLATIONS.check(path, inputs=[source, reference])
        with writing(Path(outputs), then="repeat the command"):
            Path(outputs).mkdir(parents=True, exist_ok=True)
    for number, model in enumerate(models):
        own, words = opened(model, tokenizer, dtype, device)
        set_languages(own, words, source_language, target_language)
        if not lengths:
            lengths = [len(row) for row in encode_sources(words, sources)]
        name = model_name(model)
        with progress_bar(f"{Path(name).name} translates", len(sources), "lines", shown=progress) as report:
            texts = translate(
                own, words, sources, beams=beams, length_penalty=length_penalty, name=str(source), report=report
            )
        result: dict[str, Any] = {"model": name, "parameters": own.num_parameters()}
        result |= memory_at(own, round(mean(lengths)))
        result |= {"source": str(source), "reference": str(reference)}
        result |= {"lines": len(sources), "beams": beams, "length_penalty": length_penalty}
        result |= score(texts, references, tokenize=tokenize)
        result |= {} if language is None else tokenized_bleu(texts, references, language)
        result["by_length"] = bleu_by_length(texts, references, lengths, tokenize=tokenize)
        result["copied"] = copy_accuracy(sources, references, texts)
        systems.append(texts)
        if results:
            result |= {f"{metric}_difference": result[metric] - results[0][metric] for metric in ("bleu", "chrf")}
        if outputs is not None:
            path = translations_file(outputs, number, model)
            with writing(path, then="repeat the command"):
                TRANSLATIONS.write(path, "".join(f"{text}\n" for text in texts), inputs=[source, reference])
            result["output"] = str(path)
        results.append(result)
        del own
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if len(systems) > 1:
        for result, tested in zip(results, paired_bootstrap(systems, references, tokenize=tokenize), strict=True):
            result |= tested
    return results


def is_translations(path: Path) -> bool:
    return TRANSLATIONS_NAME.fullmatch(path.name) is not None


TRANSLATIONS = Output("a file of translations", is_translations)


def translations_file(folder: str | Path, number: int, model: str | Path | PreTrainedModel) -> Path:
    return Path(folder) / f"{number + 1}-{Path(model_name(model)).name}.txt"


def memory_at(model: PreTrainedModel, tokens: int) -> dict[str, Any]:
    """Return the bytes of causal and cross attention for a source and a translation of this length, one sequence.

    `kept_tokens` is the length if the memory depends on it, otherwise None."""
    memory = translation_memory(model)
    if memory is None:
        return {}
    causal, cross = memory
    kept = {"causal_bytes": causal.at(tokens), "cross_bytes": cross.at(tokens)}
    return kept | {"kept_tokens": tokens if causal.token or cross.token else None}


def opened(
    model: str | Path | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, dtype: str, device: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return the model and its tokenizer."""
    if isinstance(model, PreTrainedModel):
        if tokenizer is None:
            raise T2RError("a model that is given as an object needs its tokenizer beside it")
        return repaired(model), tokenizer
    return load_model(str(model), dtype=dtype, device=device), tokenizer or need_tokenizer(str(model))


def model_name(model: str | Path | PreTrainedModel) -> str:
    return type(model).__name__ if isinstance(model, PreTrainedModel) else str(model)
