"""The measurements of one model or variant on texts, by `evaluate`."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from t2r.data.progress import is_watched
from t2r.errors import T2RError
from t2r.evaluation.generation import recall, repeated, repetition
from t2r.evaluation.harness import harness
from t2r.evaluation.inputs import Text
from t2r.evaluation.perplexity import Perplexity, perplexity
from t2r.evaluation.sizes import memory_of
from t2r.evaluation.variants import Variant
from t2r.options import RunOptions

logger = logging.getLogger(__name__)

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 32, 128
"""For repetition, the prompts are excerpts of the text."""
ROUNDED_WINDOWS = 256
"""Windows per batch with a rounded state, on an accelerator."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What is measured of each model: the arguments of `evaluate`, with their defaults filled in."""

    tokenizer: Tokenizer
    texts: Mapping[str, Text]
    windows: Sequence[tuple[int, int]]
    """Pairs of a window and its stride."""
    limit: int | None
    tail: bool
    batch_size: int | None
    generation: bool
    distances: Sequence[int]
    recall_required: bool
    """Whether a text or a tokenizer that does not allow recall is an error. Otherwise it is only reported."""
    trials: int
    seed: int
    tasks: Sequence[str]
    task_folder: str | Path | None
    progress: bool

    @property
    def sequences(self) -> int:
        """Batch size for generation."""
        return RunOptions.batch_size if self.batch_size is None else self.batch_size


class Measurement:
    """Measures models in turn. The first one, without a variant, is the reference of the ratios of perplexity. That of
    KL and agreement is `against`, or the first model too."""

    def __init__(self, asked: Asked, against: PreTrainedModel | None = None) -> None:
        self.asked, self.against = asked, against
        self.first: dict[tuple[str, int], Perplexity] | None = None

    def of(self, model: PreTrainedModel, title: str, variant: Variant | None) -> dict[str, Any]:
        """Return the measurements on the texts."""
        result: dict[str, Any] = {"model": title, "parameters": model.num_parameters()}
        if variant is not None:
            result |= {"variant": str(variant)}
        if self.asked.texts:
            rows = self.perplexities(model, variant, _row_title(result))
            self.against = self.against or model
            result |= rows[0] | ({"measured": rows} if len(rows) > 1 else {})
            if self.asked.generation:
                result |= self.generated(model, variant)
        return result

    def perplexities(self, model: PreTrainedModel, variant: Variant | None, title: str) -> list[dict[str, Any]]:
        """Return a row for each text and window."""
        asked, kept = self.asked, memory_of(model, variant)
        scores: dict[tuple[str, int], Perplexity] = {}
        rows = []
        for (name, text), (size, stride) in product(asked.texts.items(), asked.windows):
            with _progress_bar(title, asked.progress) as advance:
                scored = scores[name, size] = perplexity(
                    model,
                    text,
                    window=size,
                    stride=stride,
                    batch_size=_batch(model, variant) if asked.batch_size is None else asked.batch_size,
                    teacher=self.against,
                    variant=variant,
                    limit=asked.limit,
                    tail=asked.tail,
                    progress=advance,
                )
            row = {"text": name, **scored.as_dict(), "kept_bytes": None if kept is None else kept.at(size)}
            if self.first is not None:
                row["ratio"], row["ratio_interval"] = scored.ratio(self.first[name, size])
            rows.append(row)
        if self.first is None:
            self.first = scores
        return rows

    def generated(self, model: PreTrainedModel, variant: Variant | None) -> dict[str, Any]:
        """Return repetition, of models only, and recall, on the first text."""
        asked, found = self.asked, {}
        text = next(iter(asked.texts.values()))
        if variant is None:
            shortest = min(size for size, _ in asked.windows)
            found["repetition"] = _repetition(model, asked.tokenizer, text, shortest, asked.seed, asked.sequences)
        return found | {"recall": self.recall(model, text.string, variant)}

    def recall(self, model: PreTrainedModel, filler: str, variant: Variant | None) -> list[dict[str, Any]]:
        asked = self.asked
        try:
            rows = recall(
                model,
                asked.tokenizer,
                filler,
                distances=asked.distances,
                trials=asked.trials,
                seed=asked.seed,
                batch_size=asked.batch_size,
                variant=variant,
            )
        except T2RError as error:  # depends on the tokenizer and the text, so it is the same for every model
            if asked.recall_required:
                raise
            logger.warning("recall is not measured: %s", error)
            return []
        return [row._asdict() for row in rows]

    def tasks(self, model: PreTrainedModel, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the results of lm-eval, with the model's own tokenizer."""
        asked = self.asked
        return harness(
            model,
            asked.tasks,
            tokenizer=tokenizer,
            task_folder=asked.task_folder,
            limit=asked.limit,
            batch_size=asked.sequences,
        )


def _batch(model: PreTrainedModel, variant: Variant | None) -> int | None:
    """Return the number of windows per batch, or None to choose by device.

    With a rounded state, each token takes a forward pass, so an accelerator processes many windows at once."""
    rounded = variant is not None and variant.state is not None and model.device.type != "cpu"
    return ROUNDED_WINDOWS if rounded else None


def _row_title(result: dict[str, Any]) -> str:
    return f"{result['model']}, {result['variant']}" if "variant" in result else str(result["model"])


def _repetition(
    model: PreTrainedModel, tokenizer: Tokenizer, text: Text, window: int, seed: int, batch_size: int
) -> dict[str, float | None]:
    """Return the repetition rates of the model, and that of the text itself after the same prompts."""
    prompt, new = min(PROMPT_TOKENS, window // 4), min(NEW_TOKENS, window // 2)
    ids = text.token_ids.tolist()
    starts = range(0, len(ids) - prompt - new + 1, max(1, len(ids) // PROMPTS))
    if not starts:
        raise T2RError(f"a text of {len(ids)} tokens is too short to measure repetition: use --no-generation")
    prompts = [ids[i : i + prompt] for i in starts]
    rates = repetition(model, tokenizer, prompts, new_tokens=new, seed=seed, batch_size=batch_size)
    own = [repeated(ids[i + prompt : i + prompt + new]) for i in starts]
    return {**rates._asdict(), "text": sum(own) / len(own)}


@contextmanager
def _progress_bar(title: str, shown: bool) -> Iterator[Any]:
    """Yield the function that `perplexity` calls after each batch, which updates a progress bar on stderr."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not shown or not is_watched(console):
        yield None
        return
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task(title)
        yield lambda done, total: bar.update(task, completed=done, total=total)
