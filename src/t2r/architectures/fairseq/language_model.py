"""Conversion of fairseq's transformer_lm (Baevski and Auli, and its plain form) to the adaptive language model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from t2r.architectures import AdaptiveLMConfig, AdaptiveLMForCausalLM
from t2r.architectures.fairseq.checkpoint import Checkpoint, Tensors, fill
from t2r.errors import T2RError

UNKNOWN = (
    "character_embeddings",
    "decoder_learned_pos",
    "no_token_positional_embeddings",
    "layernorm_embedding",
    "decoder_layers_to_keep",
)
IGNORED = (
    "decoder.version",
    "decoder.embed_positions._float_tensor",
    "decoder.embed_positions.weights",
    "decoder.embed_tokens._float_tensor",
    "decoder.adaptive_softmax.head._float_tensor",
    "decoder.adaptive_softmax.version",
)


def language_model(checkpoint: Checkpoint) -> AdaptiveLMForCausalLM:
    """Convert a checkpoint to an adaptive language model. Raises T2RError if its settings are not supported."""
    checkpoint.refuse(UNKNOWN, "the adaptive language model")
    path, settings, tensors = checkpoint
    if settings.get("decoder_normalize_before") is False:
        raise T2RError(f"{path} normalizes after each sublayer, which the adaptive language model does not support")
    layers = checkpoint.layers("decoder")
    weights: dict[str, Tensor] = {}
    for layer in range(layers):
        weights |= tensors.take_layer(f"decoder.layers.{layer}", "self_attn")
    if not weights:
        raise T2RError(f"{path} has no decoder: it is not a transformer_lm or transformer of fairseq")
    weights = {name.replace("decoder.", "model."): tensor for name, tensor in weights.items()}
    # Determined from the tensors, because fairseq ignores this setting for old checkpoints.
    final_norm = "decoder.layer_norm.weight" in tensors
    if final_norm:
        for part in ("weight", "bias"):
            weights[f"model.final_layer_norm.{part}"] = tensors.take(f"decoder.layer_norm.{part}")

    cutoffs, factor = bands(checkpoint)
    words, ties = (adaptive_words if cutoffs else plain_words)(checkpoint, len(cutoffs))
    weights |= words
    tensors.finish(*IGNORED)
    first = weights["model.embed_tokens.embeddings.0.weight"]
    intermediate_size, hidden_size = weights["model.layers.0.fc1.weight"].shape
    if first.shape[1] != hidden_size:
        raise T2RError(
            f"{path} was trained with decoder_input_dim={first.shape[1]} and decoder_embed_dim={hidden_size}: the "
            "adaptive language model requires the same size for both"
        )
    config = AdaptiveLMConfig(
        vocab_size=sum(words[f"model.embed_tokens.embeddings.{i}.weight"].shape[0] for i in range(len(cutoffs) + 1)),
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=checkpoint.whole("decoder_attention_heads"),
        intermediate_size=intermediate_size,
        activation_function=checkpoint.activation(),
        dropout=checkpoint.number("dropout"),
        attention_dropout=checkpoint.number("attention_dropout"),
        activation_dropout=checkpoint.activation_dropout(),
        layerdrop=checkpoint.number("decoder_layerdrop"),
        cutoffs=cutoffs,
        adaptive_factor=factor,
        softmax_dropout=checkpoint.number("adaptive_softmax_dropout"),
        scale_embedding=not settings.get("no_scale_embedding"),
        final_layer_norm=final_norm,
        bos_token_id=2,  # texts begin with the end token of the previous text
        **ties,
    )
    model = AdaptiveLMForCausalLM(config).to(tensors.dtype)  # type: ignore[arg-type]
    fill(model, weights, path)
    return model.eval()


def bands(checkpoint: Checkpoint) -> tuple[list[int], int]:
    """Return the cutoffs and the adaptive factor. Without cutoffs, embeddings are plain."""
    settings, path = checkpoint.settings, checkpoint.path
    adaptive_input, cutoffs = bool(settings.get("adaptive_input")), checkpoint.wholes("adaptive_softmax_cutoff")
    if adaptive_input != bool(cutoffs):
        raise T2RError(
            f"{path} was trained with adaptive_input={adaptive_input} and adaptive_softmax_cutoff={cutoffs or None}: "
            "the adaptive language model requires both or neither"
        )
    if not adaptive_input:
        return [], 1
    factor = settings.get("adaptive_softmax_factor") or 4
    if checkpoint.wholes("adaptive_input_cutoff") != cutoffs or (settings.get("adaptive_input_factor") or 4) != factor:
        raise T2RError(
            f"{path} was trained with different bands for input and softmax: the adaptive language model requires the "
            "same bands for both"
        )
    if factor != int(factor):
        raise T2RError(f"{path} was trained with adaptive_softmax_factor={factor}: it must be a whole number")
    # The last cutoff may be the size of the vocabulary, in which case no band begins there.
    count = sum(f"decoder.embed_tokens.embeddings.{i}.0.weight" in checkpoint.tensors for i in range(len(cutoffs) + 1))
    if count < 2:
        raise T2RError(
            f"{path} has {count} band of adaptive embeddings: the adaptive language model requires two or more"
        )
    return cutoffs[: count - 1], int(factor)


def plain_words(checkpoint: Checkpoint, _: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Convert plain embeddings and the plain softmax, which may be tied."""
    tensors, tied = checkpoint.tensors, bool(checkpoint.settings.get("share_decoder_input_output_embed"))
    table = tensors.take("decoder.embed_tokens.weight")
    if tied:
        for name in ("decoder.output_projection.weight", "decoder.embed_out"):
            tensors.take_equal(name, table, "share_decoder_input_output_embed")
        out = table
    else:
        out = tensors.take(
            "decoder.embed_out" if "decoder.embed_out" in tensors else "decoder.output_projection.weight"
        )
    weights = {"model.embed_tokens.embeddings.0.weight": table, "lm_head.words.0.weight": out}
    return weights, {"tie_word_embeddings": tied, "tie_adaptive_projections": False}


def adaptive_words(checkpoint: Checkpoint, tails: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Convert the embeddings and projections of each band, and those of the softmax, which may be tied."""
    path, settings, tensors = checkpoint
    if "decoder.adaptive_softmax.version" not in tensors:
        raise T2RError(f"{path} has the adaptive softmax of an early fairseq, which is a different function")
    tie_words = bool(settings.get("tie_adaptive_weights"))
    # An older option has the opposite meaning. Projections are tied only together with the words.
    tie_projections = tie_words and bool(
        settings.get("tie_adaptive_proj") or settings.get("no_tie_adaptive_proj") is False
    )
    embeddings = [tensors.take(f"decoder.embed_tokens.embeddings.{i}.0.weight") for i in range(tails + 1)]
    projections = [tensors.take(f"decoder.embed_tokens.embeddings.{i}.1.weight") for i in range(tails + 1)]
    words, classes = head(tensors, embeddings[0], tie_words)
    weights = {"lm_head.words.0.weight": words, "lm_head.classes.weight": classes}
    for i, (table, projection) in enumerate(zip(embeddings, projections, strict=True)):
        weights[f"model.embed_tokens.embeddings.{i}.weight"] = table
        weights[f"model.embed_tokens.projections.{i}.weight"] = projection
    for i in range(tails):
        name, own, into = f"decoder.adaptive_softmax.tail.{i}", embeddings[i + 1], projections[i + 1]
        if tie_words:
            tensors.take_equal(f"{name}.2.weight", own, "tie_adaptive_weights")
        if tie_projections:
            tensors.take_equal(f"{name}.0.weight", into, "tie_adaptive_proj")
        weights[f"lm_head.words.{i + 1}.weight"] = own if tie_words else tensors.take(f"{name}.2.weight")
        # A tied projection has the layout of the embedding projection. A separate one is a Linear, which is transposed.
        weights[f"lm_head.projections.{i}.weight"] = into if tie_projections else tensors.take(f"{name}.0.weight").t()
    return weights, {"tie_word_embeddings": tie_words, "tie_adaptive_projections": tie_projections}


def head(tensors: Tensors, embeddings: Tensor, tied: bool) -> tuple[Tensor, Tensor]:
    """Return the weights of the head for the words of the first band, and for the classes of the other bands."""
    name = "decoder.adaptive_softmax.head"
    if tied:
        tensors.take_equal(f"{name}.word_proj.weight", embeddings, "tie_adaptive_weights")
        return embeddings, tensors.take(f"{name}.class_proj.weight")
    both = tensors.take(f"{name}.weight")
    return both[: embeddings.shape[0]], both[embeddings.shape[0] :]
