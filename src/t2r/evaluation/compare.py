"""Several models on one text, the first of them the reference for all others."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from t2r.errors import T2RError
from t2r.evaluation.generation import DISTANCES, recall, repeated, repetition
from t2r.evaluation.inputs import Text, encode, read_text, refuse_seq2seq
from t2r.evaluation.perplexity import STRIDE, WINDOW, Perplexity, perplexity
from t2r.hub import load_config, load_model, load_tokenizer

Model = str | Path | PreTrainedModel

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 32, 128
"""For repetition the models go on from pieces of the text itself."""


def evaluate(
    models: Sequence[Model],
    text_file: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    teacher: Model | None = None,
    window: int = WINDOW,
    stride: int = STRIDE,
    limit: int | None = None,
    tail: bool = False,
    batch_size: int | None = None,
    dtype: str = "float32",
    device: str = "auto",
    generation: bool = True,
    distances: Sequence[int] | None = None,
    trials: int = 32,
    seed: int = 0,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Measure each model, for JSON or for `tables`.

    KL and agreement are to the `teacher`, or else to the first model, and ratios of perplexity to the first
    model. Models given by name are loaded once, one at a time, so that memory holds the reference and one more.
    `generation` adds repetition and recall: by default at those distances that half a window holds.
    """
    if not models:
        raise T2RError("name at least one model")
    if tokenizer is None:
        tokenizer = _tokenizer_of(models[0])
    text = encode(tokenizer, read_text(text_file, tokenizer))
    _check([*models, *([] if teacher is None else [teacher])], text)
    if distances is None:
        distances = [d for d in (*DISTANCES, 1024, 4096, 16384) if 2 * d <= window]
    against = None if teacher is None else _loaded(teacher, dtype, device)
    sequences = 8 if batch_size is None else batch_size  # of what is generated

    results: list[dict[str, Any]] = []
    first: Perplexity | None = None
    for source in models:
        again = against is not None and teacher is not None and _title(source) == _title(teacher)
        model = against if again and isinstance(source, str | Path) else _loaded(source, dtype, device)
        assert model is not None
        with _progress_bar(_title(source), progress) as advance:
            scored = perplexity(
                model,
                text,
                window=window,
                stride=stride,
                batch_size=batch_size,
                teacher=against,
                limit=limit,
                tail=tail,
                progress=advance,
            )
        result = {"model": _title(source), "text": str(text_file), **scored.as_dict()}
        if first is None:
            first, against = scored, against or model
        else:
            result["ratio"], result["ratio_interval"] = scored.ratio(first)
        if generation:
            result["repetition"] = _repetition(model, tokenizer, text, window, seed, sequences)
            recalled = recall(
                model, tokenizer, text.string, distances=distances, trials=trials, seed=seed, batch_size=sequences
            )
            result["recall"] = [row._asdict() for row in recalled]
        results.append(result)
        del model
        gc.collect()  # a model is full of cycles, and the next one needs its memory now
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return results


def _repetition(
    model: PreTrainedModel, tokenizer: Tokenizer, text: Text, window: int, seed: int, batch_size: int
) -> dict[str, float | None]:
    """The model's rates, and beside them the rate of the text where it goes on by itself."""
    prompt, new = min(PROMPT_TOKENS, window // 4), min(NEW_TOKENS, window // 2)
    ids = text.token_ids.tolist()
    starts = range(0, len(ids) - prompt - new + 1, max(1, len(ids) // PROMPTS))
    if not starts:
        raise T2RError(f"a text of {len(ids)} tokens is too short to check what a model writes")
    prompts = [ids[i : i + prompt] for i in starts]
    rates = repetition(model, tokenizer, prompts, new_tokens=new, seed=seed, batch_size=batch_size)
    own = [repeated(ids[i + prompt : i + prompt + new]) for i in starts]
    return {**rates._asdict(), "text": sum(own) / len(own)}


def _tokenizer_of(source: Model) -> Tokenizer:
    if isinstance(source, PreTrainedModel):
        raise T2RError("a model that is given as an object needs its tokenizer beside it")
    if (tokenizer := load_tokenizer(str(source))) is None:
        load_config(str(source))  # or there is no model at all, and it says so
        raise T2RError(f"{source} has no tokenizer, and the first of the models must have one")
    return tokenizer


def _check(models: Sequence[Model], text: Text) -> None:
    """What can be known to be wrong before the first model is measured, which may take an hour.

    Perplexities compare only over the same tokens. A folder without a tokenizer is taken to use the one we have.
    """
    for source in models:
        if isinstance(source, PreTrainedModel):
            continue
        refuse_seq2seq(load_config(str(source)), str(source))
        tokenizer = load_tokenizer(str(source))
        if tokenizer is not None and not torch.equal(encode(tokenizer, text.string).token_ids, text.token_ids):
            raise T2RError(
                f"the tokenizer of {source} cuts this text differently, and perplexities per token would not "
                "compare: evaluate the models one at a time, and compare their bits per byte"
            )


def _loaded(source: Model, dtype: str, device: str) -> PreTrainedModel:
    return source if isinstance(source, PreTrainedModel) else load_model(str(source), dtype=dtype, device=device)


def _title(source: Model) -> str:
    return type(source).__name__ if isinstance(source, PreTrainedModel) else str(source)


@contextmanager
def _progress_bar(title: str, shown: bool) -> Iterator[Any]:
    """Yields what `perplexity` calls after each batch: a bar on stderr, so that stdout stays clean."""
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title)
        yield lambda done, total: bar.update(task, completed=done, total=total)
