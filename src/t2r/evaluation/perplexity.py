"""Perplexity by the paper's protocol: windows of 512 advanced by 256, the last 256 tokens of each scored.

So every token after the first 256 is scored exactly once, with 256 to 511 tokens before it as its context.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from t2r.errors import T2RError
from t2r.evaluation.inputs import Text, refuse_seq2seq
from t2r.evaluation.logits import check_positions
from t2r.evaluation.variants import Variant, readout_of
from t2r.model.logits import Readout, evaluating, logits_at_once

WINDOW, STRIDE = 512, 256
BUCKETS = 8


class Bucket(NamedTuple):
    """The tokens that were scored with `first` to `last` tokens of context."""

    first: int
    last: int
    tokens: int
    perplexity: float


@dataclass(frozen=True)
class Perplexity:
    """Every scored token, in the order of the text, and what follows from them."""

    window: int
    stride: int
    nll: Tensor
    """Negative log likelihood of each token, in nats."""
    kl: Tensor | None = None
    """KL(teacher || model) where each token was predicted."""
    agrees: Tensor | None = None
    """Whether the model's most likely token was the teacher's."""
    text: str | None = None
    """What the scored tokens say, if it is known."""

    @property
    def tokens(self) -> int:
        return len(self.nll)

    @cached_property
    def mean_nll(self) -> float:
        return self.nll.double().mean().item()

    @property
    def perplexity(self) -> float:
        return _exp(self.mean_nll)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Of the perplexity, with 95 % confidence."""
        return confidence(self.nll, self.stride)

    @property
    def word_perplexity(self) -> float | None:
        """A word is what whitespace separates. It compares across tokenizers, as bits per byte do."""
        words = len((self.text or "").split())
        return _exp(self.mean_nll * self.tokens / words) if words else None

    @property
    def bits_per_byte(self) -> float | None:
        size = len((self.text or "").encode())
        return self.mean_nll * self.tokens / math.log(2) / size if size else None

    @property
    def mean_kl(self) -> float | None:
        return None if self.kl is None else self.kl.double().mean().item()

    @property
    def agreement(self) -> float | None:
        return None if self.agrees is None else self.agrees.double().mean().item()

    def by_position(self, buckets: int = BUCKETS) -> list[Bucket]:
        """Perplexity by how much context there was: where a state is full, it stops falling or rises."""
        buckets = min(buckets, self.stride)
        position = torch.arange(self.tokens) % self.stride
        bucket = position * buckets // self.stride
        result = []
        for i in range(buckets):
            if (chosen := bucket == i).any():
                context = position[chosen] + self.window - self.stride
                mean = self.nll[chosen].double().mean().item()
                result.append(Bucket(int(context.min()), int(context.max()), int(chosen.sum()), _exp(mean)))
        return result

    def ratio(self, other: "Perplexity") -> tuple[float, tuple[float, float] | None]:
        """This perplexity over another's on the same tokens, and its interval.

        Hard windows are hard for both, so the difference window by window is known much better than either.
        """
        if (self.tokens, self.stride) != (other.tokens, other.stride):
            raise T2RError("perplexities compare only over the same tokens in the same windows")
        difference = self.nll.double() - other.nll.double()
        return _exp(difference.mean().item()), confidence(difference, self.stride)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "window": self.window,
            "stride": self.stride,
            "tokens": self.tokens,
            "nll": self.mean_nll,
            "perplexity": self.perplexity,
            "interval": self.interval,
            "word_perplexity": self.word_perplexity,
            "bits_per_byte": self.bits_per_byte,
            "kl": self.mean_kl,
            "agreement": self.agreement,
            "by_position": [bucket._asdict() for bucket in self.by_position()],
        }


def perplexity(
    model: PreTrainedModel,
    tokens: Text | Tensor | Sequence[int],
    *,
    window: int = WINDOW,
    stride: int = STRIDE,
    batch_size: int | None = None,
    teacher: PreTrainedModel | None = None,
    variant: Variant | None = None,
    limit: int | None = None,
    tail: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Score a text. Of a `Text` we also know words and bytes; with a `teacher` there is KL(teacher || model).

    Args:
        variant: read the model with less memory than it has (see `Variant`); the teacher is read as it is.
        batch_size: windows that are read at a time; by default 8, on an accelerator as many as its memory suggests.
        limit: a number of windows.
        tail: also score the tokens at the end that fill no whole window.
        progress: is called with the windows done and the windows there are.
    """
    refuse_seq2seq(model.config, type(model).__name__)
    if not 0 < stride < window:
        raise T2RError(f"a stride of {stride} must be at least 1 and less than the window of {window}")
    if (batch_size is not None and batch_size < 1) or (limit is not None and limit < 1):
        raise T2RError("batch size and limit must be at least 1")
    for reader in (model, teacher):
        if reader is not None:
            check_positions(reader, window)
    ids = tokens.token_ids if isinstance(tokens, Text) else torch.as_tensor(tokens, dtype=torch.long)
    _check_vocabulary(model, ids)
    batch_size = fitting_batch(model.device, window) if batch_size is None else batch_size
    batches = _batches(ids.to(model.device), window, stride, batch_size, limit, tail)
    windows = sum(map(len, batches))

    scores, done = [], 0
    with evaluating(model, teacher):
        readout = readout_of(model, {"input_ids": batches[0]}, variant)
        reference = None if teacher is None else Readout(teacher, {"input_ids": batches[0].to(teacher.device)})
        if reference is not None and reference.out_features != readout.out_features:
            raise T2RError(
                f"a teacher with a vocabulary of {reference.out_features} cannot be compared with a model "
                f"that has {readout.out_features}"
            )
        for batch in batches:
            scores.append(_score(readout, reference, batch, window - stride))
            done += len(batch)
            if progress is not None:
                progress(done, windows)
    # Only now is the device waited for.
    nll, *others = (torch.cat(parts).cpu() for parts in zip(*scores, strict=True))
    first = window - stride
    text = tokens.between(first, first + len(nll)) if isinstance(tokens, Text) else None
    kl, agrees = others or (None, None)
    return Perplexity(window, stride, nll, kl, agrees, text)


def fitting_batch(device: torch.device, window: int) -> int:
    """Windows to read at a time: 8 on a CPU; on an accelerator 16,384 tokens (32 windows of 512), four times as many
    where there are 40 GB or more."""
    if device.type == "cpu":
        return 8
    tokens = 1 << 14
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= 40e9:
        tokens <<= 2
    return max(1, tokens // window)


def _check_vocabulary(model: PreTrainedModel, ids: Tensor) -> None:
    size = getattr(model.config.get_text_config(), "vocab_size", None)
    if size is not None and len(ids) and int(ids.max()) >= size:
        raise T2RError(f"this text has token {int(ids.max())}, and the model's vocabulary ends at {size - 1}")


def _batches(ids: Tensor, window: int, stride: int, batch_size: int, limit: int | None, tail: bool) -> list[Tensor]:
    windows = ids.unfold(0, window, stride) if len(ids) >= window else ids.new_empty(0, window)
    batches = [batch for batch in windows[:limit].split(batch_size) if len(batch)]
    rest = ids[len(windows) * stride :]  # begins with the context of what it scores, as every window does
    if tail and len(rest) > window - stride and (limit is None or limit > len(windows)):
        batches.append(rest[None])
    if not batches:
        raise T2RError(f"the text has {len(ids)} tokens, which do not fill one window of {window}")
    return batches


def _score(readout: Readout, reference: Readout | None, batch: Tensor, first: int) -> list[Tensor]:
    """For the tokens of each window from `first` on, on the model's device: nll, and with a teacher kl and agrees."""
    rows = min(r.rows_at_once(batch) for r in (readout, reference) if r is not None)
    scored = [_score_rows(readout, reference, some, first) for some in batch.split(rows)]
    # One window after the other, which is the order of the text.
    return [torch.cat(parts).flatten() for parts in zip(*scored, strict=True)]


def _score_rows(readout: Readout, reference: Readout | None, batch: Tensor, first: int) -> list[Tensor]:
    """Each model's body runs once; logits are formed for a slice of positions at a time."""
    span = slice(first - 1, batch.shape[1] - 1)  # the logits at a position predict the token after it
    size = max(1, logits_at_once(batch.device) // (len(batch) * readout.out_features))
    ours = readout.states({"input_ids": batch})[:, span].split(size, dim=1)
    theirs: Sequence[Tensor] = ()
    if reference is not None:
        there = batch.to(reference.model.device)
        theirs = reference.states({"input_ids": there})[:, span].split(size, dim=1)
    scored = []
    for i, (states, targets) in enumerate(zip(ours, batch[:, first:].split(size, dim=1), strict=True)):
        own = readout(states).float().log_softmax(-1)
        found = [-own.gather(-1, targets[..., None])[..., 0]]
        if reference is not None:
            logits = reference(theirs[i]).float().to(own.device)
            other = logits.log_softmax(-1)
            found += [(other.exp() * (other - own)).sum(-1), own.argmax(-1) == logits.argmax(-1)]
        scored.append(found)
    return [torch.cat(parts, dim=1) for parts in zip(*scored, strict=True)]


def confidence(values: Tensor, size: int) -> tuple[float, float] | None:
    """exp of a 95 % interval for the mean of values that come in windows of `size`; None of a single window.

    A normal approximation over the windows' means. Tokens of a window are alike in difficulty, so it is the
    windows that count as independent; neighbors in an article are not quite, so it is a little narrow.
    """
    windows = values.double().split(size)
    if len(windows) < 2:
        return None
    mean = values.double().mean().item()
    # Deviations of sums, not of means: a last window that is shorter then has the weight that it should have.
    squares = sum((w.sum().item() - mean * len(w)) ** 2 for w in windows)
    error = math.sqrt(squares * len(windows) / (len(windows) - 1)) / len(values)
    return _exp(mean - 1.96 * error), _exp(mean + 1.96 * error)


def _exp(x: float) -> float:
    """A model that has gone wrong may be beyond what exp can hold."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
