"""Conversion of fairseq's translation transformer (Vaswani et al., post-norm) to FSMT of transformers."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

from transformers import FSMTConfig, FSMTForConditionalGeneration

from t2r.architectures.fairseq.checkpoint import Checkpoint, fill
from t2r.architectures.fairseq.dictionary import SPECIAL
from t2r.errors import T2RError

logger = logging.getLogger(__name__)

UNKNOWN_TO_FSMT = (
    "encoder_normalize_before",
    "decoder_normalize_before",
    "encoder_learned_pos",
    "decoder_learned_pos",
    "no_token_positional_embeddings",
    "layernorm_embedding",
    "adaptive_input",
    "adaptive_softmax_cutoff",
    "cross_self_attention",
    "no_cross_attention",
    "encoder_layers_to_keep",
    "decoder_layers_to_keep",
)
IGNORED = tuple(
    f"{part}.{name}"
    for part in ("encoder", "decoder")
    for name in ("version", "embed_positions._float_tensor", "embed_positions.weights")
)


def translation_model(checkpoint: Checkpoint) -> FSMTForConditionalGeneration:
    """Convert a checkpoint to an FSMT model. Raises T2RError if FSMT does not support its settings."""
    checkpoint.refuse(UNKNOWN_TO_FSMT, "FSMT, the model of transformers for these checkpoints,")
    path, settings, tensors = checkpoint
    layers = {part: checkpoint.layers(part) for part in ("encoder", "decoder")}
    source, target = (tensors.take(f"{part}.embed_tokens.weight") for part in ("encoder", "decoder"))
    if source.shape[1] != target.shape[1]:
        raise T2RError(
            f"{path} was trained with encoder_embed_dim={source.shape[1]} and decoder_embed_dim={target.shape[1]}: "
            "FSMT requires the same size for both"
        )
    tied = bool(settings.get("share_all_embeddings"))
    if tied and (source.shape != target.shape or not source.equal(target)):
        raise T2RError(f"{path} sets share_all_embeddings, but the embeddings of encoder and decoder differ")
    if tied or settings.get("share_decoder_input_output_embed"):
        out = target
        for name in ("decoder.output_projection.weight", "decoder.embed_out"):
            tensors.take_equal(name, target, "shared decoder embeddings")
    else:
        out = tensors.take(
            "decoder.embed_out" if "decoder.embed_out" in tensors else "decoder.output_projection.weight"
        )

    weights = {"encoder.embed_tokens.weight": source, "decoder.embed_tokens.weight": target}
    weights["decoder.output_projection.weight"] = out
    for part, attentions in (("encoder", ("self_attn",)), ("decoder", ("self_attn", "encoder_attn"))):
        for layer in range(layers[part]):
            weights |= tensors.take_layer(f"{part}.layers.{layer}", *attentions)
    tensors.finish(*IGNORED)

    sides: dict[str, Any] = {}
    for part in layers:
        sides[f"{part}_layers"] = layers[part]
        sides[f"{part}_ffn_dim"] = weights[f"{part}.layers.0.fc1.weight"].shape[0]
        sides[f"{part}_attention_heads"] = checkpoint.whole(f"{part}_attention_heads")
        if source.shape[1] % sides[f"{part}_attention_heads"]:
            raise T2RError(
                f"{path} does not match its settings: its hidden size is not a multiple of {part}_attention_heads"
            )
        sides[f"{part}_layerdrop"] = checkpoint.number(f"{part}_layerdrop")
    config = FSMTConfig(
        langs=languages(checkpoint),
        src_vocab_size=source.shape[0],
        tgt_vocab_size=target.shape[0],
        d_model=source.shape[1],
        activation_function=checkpoint.activation(),
        dropout=checkpoint.number("dropout"),
        attention_dropout=checkpoint.number("attention_dropout"),
        activation_dropout=checkpoint.activation_dropout(),
        max_position_embeddings=max(checkpoint.whole(f"max_{side}_positions", 1024) for side in ("source", "target")),
        scale_embedding=not settings.get("no_scale_embedding"),
        tie_word_embeddings=tied,
        **sides,
    )
    model = FSMTForConditionalGeneration(config).to(tensors.dtype)  # type: ignore[arg-type]
    fill(model, {f"model.{name}": tensor for name, tensor in weights.items()}, path)
    if out is target and not tied:
        logger.warning(
            "%s shares the decoder embeddings with the output; FSMT ties all of its embeddings or none, so the "
            "imported model has two separate tensors",
            path,
        )
    return model.eval()


def languages(checkpoint: Checkpoint) -> list[str]:
    return [str(checkpoint.settings.get(f"{side}_lang") or side) for side in ("source", "target")]


# --- Tokens -------------------------------------------------------------------------------------------------


def save_tokenizer(folder: Path, langs: list[str], source: list[str], target: list[str], codes: str) -> None:
    """Write the files of FSMTTokenizer directly, because the tokenizer itself requires sacremoses."""
    for name, words in (("vocab-src.json", source), ("vocab-tgt.json", target)):
        numbers = {subword(word): number for number, word in enumerate(words)}
        (folder / name).write_text(json.dumps(numbers, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    (folder / "merges.txt").write_text("".join(f"{pair}\n" for pair in read_codes(codes)), encoding="utf-8")
    settings = {"tokenizer_class": "FSMTTokenizer", "langs": langs, "do_lower_case": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def subword(word: str) -> str:
    """Convert a subword. fairseq marks pieces within a word (`walk@@ ing`), FSMT marks the last (`walk ing</w>`)."""
    if word in SPECIAL:
        return word
    return word.removesuffix("@@") if word.endswith("@@") else word + "</w>"


def read_codes(path: str) -> list[str]:
    """Read the BPE merges of subword-nmt or fastBPE, in order. Each line has two pieces and, for fastBPE, a count.

    Raises T2RError if the file is not a list of merges."""
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise T2RError(f"{path} cannot be read as BPE codes: {error}") from error
    pairs: dict[str, None] = {}
    for number, line in enumerate(lines, 1):
        pieces = line.rstrip("\r").split(" ")
        if (number == 1 and line.startswith("#version")) or pieces == [""]:
            continue
        if not re.fullmatch(r"\S+ \S+( \d+)?", " ".join(pieces)):
            raise T2RError(f"{path}, line {number}: expected two subwords to merge; got {line!r}")
        if pieces[1] == "</w>":
            raise T2RError(
                f"{path} is from subword-nmt 0.1, which is not supported, because the end of a word is a separate piece"
            )
        pairs.setdefault(" ".join(pieces[:2]))
    return list(pairs)
