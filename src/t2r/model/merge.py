"""Merge: fold the feature map and the query scale into the projections, exactly, so that q and k are never formed.

W~_q = s W_phi W_q        b~_q = s W_phi b_q + b_phi        (keys: the same without the scale s)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from t2r.attention.merged import Affine, Mergeable, MergedProjections
from t2r.attention.recurrence import Recurrence, recurrent_sites
from t2r.errors import T2RError
from t2r.feature_maps import AffineMap
from t2r.surgery.adapters import family_of

# The fold is exact in real numbers; in a dtype it rounds the products once where the model rounded q and k.
# The largest difference of a position's logits relative to the largest logit, on average over positions: where the
# features of a query nearly vanish, one position in half precision is all rounding, before a merge as after it.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class MergeCost:
    """Multiplications per token that make the features of queries and keys, over all recurrent sites."""

    before: int
    after: int

    @property
    def pays(self) -> bool:
        return self.after < self.before


def merge(model: PreTrainedModel, force: bool = False) -> PreTrainedModel:
    """Fold every recurrent site's map into its projections, in place, and return the model.

    Everything is computed in float64 and checked before anything changes; then the logits are compared, and on a
    difference the model is given back as it was. A merged model generates as before, faster; it no longer trains.
    """
    sites = mergeable_sites(model)
    cost = merge_cost(model)
    if not cost.pays and not force:
        raise T2RError(
            f"merging would cost more than it saves: {cost.after:,} multiplications per token instead of "
            f"{cost.before:,}, because the features are larger than the heads; force it if you must"
        )
    folded = [fold(site) for site in sites]
    if not all(x.isfinite().all() for pair in folded for part in pair for x in part if x is not None):
        raise T2RError("the folded weights are not finite: the model is left as it was")

    expected = sample_logits(model)
    before = [(part, contents(part)) for site in sites for part in (site, site.feature_map)]
    try:
        for site, (q, k) in zip(sites, folded, strict=True):
            replace(site, q, k)
        error = difference(sample_logits(model), expected)
        if not error <= TOLERANCE[model.dtype]:
            raise T2RError(
                f"the merged model's logits differ by {error:.1e} (allowed in {model.dtype}: "
                f"{TOLERANCE[model.dtype]:.0e}); the model is left as it was"
            )
    except BaseException:
        for part, held in before:
            vars(part).update(held)
        raise
    model.eval()
    swapped: Any = model
    swapped.t2r_config.merged = True
    return model


def difference(logits: Tensor, expected: Tensor) -> float:
    """How far apart two models are, in the measure of `TOLERANCE`."""
    by_position = (logits - expected).abs().amax(-1)
    return (by_position.mean() / expected.abs().max().clamp_min(1e-6)).item()


def replace(site: Mergeable, q: Affine, k: Affine) -> None:
    """Put the folded projections in place of those of queries and keys."""
    site.become_merged()
    assert isinstance(site.merged, MergedProjections)
    for linear, part in ((site.merged.q, q), (site.merged.k, k)):
        linear.weight.data.copy_(part.weight)
        linear.bias.data.copy_(torch.zeros_like(linear.bias) if part.bias is None else part.bias)


def contents(module: nn.Module) -> dict[str, Any]:
    """All that a module is; to `update` its `vars` with, later, undoes what has been replaced or deleted."""
    return {**vars(module), "_modules": dict(module._modules)}


def mergeable_sites(model: PreTrainedModel) -> list[Mergeable]:
    """The sites to merge, or the reason why they cannot be."""
    sites: list[Recurrence] = recurrent_sites(model)
    if not sites:
        raise T2RError("this model has no recurrent attention: swap it first")
    family = family_of(model)
    found = []
    for site in sites:
        if not isinstance(site.feature_map, AffineMap):
            raise T2RError(
                f"the {site.feature_map.name!r} map cannot be merged: only an affine map followed by a function of its "
                "outputs (t2r, hedgehog) folds into the projections"
            )
        assert isinstance(site, Mergeable)
        if site.merged is not None:
            raise T2RError("this model is merged already")
        if site.merge_obstacle is not None:
            raise T2RError(f"{family.model_type} cannot be merged: {site.merge_obstacle}")
        found.append(site)
    return found


def fold(site: Mergeable) -> tuple[Affine, Affine]:
    """Merged weights and biases for queries and keys, in float64."""
    feature_map = site.feature_map
    assert isinstance(feature_map, AffineMap)
    q, k = site.query_key_projections()
    return (
        fold_one(Affine(*feature_map.affine_q()), q, site.scaling),
        fold_one(Affine(*feature_map.affine_k()), k, 1.0),
    )


@torch.no_grad()
def fold_one(outer: Affine, inner: Affine, scale: float) -> Affine:
    """outer(scale * inner(x)): per-head weights `[heads, rows, head_dim]` after `[heads * head_dim, hidden]`.

    On the CPU: not every accelerator has float64."""
    outer, inner = exactly(outer), exactly(inner)
    weight = outer.weight
    heads, _, head_dim = weight.shape
    projection = inner.weight.unflatten(0, (-1, head_dim))
    projection = projection.repeat_interleave(heads // projection.shape[0], dim=0)  # un-grouped keys
    merged = scale * weight @ projection
    bias: Tensor | None = None
    if inner.bias is not None:
        own = inner.bias.unflatten(0, (-1, head_dim))
        own = own.repeat_interleave(heads // own.shape[0], dim=0)
        bias = scale * (weight @ own[..., None])[..., 0]
    if outer.bias is not None:
        bias = outer.bias if bias is None else bias + outer.bias
    return Affine(merged.flatten(0, 1), None if bias is None else bias.flatten())


def exactly(part: Affine) -> Affine:
    return Affine(part.weight.cpu().double(), None if part.bias is None else part.bias.cpu().double())


def merge_cost(model: PreTrainedModel) -> MergeCost:
    """What the features cost with and without the fold."""
    before = after = 0
    for site in mergeable_sites(model):
        feature_map = site.feature_map
        assert isinstance(feature_map, AffineMap)
        rows = feature_map.num_heads * feature_map.rows, feature_map.key_heads * feature_map.key_rows
        for projection, own in zip(site.query_key_projections(), rows, strict=True):
            out, hidden = projection.weight.shape
            before += hidden * out + own * feature_map.head_dim
            after += hidden * own
    return MergeCost(before, after)


@torch.no_grad()
def sample_logits(model: PreTrainedModel) -> Tensor:
    """The logits of a few random tokens."""
    generator = torch.Generator().manual_seed(0)
    embeddings: Any = model.get_input_embeddings(), model.get_output_embeddings()  # source and target may differ
    tables = [table.weight for table in embeddings if hasattr(table, "weight")]  # adaptive ones have many
    vocabulary = min((weight.shape[0] for weight in tables), default=model.config.vocab_size)
    ids = torch.randint(0, vocabulary, (2, 24), generator=generator).to(model.device)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {})
    training = model.training
    model.eval()
    logits: Tensor = model(**inputs, use_cache=False).logits.cpu().double()
    if training:
        model.train()
    return logits
