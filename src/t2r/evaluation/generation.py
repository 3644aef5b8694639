"""Measurements of generation that perplexity does not show: repetition and recall."""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from t2r.data.beginning import bos_of
from t2r.errors import T2RError
from t2r.evaluation.inputs import encode
from t2r.evaluation.logits import check_positions, evaluating, logits_by_slice
from t2r.evaluation.perplexity import fitting_batch
from t2r.evaluation.variants import Variant
from t2r.generation.engine import Engine
from t2r.model.modeling import T2RModel
from t2r.options import RunOptions

PROMPTS = (
    "The history of the city begins",
    "Once upon a time there was a little",
    "Scientists have recently discovered that",
    "In this chapter we will learn how to",
    "The first thing that she noticed was",
    "According to the report, the government",
    "My grandfather used to tell me that",
    "The best way to cook rice is",
)


class Repetition(NamedTuple):
    """The share of n-grams that occurred earlier in the same continuation, from 0 to 1."""

    greedy: float
    sampled: float


def repetition(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]] | None = None,
    *,
    new_tokens: int = 128,
    n: int = 4,
    seed: int = 0,
    batch_size: int = 8,
) -> Repetition:
    """Measure how much a model repeats itself, with greedy search and with sampling.

    Prompts are strings or token ids. Greedy text of small transformers is repetitive too, so it should be compared with
    the teacher's. The repetition of sampled text should be close to that of human text.
    """
    if new_tokens <= n:
        raise T2RError(
            f"new_tokens is {new_tokens}: measuring repeated {n}-grams requires more than {n}. An evaluation generates "
            "half a window: give it a larger one, or --no-generation (generation=False)"
        )
    coded = [_ids(tokenizer, p) if isinstance(p, str) else list(p) for p in prompts or PROMPTS]
    if not all(coded):
        raise T2RError("a prompt is empty")
    if (bos := bos_of(tokenizer)) is not None:
        coded = [[bos, *ids] for ids in coded]
    check_positions(model, max(map(len, coded)) + new_tokens)
    # Sampling without filters, from the distribution of the model.
    ways: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "sampled": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
    }
    rates = {}
    swapped: Any = model
    generate = Engine(model).generate if isinstance(model, T2RModel) else swapped.generate
    with (
        evaluating(model),
        _without_settings(model),
        torch.random.fork_rng([model.device] if model.device.type == "cuda" else []),
    ):
        for name, options in ways.items():
            torch.manual_seed(seed)
            written = [
                ids
                for batch in _of_equal_length(coded, batch_size)
                for ids in _continue(generate, batch.to(model.device), new_tokens, options)
            ]
            rates[name] = sum(repeated(ids, n) for ids in written) / len(written)
    return Repetition(**rates)


@contextmanager
def _without_settings(model: PreTrainedModel) -> Iterator[None]:
    """Ignore the generation settings of a model, such as filters and penalties."""
    own = model.generation_config
    model.generation_config = GenerationConfig(bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id)
    try:
        yield
    finally:
        model.generation_config = own


def _continue(generate: Any, prompts: Tensor, new_tokens: int, options: dict[str, Any]) -> list[list[int]]:
    ids: Tensor = generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        min_new_tokens=new_tokens,  # does not end early
        max_new_tokens=new_tokens,
        num_beams=1,
        repetition_penalty=1.0,
        pad_token_id=0,  # never used, but avoids a warning
        **options,
    )
    return ids[:, prompts.shape[1] :].tolist()


def repeated(ids: Sequence[int], n: int = 4) -> float:
    """Return the share of n-grams that occurred before."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return 1 - len(set(grams)) / len(grams)


def _of_equal_length(prompts: list[list[int]], batch_size: int) -> Iterator[Tensor]:
    """Yield batches of prompts of equal length, which need no padding."""
    for length in sorted({len(p) for p in prompts}):
        yield from torch.tensor([p for p in prompts if len(p) == length]).split(batch_size)


NAMES = ("king", "queen", "baker", "doctor", "sailor", "teacher", "farmer", "judge")
WORDS = (
    "apple", "bridge", "butter", "candle", "castle", "desert", "dragon", "engine", "flower", "forest", "garden",
    "hammer", "horse", "island", "jacket", "kitchen", "lemon", "market", "mirror", "needle", "orange", "pencil",
    "quarter", "rabbit", "river", "silver", "table", "umbrella", "valley", "window", "winter", "yellow",
)  # fmt: skip
DISTANCES = (16, 64, 256)
FAR_DISTANCES = (1024, 2048, 4096)
CROWDED = 4
"""Places for a sentence in a text, for each sentence that occurs twice in it."""
LEAD = 16
"""Minimum number of tokens before the key, because models treat the first tokens of a text differently."""


class Recall(NamedTuple):
    distance: int
    """Tokens of other text between the key and the question."""
    accuracy: float
    """The share of trials in which the correct word is the most likely of the choices."""
    chance: float
    """The accuracy of random choices."""
    greedy: float
    """The share of trials in which greedy search generates the correct word."""
    trials: int
    interval: tuple[float, float]
    """The 95 % confidence interval of the accuracy (Wilson)."""
    greedy_interval: tuple[float, float]


def wilson(successes: int, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Return the Wilson score interval of a proportion. It is within [0, 1], also for proportions of 0 and 1."""
    share, weight = successes / trials, z * z / trials
    center = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / trials + weight / 4 / trials)
    return max(0.0, center - half), min(1.0, center + half)


Sentences = dict[str, tuple[list[int], dict[str, list[int]]]]
"""For each name, the tokens of the question, and for each word the tokens of the answer."""


class _Trial(NamedTuple):
    key: list[int]
    question: list[int]
    answer: list[int]
    choices: list[int]  # the first token of each word, starting with the correct word


def recall(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    filler: str,
    *,
    distances: Sequence[int] = DISTANCES,
    trials: int = RunOptions.trials,
    choices: int = 8,
    seed: int = 0,
    batch_size: int | None = 8,
    variant: Variant | None = None,
) -> list[Recall]:
    """Measure whether a model recalls a word that occurred once, at several distances.

    The sentence "The password of the baker is lemon." is inserted into the filler text. After `distance` tokens of
    filler, the question "The password of the baker is" follows. The choices differ in their first token, so one forward
    pass is sufficient. The questions are the same at every distance and for every model.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        filler: the text around the sentence.
        distances: numbers of tokens between the sentence and the question.
        trials: trials at each distance.
        choices: number of words to choose from.
        seed: random seed for the trials.
        batch_size: trials per batch. None: chosen by device.
        variant: evaluate a variant of the model.
    """
    if trials < 1 or choices < 2 or min(distances, default=0) < 0:
        raise T2RError("recall requires at least 1 trial, 2 choices, and distances of 0 or more")
    text, sentences, bos = _ids(tokenizer, filler), recall_sentences(tokenizer), bos_of(tokenizer)
    results = []
    for distance in distances:
        rng = random.Random(seed)
        asked = [_trial(tokenizer, sentences, rng, choices) for _ in range(trials)]
        # All contexts have the same length and need no padding: the lead is longer if the sentences are shorter.
        length = LEAD + distance + max(len(t.key) + len(t.question) for t in asked)
        check_positions(model, length + max(len(t.answer) for t in asked))
        if len(text) < length:
            raise T2RError(f"a text of {len(text)} tokens is too short for a distance of {distance}")
        rows = [_context(trial, text, length, distance, rng, bos) for trial in asked]
        known, written = 0, 0
        rows_at_once = fitting_batch(model.device, length) if batch_size is None else batch_size
        with evaluating(model):
            for i in range(0, trials, rows_at_once):
                batch = asked[i : i + rows_at_once]
                answers = _answers(model, rows[i : i + rows_at_once], batch, variant)
                for trial, logits in zip(batch, answers, strict=True):
                    first = logits[0, trial.choices]
                    known += bool(first[0] > first[1:].max())
                    written += logits[: len(trial.answer)].argmax(-1).tolist() == trial.answer
        intervals = wilson(known, trials), wilson(written, trials)
        results.append(Recall(distance, known / trials, 1 / choices, written / trials, trials, *intervals))
    return results


def recall_questions(
    tokenizer: Tokenizer, text: list[int], length: int, trials: int, *, choices: int = 8, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Return the questions of `recall` as token ids `[trials, length]`, with the longest distance that fits, and the
    first tokens of the choices `[trials, choices]`, the right one first."""
    rng, sentences = random.Random(seed), recall_sentences(tokenizer)
    asked = [_trial(tokenizer, sentences, rng, choices) for _ in range(trials)]
    distance = length - LEAD - max(len(t.key) + len(t.question) for t in asked)
    if distance < 0 or len(text) < length:
        raise T2RError(f"a text of {len(text)} tokens is too short for questions of {length} tokens")
    bos = bos_of(tokenizer)
    rows = [_context(trial, text, length, distance, rng, bos) for trial in asked]
    return torch.tensor(rows), torch.tensor([trial.choices for trial in asked])


def repeated_sentences(
    tokenizer: Tokenizer, text: list[int], length: int, rows: int, *, seed: int = 0, sentences: Sentences | None = None
) -> tuple[Tensor, Tensor]:
    """Return texts in which sentences of `recall` occur twice, at all distances: token ids `[rows, length]`, and which
    tokens precede a word that the first occurrence told. Many calls are faster with the `recall_sentences`."""
    rng, sentences = random.Random(seed), sentences or recall_sentences(tokenizer)
    keys = [
        {
            name: _ids(tokenizer, f"\nThe password of the {name} is {word}.\n")
            for name, word in zip(NAMES, words, strict=True)
        }
        for words in (rng.sample(WORDS, len(NAMES)) for _ in range(rows))
    ]
    size = max(len(key) for row in keys for key in row.values())
    slots = (length - LEAD) // size
    if slots < 2 or len(text) < length:
        raise T2RError(f"a text of {min(length, len(text))} tokens is too short for sentences that are repeated")
    pairs = max(1, min(len(NAMES), slots // CROWDED))
    ids, asked = torch.empty(rows, length, dtype=torch.long), torch.zeros(rows, length, dtype=torch.bool)
    bos = bos_of(tokenizer)
    for row in range(rows):
        start = rng.randrange(len(text) - length + 1)
        ids[row] = torch.tensor(text[start : start + length])
        if bos is not None:
            ids[row, 0] = bos
        free, names = set(range(slots)), rng.sample(NAMES, pairs)
        shares = [(pair * rows + row + rng.random()) / (pairs * rows) for pair in range(pairs)]
        # Half of the distances are even in their logarithms, and half in themselves: far words are asked for, too.
        spread = ((slots - 1) * x if pair % 2 else (slots - 1) ** x for pair, x in enumerate(shares))
        distances = [max(1, min(slots - 1, round(x))) for x in spread]
        for pair in sorted(range(pairs), key=distances.__getitem__, reverse=True):  # farthest: fewest places
            distance = distances[pair]
            places = [slot for slot in sorted(free) if slot + distance in free]
            if not places:
                continue
            first, key, question = rng.choice(places), keys[row][names[pair]], sentences[names[pair]][0]
            free -= {first, first + distance}
            for slot in (first, first + distance):
                at = LEAD + slot * size
                ids[row, at : at + len(key)] = torch.tensor(key)
            asked[row, at + len(question) - 1] = key[: len(question)] == question
    return ids, asked


def fitting_distances(
    tokenizer: Tokenizer, window: int, positions: int | None, candidates: Sequence[int] = DISTANCES
) -> list[int]:
    """Return the distances of recall up to half a window, or up to a window if they are far, for a model
    with `positions` positions (None: no limit)."""
    rest = recall_tokens(tokenizer)
    return [
        d
        for d in candidates
        if (d if d in FAR_DISTANCES else 2 * d) <= window and (positions is None or d + rest <= positions)
    ]


def recall_tokens(tokenizer: Tokenizer) -> int:
    """Return the maximum number of tokens of a trial of `recall`, without its distance."""
    sentences = recall_sentences(tokenizer)
    questions = [len(question) + max(map(len, answers.values())) for question, answers in sentences.values()]
    key = max(len(_ids(tokenizer, f"\nThe password of the {name} is {word}.\n")) for name in NAMES for word in WORDS)
    return LEAD + key + max(questions)


def _trial(tokenizer: Tokenizer, sentences: Sentences, rng: random.Random, choices: int) -> _Trial:
    name = rng.choice(NAMES)
    question, answers = sentences[name]
    words = rng.sample(WORDS, len(WORDS))
    # One word for each first token.
    by_first = {answers[word][0]: word for word in words if answers[word]}
    if len(by_first) < choices:
        raise T2RError(
            f"recall requires {choices} words with different first tokens; the tokenizer has {len(by_first)}"
        )
    first, *others = list(by_first)[:choices]
    word = by_first[first]
    key = _ids(tokenizer, f"\nThe password of the {name} is {word}.\n")
    return _Trial(key, question, answers[word], [first, *others])


def _context(
    trial: _Trial, text: list[int], length: int, distance: int, rng: random.Random, bos: int | None
) -> list[int]:
    """Return an excerpt of the text that contains the key, followed by the question. It may begin with BOS."""
    lead = length - distance - len(trial.key) - len(trial.question)
    start = rng.randrange(len(text) - lead - distance + 1)
    piece = text[start : start + lead + distance]
    first = piece[:1] if bos is None else [bos]
    return first + piece[1:lead] + trial.key + piece[lead:] + trial.question


def recall_sentences(tokenizer: Tokenizer) -> Sentences:
    """Return questions and answers, split at the first token that differs between the words.

    If a tokenizer has a separate token for the space before a word, that token belongs to the question."""
    sentences = {}
    for name in NAMES:
        whole = {word: _ids(tokenizer, f"\nThe password of the {name} is {word}") for word in WORDS}
        same = takewhile(lambda column: len(set(column)) == 1, zip(*whole.values(), strict=False))
        question = [column[0] for column in same]
        sentences[name] = question, {word: ids[len(question) :] for word, ids in whole.items()}
    return sentences


def _ids(tokenizer: Tokenizer, string: str) -> list[int]:
    return encode(tokenizer, string).token_ids.tolist()


def _answers(
    model: PreTrainedModel, contexts: list[list[int]], trials: list[_Trial], variant: Variant | None
) -> Tensor:
    """Return the logits that predict each token of the answer, given the context and the previous answer tokens."""
    longest = max(len(trial.answer) for trial in trials)
    # Attention is causal, so any token can be used as padding after an answer.
    rows = [c + t.answer + [0] * (longest - len(t.answer)) for c, t in zip(contexts, trials, strict=True)]
    ids = torch.tensor(rows, device=model.device)
    first = len(contexts[0]) - 1
    return torch.cat(list(logits_by_slice(model, ids, first, first + longest, variant)), dim=1)
