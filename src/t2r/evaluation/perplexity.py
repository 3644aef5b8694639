"""Perplexity as in the paper: windows of 512 tokens with a stride of 256, of which the last 256 tokens are scored.

Every token after the first 256 is scored exactly once, with a context of 256 to 511 tokens.
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
from t2r.generation.state import check_vocabulary
from t2r.model.logits import Readout, evaluating, logits_at_once

WINDOW, STRIDE = 512, 256
BUCKETS = 8


class Bucket(NamedTuple):
    """The tokens scored with a context of `first` to `last` tokens."""

    first: int
    last: int
    tokens: int
    perplexity: float


@dataclass(frozen=True)
class Perplexity:
    """The scores of all tokens, in the order of the text, and the metrics derived from them."""

    window: int
    stride: int
    nll: Tensor
    """Negative log likelihood of each token, in nats."""
    kl: Tensor | None = None
    """KL(teacher || model) of the prediction of each token."""
    agrees: Tensor | None = None
    """Whether the most likely tokens of model and teacher are the same."""
    text: str | None = None
    """The text of the scored tokens, if known."""

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
        """The 95 % confidence interval of the perplexity."""
        return confidence(self.nll, self.stride)

    @property
    def word_perplexity(self) -> float | None:
        """Perplexity per word separated by whitespace. Like bits per byte, it is comparable between tokenizers."""
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
        """Return the perplexity by length of context. It stops falling, or rises, if the state is full."""
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
        """Return the ratio of this perplexity to another on the same tokens, and its confidence interval.

        The interval is computed from paired differences. It is narrower than those of the perplexities, because the
        difficulty of a window affects both models.
        """
        if (self.tokens, self.stride) != (other.tokens, other.stride):
            raise T2RError("perplexities are comparable only over the same tokens in the same windows")
        difference = self.nll.double() - other.nll.double()
        return _exp(difference.mean().item()), confidence(difference, self.stride)

    def as_dict(self) -> dict[str, Any]:
        """Return the metrics as a dictionary for JSON."""
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
    """Compute the perplexity of a model on a text.

    Args:
        model: a causal language model.
        tokens: a `Text`, which also gives metrics per word and byte, and the first token of each window, or token ids.
        window: tokens per window.
        stride: tokens by which the window advances, and that are scored in each window.
        batch_size: windows per batch. None: 8 on a CPU, otherwise chosen by the memory of the device.
        teacher: a model for KL(teacher || model) and agreement.
        variant: evaluate a variant of the model (see `Variant`). It does not apply to the teacher.
        limit: maximum number of windows.
        tail: whether to score the tokens at the end that do not fill a window.
        progress: called with the number of completed windows and their total.
    """
    refuse_seq2seq(model.config, type(model).__name__)
    if not 0 < stride < window:
        raise T2RError(f"stride must be at least 1 and less than the window of {window}; got {stride}")
    if (batch_size is not None and batch_size < 1) or (limit is not None and limit < 1):
        raise T2RError("batch_size and limit must be at least 1")
    for reader in (model, teacher):
        if reader is not None:
            check_positions(reader, window)
    ids = tokens.token_ids if isinstance(tokens, Text) else torch.as_tensor(tokens, dtype=torch.long)
    check_vocabulary(model, tokens.read if isinstance(tokens, Text) else ids.unique().tolist())
    batch_size = fitting_batch(model.device, window) if batch_size is None else batch_size
    bos = tokens.bos if isinstance(tokens, Text) else None
    batches = _batches(ids.to(model.device), window, stride, batch_size, limit, tail)
    windows = sum(map(len, batches))

    scores, done = [], 0
    with evaluating(model, teacher):
        readout = readout_of(model, {"input_ids": batches[0]}, variant)
        reference = None if teacher is None else Readout(teacher, {"input_ids": batches[0].to(teacher.device)})
        if reference is not None and reference.out_features != readout.out_features:
            raise T2RError(
                f"the teacher has a vocabulary of {reference.out_features} and the model one of "
                f"{readout.out_features}: they must be the same"
            )
        for batch in batches:
            batch = begun(batch, bos)
            scores.append(_score(readout, reference, batch, window - stride))
            done += len(batch)
            if progress is not None:
                progress(done, windows)
    # The first synchronization with the device.
    nll, *others = (torch.cat(parts).cpu() for parts in zip(*scores, strict=True))
    first = window - stride
    text = tokens.between(first, first + len(nll)) if isinstance(tokens, Text) else None
    kl, agrees = others or (None, None)
    return Perplexity(window, stride, nll, kl, agrees, text)


def fitting_batch(device: torch.device, window: int) -> int:
    """Return the number of windows per batch: 8 on a CPU, and on an accelerator those of 16,384 tokens, or of 65,536
    tokens with 40 GB of memory or more."""
    if device.type == "cpu":
        return 8
    tokens = 1 << 14
    if device.type == "cuda" and torch.cuda.get_device_properties(device).total_memory >= 40e9:
        tokens <<= 2
    return max(1, tokens // window)


def _batches(ids: Tensor, window: int, stride: int, batch_size: int, limit: int | None, tail: bool) -> list[Tensor]:
    windows = ids.unfold(0, window, stride) if len(ids) >= window else ids.new_empty(0, window)
    batches = [batch for batch in windows[:limit].split(batch_size) if len(batch)]
    rest = ids[len(windows) * stride :]  # starts with the context of its scored tokens, like every window
    if tail and len(rest) > window - stride and (limit is None or limit > len(windows)):
        batches.append(rest[None])
    if not batches:
        raise T2RError(
            f"the text has {len(ids)} tokens, less than one window of {window}: give a longer text or a smaller window"
        )
    return batches


def begun(batch: Tensor, bos: int | None) -> Tensor:
    """Return windows `[rows, time]` with this first token. It is not scored: every window begins with context."""
    if bos is None:
        return batch
    batch = batch.clone()  # windows overlap in memory
    batch[:, 0] = bos
    return batch


def _score(readout: Readout, reference: Readout | None, batch: Tensor, first: int) -> list[Tensor]:
    """Return the nll, and with a teacher also kl and agrees, of the tokens from `first` of each window."""
    rows = min(r.rows_at_once(batch) for r in (readout, reference) if r is not None)
    scored = [_score_rows(readout, reference, some, first) for some in batch.split(rows)]
    # Windows are concatenated in the order of the text.
    return [torch.cat(parts).flatten() for parts in zip(*scored, strict=True)]


def _score_rows(readout: Readout, reference: Readout | None, batch: Tensor, first: int) -> list[Tensor]:
    """Run the body of each model once, and compute logits for slices of positions."""
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
    """Return exp of the 95 % confidence interval of the mean of values in windows of `size`; None for a single window.

    The interval is a normal approximation over windows, not tokens, because tokens of a window have similar difficulty.
    Adjacent windows are not fully independent either, so the interval is slightly too narrow.
    """
    windows = values.double().split(size)
    if len(windows) < 2:
        return None
    mean = values.double().mean().item()
    # Deviations of sums, not of means, so that a shorter last window has the correct weight.
    squares = sum((w.sum().item() - mean * len(w)) ** 2 for w in windows)
    error = math.sqrt(squares * len(windows) / (len(windows) - 1)) / len(values)
    return _exp(mean - 1.96 * error), _exp(mean + 1.96 * error)


def _exp(x: float) -> float:
    """Return exp(x), or infinity if it overflows."""
    try:
        return math.exp(x)
    except OverflowError:
        return math.inf
