"""The analysis of a model: where its attention differs from the teacher's, and what its state holds."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from t2r.analysis.measures import (
    ByDistance,
    FeatureMeasures,
    WeightMeasures,
    distance_buckets,
    half_life_summary,
    measured_positions,
)
from t2r.analysis.samples import of_pairs, of_text
from t2r.analysis.subject import Place, Subject
from t2r.attention.observation import LinearInputs
from t2r.data.languages import set_languages
from t2r.data.progress import progress_bar
from t2r.errors import T2RError
from t2r.evaluation import Perplexity, recall
from t2r.evaluation.generation import fitting_distances
from t2r.evaluation.inputs import positions_of
from t2r.hub import need_tokenizer
from t2r.options import AnalysisOptions, RunOptions, check
from t2r.options.entrance import entrance
from t2r.reporting import environment
from t2r.training.sessions.sensitivity import scan_layers

logger = logging.getLogger(__name__)

Model = str | Path | PreTrainedModel

POSITION_BUCKETS = 16
NAMED_HEADS = 4
"""Heads named in a note."""
FIELDS = ("euclidean", "jensen_shannon", "entropy", "teacher_entropy")


@entrance(RunOptions, AnalysisOptions)
def analyze(
    model: Model,
    text: str | Path | None = None,
    *,
    teacher: Model | None = None,
    source: str | Path | None = None,
    target: str | Path | None = None,
    source_language: str | None = None,
    target_language: str | None = None,
    tokenizer: Tokenizer | None = None,
    window: int | None = None,
    words: int | None = None,
    limit: int = AnalysisOptions.limit,
    trials: int = AnalysisOptions.trials,
    measure_recall: bool = True,
    sensitivity: bool = False,
    dtype: str = "float32",
    device: str = RunOptions.device,
    seed: int = 0,
    progress: bool = False,
) -> dict[str, Any]:
    """Compare the attention of a model with that of its teacher on a text, and measure features and states.

    Each sample is a window of the text. The attention of its last `words` tokens over the preceding ones is averaged
    over tokens and samples, for each layer and head. Without a teacher only the model's own measurements are made: for
    a model that was trained from random weights, heads do not correspond to those of another model.

    Args:
        model: a swapped model or a transformer: a folder, a name on the Hub, or an object (its weights stay the same).
        text: a file or a glob, for language models.
        teacher: the model that was converted.
        source, target: files of sources and targets, for encoder-decoders, instead of `text`. A sample is a pair.
        source_language, target_language: codes of languages, for multilingual models.
        tokenizer: the tokenizer. Required if the model is an object.
        window: tokens per sample. None: 512, or fewer if a model has fewer positions.
        words: tokens at the end of each window whose attention is measured. None: half the window.
        limit: maximum number of samples. They are spread evenly over the text.
        trials: trials of recall at each distance.
        measure_recall: whether to measure recall.
        sensitivity: whether to measure the loss with a single recurrent layer, for each layer. This is meaningful while
            all weights but the feature maps are the teacher's, as after the transfer stage.
        dtype: `auto` (as saved), `float32`, `bfloat16` or `float16`.
        device: `auto` (a GPU if available), `cpu`, `cuda`, ...
        seed: random seed of recall.
        progress: whether to show progress bars.

    Returns a dictionary for JSON: `mean` (over all layers and heads), `kinds` (over causal and over cross attention),
    `layers`, `by_distance`, `by_position`, `recall`, `features`, `state`, `sensitivity` and `notes`. Entropies and
    divergences are in nats. What is undefined is None, and a note says why.

    Raises T2RError if the models cannot be compared.
    """
    check(RunOptions, {"window": window, "limit": limit, "dtype": dtype, "device": device, "seed": seed})
    if (text is None) == (source is None) or (source is None) != (target is None):
        raise T2RError("give --text for a language model, or --src and --tgt for an encoder-decoder")
    if source is None and (source_language or target_language):
        raise T2RError("languages are for translation: give --src and --tgt")
    if source is not None and (window is not None or words is not None):
        raise T2RError("--window and --words are for --text: a pair of sentences is read as a whole")
    if trials < 1 or (words is not None and words < 1):
        raise T2RError("trials and words must be at least 1")
    if tokenizer is None and isinstance(model, PreTrainedModel):
        raise T2RError("a model given as an object requires the tokenizer argument")
    own = Subject(model, dtype, device)
    other = None if teacher is None else Subject(teacher, dtype, device)
    _check_pair(own, other, translates=source is not None)
    if tokenizer is None:  # after the model: with a wrong name, the Hub is asked for a single file
        tokenizer = need_tokenizer(str(model))
    if text is not None:
        samples = of_text(own, other, tokenizer, text, window, words, limit)
    else:
        assert source is not None and target is not None
        set_languages(own.model, tokenizer, source_language, target_language)
        samples = of_pairs(own, other, tokenizer, source, target, limit)
    facts: dict[str, Any] = {"model": own.name, "teacher": None if other is None else other.name, **samples.facts}
    facts["dtype"] = str(own.model.dtype).removeprefix("torch.")
    found, nll = _observed(own, other, samples.batches, samples.window, samples.words, progress)
    notes: list[str | None] = list(found.pop("notes"))
    facts |= found
    if samples.text is not None:
        facts["by_position"], facts["perplexity"] = _by_position(nll, samples.window)
        note: str | None = None
        facts["recall"] = []
        if measure_recall:
            facts["recall"], note = _recall(own, other, tokenizer, samples.text, samples.window, trials, seed)
        notes.append(note)
    else:
        notes.append(
            "perplexity by position and recall are of language models; t2r evaluate scores translations by length"
        )
    facts["sensitivity"], note = _sensitivity(own, other, samples.batches, progress) if sensitivity else (None, None)
    facts["notes"] = [told for told in (*notes, note) if told]
    return facts | {"made": environment.made()}


def _check_pair(own: Subject, other: Subject | None, translates: bool) -> None:
    for subject in filter(None, (own, other)):
        if bool(subject.model.config.is_encoder_decoder) != translates:
            wanted = "--src and --tgt" if subject.model.config.is_encoder_decoder else "--text"
            raise T2RError(f"{subject.name} is analyzed with {wanted}")
    if other is None:
        return
    sizes = {subject.model.config.get_text_config().vocab_size for subject in (own, other)}
    if len(sizes) > 1:
        raise T2RError(f"{own.name} and {other.name} have different vocabularies: they cannot read the same tokens")
    if sorted(own.places.values()) != sorted(other.places.values()):
        raise T2RError(f"{own.name} and {other.name} have different layers: attention can only be compared by layer")


# --- Attention ----------------------------------------------------------------------------------------------


def _observed(
    own: Subject, other: Subject | None, batches: list[Any], window: int, words: int, progress: bool
) -> tuple[dict[str, Any], dict[str, list[Tensor]]]:
    """Return the parts of the analysis that are made from the attention of each layer, and the scores of all tokens.

    Each model reads each batch once."""
    weights: dict[Place, WeightMeasures] = {}
    features: dict[Place, FeatureMeasures] = {}
    subjects = {"model": own} | ({} if other is None else {"teacher": other})
    attention = {name: ByDistance(window) for name in subjects}
    nll: dict[str, list[Tensor]] = {name: [] for name in subjects}
    with progress_bar("attention", len(batches), "batches", shown=progress) as report:
        for number, batch in enumerate(batches, 1):
            readings = {name: subject.observe(batch) for name, subject in subjects.items()}
            for name, reading in readings.items():
                nll[name] += [] if reading.nll is None else [reading.nll]
            seen = readings["model"].attention
            theirs = readings["teacher"].attention if other is not None else {}
            for place in list(seen):
                mine, reference = seen.pop(place), theirs.pop(place, None)  # their memory is freed layer by layer
                first = max(0, mine.q.shape[2] - words)
                found = mine.weights(first)
                expected = None if reference is None else reference.weights(first)
                _same_heads(place, found.weights, None if expected is None else expected.weights)
                measured = WeightMeasures(mine.signed, reference is not None and reference.signed)
                weights.setdefault(place, measured).add(found, expected)
                if place.kind == "causal":
                    attention["model"].add(found.weights, first)
                    if expected is not None:
                        attention["teacher"].add(expected.weights, first)
                if isinstance(mine, LinearInputs):
                    features.setdefault(place, FeatureMeasures(measured_positions(window))).add(mine)
            report(number)
    layers = [_layer(place, measured, features.get(place), window) for place, measured in sorted(weights.items())]
    kinds = dict.fromkeys(layer["kind"] for layer in layers)
    ranges = distance_buckets(window)
    facts = {
        "mean": _mean(layers),
        "kinds": {kind: _mean([layer for layer in layers if layer["kind"] == kind]) for kind in kinds},
        "layers": layers,
        "by_distance": [
            {"first": first, "last": last} | {name: seen.between(first, last) for name, seen in attention.items()}
            for first, last in ranges
            if attention["model"].between(first, last) is not None
        ],
        "features": _features(list(features.values()), layers, window),
        "state": _growth([layer["state"] for layer in layers if layer["kind"] == "causal" and layer["recurrent"]]),
        "notes": _notes(weights.values(), layers),
    }
    return facts, nll


def _same_heads(place: Place, own: Tensor, teacher: Tensor | None) -> None:
    if teacher is not None and own.shape != teacher.shape:
        raise T2RError(
            f"layer {place.layer} has {own.shape[1]} heads and the teacher's {teacher.shape[1]}: attention can only be "
            "compared by head"
        )


def _layer(place: Place, weights: WeightMeasures, features: FeatureMeasures | None, window: int) -> dict[str, Any]:
    heads: list[dict[str, Any]] = [{"head": i, **found} for i, found in enumerate(weights.heads())]
    layer: dict[str, Any] = {"layer": place.layer, "kind": place.kind, "recurrent": features is not None}
    layer |= {name: _over_heads(heads, name) for name in (*FIELDS, "bounded")}
    if features is not None:
        dead = features.dead()
        for head, share in zip(heads, dead.pop("heads"), strict=True):
            head["dead"] = share
        layer |= dead | {"half_life": half_life_summary(features.half_lives(), window), "state": features.growth()}
    return layer | {"heads": heads}


def _mean(layers: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return the means over all heads of layers."""
    return {name: _over_heads([head for layer in layers for head in layer["heads"]], name) for name in FIELDS}


def _over_heads(heads: list[dict[str, Any]], name: str) -> float | None:
    """Return the mean of a measure over heads. It is None if it is undefined for a head.

    A head all of whose queries have bounded denominators is excluded from entropy and divergence, as such queries are:
    one head that attends to nothing does not hide the entropy of all others."""
    return _average([head[name] for head in heads if head[name] is not None or head["bounded"] < 1])


def _average(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def _features(measured: list[FeatureMeasures], layers: list[dict[str, Any]], window: int) -> dict[str, Any] | None:
    """Return the summary over all recurrent layers, or None if there are none."""
    if not measured:
        return None
    recurrent = [layer for layer in layers if layer["recurrent"]]
    half_lives = [lives for part in measured if (lives := part.half_lives()) is not None]
    names = ("dead", "dead_keys", "dead_queries", "bounded")
    found: dict[str, Any] = {name: _average([layer[name] for layer in recurrent]) for name in names}
    return found | {"half_life": half_life_summary(torch.cat(half_lives) if half_lives else None, window)}


def _growth(states: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the mean of the states of all layers, by number of tokens."""
    return [
        {"tokens": rows[0]["tokens"]}
        | {name: _average([row[name] for row in rows]) for name in ("norm", "effective_rank")}
        for rows in zip(*states, strict=True)
    ]


def _notes(weights: Any, layers: list[dict[str, Any]]) -> Iterator[str]:
    if any(measured.signed for measured in weights):
        yield (
            "entropy and Jensen-Shannon divergence are undefined for signed feature maps, whose attention weights "
            "can be negative"
        )
    if any(measured.teacher_signed for measured in weights):
        yield "the teacher's entropy and the Jensen-Shannon divergence are undefined: its feature maps are signed"
    heads = [(layer["layer"], head) for layer in layers for head in layer["heads"]]
    if empty := [f"layer {layer} head {head['head']}" for layer, head in heads if head["bounded"] == 1]:
        named = ", ".join(empty[:NAMED_HEADS]) + (", ..." if len(empty) > NAMED_HEADS else "")
        yield (
            f"entropy and Jensen-Shannon divergence exclude {len(empty)} of {len(heads)} heads, whose denominators are "
            f"bounded for all queries: {named}"
        )


# --- Beyond attention ---------------------------------------------------------------------------------------


def _by_position(nll: Mapping[str, list[Tensor]], window: int) -> tuple[list[dict[str, Any]], dict[str, float | None]]:
    """Return the perplexity by position in the samples, and in total. All words but the first of each are scored."""
    measured = {name: Perplexity(window, window - 1, torch.cat(parts).flatten().cpu()) for name, parts in nll.items()}
    columns = {name: found.by_position(POSITION_BUCKETS) for name, found in measured.items()}
    rows = [bucket._asdict() for bucket in columns["model"]]
    for row, bucket in zip(rows, columns.get("teacher", []), strict=False):
        row["teacher"] = bucket.perplexity
    return rows, {name: measured[name].perplexity if name in measured else None for name in ("model", "teacher")}


def _recall(
    own: Subject, other: Subject | None, tokenizer: Tokenizer, filler: str, window: int, trials: int, seed: int
) -> tuple[list[dict[str, Any]], str | None]:
    """Return recall by distance, and a note if it cannot be measured with this tokenizer and text."""
    limits = [positions_of(subject.model.config) for subject in (own, other) if subject is not None]
    fewest = min((limit for limit in limits if limit is not None), default=None)
    try:
        distances = fitting_distances(tokenizer, window, fewest)
        rows: list[dict[str, Any]] = []
        for subject in filter(None, (own, other)):
            with subject.reading() as model:
                found = recall(model, tokenizer, filler, distances=distances, trials=trials, seed=seed)
            if subject is own:
                rows = [row._asdict() for row in found]
            else:
                for row, of_teacher in zip(rows, found, strict=True):
                    row["teacher"] = {name: getattr(of_teacher, name) for name in ("accuracy", "interval", "greedy")}
        return rows, None
    except T2RError as error:
        return [], f"recall is not measured: {error}"


def _sensitivity(
    own: Subject, other: Subject | None, batches: Sequence[Mapping[str, Tensor]], progress: bool
) -> tuple[list[dict[str, Any]] | None, str | None]:
    """Return the increase in loss of each layer, the most sensitive first, and a note."""
    if own.is_transformer:
        return None, "sensitivity is not measured: the model has no recurrent layers"
    if own.model.t2r_config.merged:
        return None, "sensitivity is not measured: a merged model cannot compute softmax attention"

    def loss() -> float:
        total = count = 0.0
        for batch in batches:
            inputs = {name: x.to(own.model.device) for name, x in batch.items()}
            inputs.setdefault("labels", inputs["input_ids"])
            size = inputs["labels"].numel()
            total, count = total + float(own.model(**inputs, use_cache=False).loss) * size, count + size
        return total / count

    costs = scan_layers(own.model, loss, progress=progress)
    note = None
    if other is not None and not _same_weights(own, other):
        note = (
            "sensitivity: the weights of this model were trained with recurrent layers, so its loss with softmax "
            "attention is not the teacher's"
        )
    return [{"layer": layer, "loss": cost} for layer, cost in costs], note


def _same_weights(own: Subject, other: Subject) -> bool:
    """Return whether all weights of the teacher are unchanged in the model."""
    theirs: dict[str, Tensor] = dict(other.model.named_parameters())
    return all(
        torch.equal(parameter.cpu(), theirs[name].cpu())
        for name, parameter in own.model.named_parameters()
        if "feature_map" not in name and name in theirs
    )
