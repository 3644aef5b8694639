"""Merge: fold the feature map and the query scale into the projections, so that q and k are not computed.

W~_q = s W_phi W_q        b~_q = s W_phi b_q + b_phi        (keys: without the scale s)
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from t2r.attention.joint import is_ordinary, refuse_quantized_layers
from t2r.attention.merged import Affine, Mergeable, MergedProjections
from t2r.attention.recurrence import Recurrence, recurrent_sites
from t2r.errors import T2RError
from t2r.feature_maps import AffineMap
from t2r.model.logits import evaluating
from t2r.options.entrance import entrance
from t2r.surgery.adapters import family_of
from t2r.surgery.frozen import freeze

# Allowed difference of logits: the maximum over the vocabulary, averaged over positions, relative to the largest logit.
# Merging is exact in real arithmetic, but rounds differently. The mean over positions is used because in half precision
# a single position whose query features are close to zero consists of rounding error, with or without merging.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
SAMPLE = 24
"""Tokens of each text for which logits are compared."""


@dataclass(frozen=True)
class MergeCost:
    """Multiplications per token to compute the features of queries and keys, summed over all recurrent sites."""

    before: int
    after: int

    @property
    def pays(self) -> bool:
        return self.after < self.before


@entrance()
def merge(model: PreTrainedModel, force: bool = False) -> PreTrainedModel:
    """Fold the feature map of every recurrent site into its projections, in place, and return the model.

    The merged weights are computed in float64. The logits before and after merging are compared, and if they differ,
    the model is restored and T2RError is raised. A merged model generates the same text faster, but cannot be trained.

    Args:
        model: a swapped model.
        force: merge even if the merged model needs more multiplications.
    """
    refuse_quantized_layers(model, "merge")
    sites = mergeable_sites(model)
    cost = merge_cost(model)
    if not cost.pays and not force:
        raise T2RError(
            f"merging would cost more than it saves: {cost.after:,} multiplications per token instead of "
            f"{cost.before:,}, because the feature size is larger than the head size; use --force (force=True) to "
            "merge anyway"
        )
    folded = [fold(site) for site in sites]
    if not all(x.isfinite().all() for pair in folded for part in pair for x in part if x is not None):
        raise T2RError("the merged weights are not finite; the model is unchanged")

    expected = sample_logits(model)
    before = [(part, contents(part)) for site in sites for part in (site, site.feature_map)]
    try:
        for site, (q, k) in zip(sites, folded, strict=True):
            replace(site, q, k)
        error = difference(sample_logits(model), expected)
        if not error <= TOLERANCE[model.dtype]:
            raise T2RError(
                f"the merged model's logits differ by {error:.1e} (allowed in {model.dtype}: "
                f"{TOLERANCE[model.dtype]:.0e}); the model is unchanged"
            )
    except BaseException:
        for part, held in before:
            vars(part).update(held)
        raise
    freeze(model)
    model.eval()
    swapped: Any = model
    config = copy.deepcopy(swapped.t2r_config)  # other models may have been built from the same configuration
    config.merged = True
    swapped.take_configuration(config)
    return model


def difference(logits: Tensor, expected: Tensor) -> float:
    """Return the difference of logits as defined for `TOLERANCE`."""
    by_position = (logits - expected).abs().amax(-1)
    return (by_position.mean() / expected.abs().max().clamp_min(1e-6)).item()


def replace(site: Mergeable, q: Affine, k: Affine) -> None:
    """Replace the query and key projections by the merged projections."""
    site.become_merged()
    assert isinstance(site.merged, MergedProjections)
    for linear, part in ((site.merged.q, q), (site.merged.k, k)):
        linear.weight.data.copy_(part.weight)
        linear.bias.data.copy_(torch.zeros_like(linear.bias) if part.bias is None else part.bias)


def contents(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module. Updating its `vars` with them undoes replacements and deletions."""
    return {**vars(module), "_modules": dict(module._modules)}


def mergeable_sites(model: PreTrainedModel) -> list[Mergeable]:
    """Return the sites to merge. Raises T2RError if the model cannot be merged."""
    sites: list[Recurrence] = recurrent_sites(model)
    if not sites:
        raise T2RError("this model has no recurrent attention: swap it first")
    family = family_of(model)
    found = []
    for site in sites:
        if not isinstance(site.feature_map, AffineMap):
            raise T2RError(
                f"the {site.feature_map.name!r} map cannot be merged: only affine maps followed by an activation "
                "(t2r, hedgehog) can be merged into the projections"
            )
        assert isinstance(site, Mergeable)
        if site.window is not None:
            raise T2RError("this model has windows, which need queries and keys: it cannot be merged")
        if site.merged is not None:
            raise T2RError("this model is already merged")
        if site.merge_obstacle is not None:
            raise T2RError(f"{family.model_type} cannot be merged: {site.merge_obstacle}")
        if (part := adapted_part(site)) is not None:
            raise T2RError(
                f"its projection {part} has an adapter, or weights of another kind: merge adapters first "
                "(model = model.merge_and_unload())"
            )
        found.append(site)
    return found


def adapted_part(site: Mergeable) -> str | None:
    """Return the name of a projection with other weights than its own, such as those of an adapter."""
    for name, part in site.named_children():
        weight = getattr(part, "weight", None)
        projects = isinstance(weight, Tensor) and weight.dim() == 2 and not isinstance(part, nn.Embedding)
        if projects and not (isinstance(part, nn.Linear | Conv1D) and is_ordinary(weight)):
            return name
    return None


def fold(site: Mergeable) -> tuple[Affine, Affine]:
    """Return the merged weights and biases of queries and keys, in float64."""
    feature_map = site.feature_map
    assert isinstance(feature_map, AffineMap)
    q, k = site.query_key_projections()
    return (
        fold_one(Affine(*feature_map.affine_q()), q, site.scaling),
        fold_one(Affine(*feature_map.affine_k()), k, 1.0),
    )


@torch.no_grad()
def fold_one(outer: Affine, inner: Affine, scale: float) -> Affine:
    """Return the affine map outer(scale * inner(x)).

    The weight of `outer` is `[heads, rows, head_dim]`, that of `inner` is `[heads * head_dim, hidden]`. Computed on the
    CPU, because not every accelerator supports float64."""
    outer, inner = exactly(outer), exactly(inner)
    weight = outer.weight
    heads, _, head_dim = weight.shape
    projection = inner.weight.unflatten(0, (-1, head_dim))
    projection = projection.repeat_interleave(heads // projection.shape[0], dim=0)  # one key map per query head
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
    """Return the cost of computing the features before and after merging."""
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


def sample_logits(model: PreTrainedModel) -> Tensor:
    """Return the logits of a few random tokens."""
    generator = torch.Generator().manual_seed(0)
    embeddings: Any = model.get_input_embeddings(), model.get_output_embeddings()  # source and target may differ
    tables = [table.weight for table in embeddings if hasattr(table, "weight")]  # adaptive embeddings have no `weight`
    vocabulary = min((weight.shape[0] for weight in tables), default=model.config.vocab_size)
    length = min(SAMPLE, family_of(model).max_positions(model) or SAMPLE)
    ids = torch.randint(0, vocabulary, (2, length), generator=generator).to(model.device)
    inputs = {"input_ids": ids} | ({"decoder_input_ids": ids.flip(1)} if model.config.is_encoder_decoder else {})
    with evaluating(model):
        logits: Tensor = model(**inputs, use_cache=False).logits.cpu().double()
    return logits
