"""A tiny model of each family, with random weights, for tests that run for every family.

Weights are larger than in a newly initialized model, so that errors in attention show in the logits.
"""

from __future__ import annotations

import functools
import inspect
import io
import pickle
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.fsmt.modeling_fsmt import SinusoidalPositionalEmbedding

from t2r import architectures as models
from t2r.surgery.adapters import repaired

VOCABULARY, POSITIONS, PAD, EOS = 97, 64, 0, 2

TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": EOS}
DECODER = TOKENS | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
}
SEQ2SEQ = TOKENS | {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": POSITIONS,
    "decoder_start_token_id": EOS,
    "forced_eos_token_id": None,
    "forced_bos_token_id": None,
}
ADAPTIVE_LM = {k: v for k, v in DECODER.items() if k not in ("num_key_value_heads", "max_position_embeddings")} | {
    "cutoffs": [20, 50],
    "adaptive_factor": 2,
    "softmax_dropout": 0.0,
}
GPT2 = TOKENS | {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": POSITIONS}
GPTJ = GPT2 | {"rotary_dim": 4}
GPT_NEOX = {k: v for k, v in DECODER.items() if k != "num_key_value_heads"}
FALCON = GPT_NEOX | {"multi_query": True, "ffn_hidden_size": 48}  # its other layouts: tests/surgery/test_adapters.py
OPT = TOKENS | {
    "hidden_size": 32,
    "ffn_dim": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
    "word_embed_proj_dim": 32,
}

T5 = TOKENS | {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_heads": 4,
    "decoder_start_token_id": EOS,
}
FSMT = SEQ2SEQ | {"src_vocab_size": VOCABULARY, "tgt_vocab_size": VOCABULARY, "num_beams": 1}
GEMMA = DECODER | {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 9}
GEMMA2 = GEMMA | {"attn_logit_softcapping": 2.0}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
GEMMA3 = {
    "text_config": GEMMA | {"sliding_window_pattern": 2},
    "vision_config": VISION | {"image_size": 8, "patch_size": 4},
    "mm_tokens_per_image": 4,
} | {name: value for name, value in TOKENS.items() if name != "vocab_size"}
GRANITE = DECODER | {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 1.5,
}


class Row(NamedTuple):
    model_class: str
    config_class: str
    fields: dict[str, Any]
    seq2seq: bool = False
    dtype: torch.dtype = torch.float64  # in which the base model computes correctly
    call: Mapping[str, Any] = {}  # arguments that the base model needs to compute correctly
    generates: bool = True  # false: the base model does not generate correctly, and is not compared with


FAMILIES = {
    "adaptive_lm": Row("AdaptiveLMForCausalLM", "AdaptiveLMConfig", ADAPTIVE_LM),
    "bart": Row("BartForConditionalGeneration", "BartConfig", SEQ2SEQ, seq2seq=True),
    "blenderbot": Row("BlenderbotForConditionalGeneration", "BlenderbotConfig", SEQ2SEQ, seq2seq=True),
    "blenderbot-small": Row("BlenderbotSmallForConditionalGeneration", "BlenderbotSmallConfig", SEQ2SEQ, seq2seq=True),
    "falcon": Row("FalconForCausalLM", "FalconConfig", FALCON),
    # With a cache, the default, the stock model processes several tokens without a causal mask. Without a cache, it
    # works only in float32. In older versions, positions ignore the cache, so single steps are wrong too.
    "fsmt": Row(
        "FSMTForConditionalGeneration",
        "FSMTConfig",
        FSMT,
        seq2seq=True,
        dtype=torch.float32,
        call={"use_cache": False},
        generates="past_key_values_length" in inspect.signature(SinusoidalPositionalEmbedding.forward).parameters,
    ),
    "gemma": Row("GemmaForCausalLM", "GemmaConfig", DECODER | {"head_dim": 16}),
    # Its softmax is always float32, in which a float64 masked score becomes minus infinity, and padding NaN.
    "gemma2": Row("Gemma2ForCausalLM", "Gemma2Config", GEMMA2, dtype=torch.float32),
    "gemma3": Row("Gemma3ForConditionalGeneration", "Gemma3Config", GEMMA3),
    "gemma3_text": Row("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA | {"sliding_window_pattern": 2}),
    "gpt2": Row("GPT2LMHeadModel", "GPT2Config", GPT2),
    "gpt_neox": Row("GPTNeoXForCausalLM", "GPTNeoXConfig", GPT_NEOX),
    # Its scores are always computed in float32.
    "gptj": Row("GPTJForCausalLM", "GPTJConfig", GPTJ, dtype=torch.float32),
    "granite": Row("GraniteForCausalLM", "GraniteConfig", GRANITE),
    "llama": Row("LlamaForCausalLM", "LlamaConfig", DECODER),
    "m2m_100": Row("M2M100ForConditionalGeneration", "M2M100Config", SEQ2SEQ, seq2seq=True),
    "marian": Row("MarianMTModel", "MarianConfig", SEQ2SEQ, seq2seq=True),
    "mbart": Row("MBartForConditionalGeneration", "MBartConfig", SEQ2SEQ, seq2seq=True),
    "mistral": Row("MistralForCausalLM", "MistralConfig", DECODER | {"sliding_window": 5}),
    "mt5": Row("MT5ForConditionalGeneration", "MT5Config", T5, seq2seq=True),
    "olmo": Row("OlmoForCausalLM", "OlmoConfig", DECODER | {"clip_qkv": 2.0}),
    "olmo2": Row("Olmo2ForCausalLM", "Olmo2Config", DECODER),
    "opt": Row("OPTForCausalLM", "OPTConfig", OPT),
    "pegasus": Row("PegasusForConditionalGeneration", "PegasusConfig", SEQ2SEQ, seq2seq=True),
    "phi": Row("PhiForCausalLM", "PhiConfig", DECODER),
    "phi3": Row("Phi3ForCausalLM", "Phi3Config", DECODER | {"sliding_window": 5}),
    "plbart": Row("PLBartForConditionalGeneration", "PLBartConfig", SEQ2SEQ, seq2seq=True),
    "qwen2": Row("Qwen2ForCausalLM", "Qwen2Config", DECODER),
    "qwen3": Row("Qwen3ForCausalLM", "Qwen3Config", DECODER | {"head_dim": 8}),
    "stablelm": Row("StableLmForCausalLM", "StableLmConfig", DECODER),
    "t5": Row("T5ForConditionalGeneration", "T5Config", T5, seq2seq=True),
    "umt5": Row("UMT5ForConditionalGeneration", "UMT5Config", T5, seq2seq=True),
}
DIFFERENT = ("adaptive_lm", "falcon", "gemma2", "gpt2", "llama", "marian", "qwen3", "t5")
"""Families that differ most. Tests of several seconds run on these, and on the others with the slow tests."""


@functools.cache
def _built(model_type: str, dtype: torch.dtype, seed: int, layers: int | None) -> Callable[[], PreTrainedModel]:
    """Build a model, and return a function that copies it."""
    model_class, config_class, fields = FAMILIES[model_type][:3]
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    no_dropout |= {
        "layerdrop": 0.0,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "hidden_dropout": 0.0,
        "dropout_rate": 0.0,
    }
    known = named(config_class)()
    fields = fields | {name: value for name, value in no_dropout.items() if hasattr(known, name)}
    if layers is not None:
        fields |= dict.fromkeys(LAYERS & fields.keys(), layers)
    with torch.random.fork_rng([]), torch.no_grad():  # a test must not depend on whether it is the first
        torch.manual_seed(seed)
        model = named(model_class)(named(config_class)(**fields))
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "position" not in name:
                parameter.mul_(8 if parameter.std() < 0.05 else 1)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
    return copier(repaired(model.to(dtype).eval()))


LAYERS = {"num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"}
"""Numbers of layers in configurations."""


def copier(model: PreTrainedModel) -> Callable[[], PreTrainedModel]:
    """Return a function that copies a model like `copy.deepcopy`, several times as fast."""
    file, kept, places = io.BytesIO(), [], {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, item: Any) -> int | None:
            if not isinstance(item, torch.Tensor | FunctionType):
                return None
            if id(item) not in places:
                places[id(item)] = len(kept)
                kept.append(item)
            return places[id(item)]

    class Unpickler(pickle.Unpickler):
        def __init__(self) -> None:
            super().__init__(io.BytesIO(file.getvalue()))
            self.made: dict[int, Any] = {}  # tied weights stay tied

        def persistent_load(self, index: int) -> Any:
            if index not in self.made:
                item = kept[index]
                if isinstance(item, torch.Tensor):
                    new = item.detach().clone()
                    parameter = isinstance(item, torch.nn.Parameter)
                    item = torch.nn.Parameter(new, item.requires_grad) if parameter else new
                self.made[index] = item
            return self.made[index]

    Pickler(file).dump(model)
    return lambda: Unpickler().load()


def named(name: str) -> Any:
    """Return a class of transformers or t2r by name."""
    return getattr(transformers, name, None) or getattr(models, name)


def tiny(
    model_type: str, dtype: torch.dtype = torch.float64, seed: int = 0, layers: int | None = None
) -> PreTrainedModel:
    """Return a new copy in evaluation mode. `layers` changes their number, of the encoder and of the decoder."""
    return _built(model_type, dtype, seed, layers)()


def is_seq2seq(model_type: str) -> bool:
    return FAMILIES[model_type].seq2seq


def batch(model_type: str, *, padding: str | None = "left", size: int = 3, length: int = 9, seed: int = 0) -> dict:
    """Return inputs of different lengths: padded prompts, or padded sources with decoder prefixes."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (size, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, size):
        cut = slice(0, 2 * row) if padding == "left" else slice(length - 2 * row, length)
        if padding is not None:
            mask[row, cut] = 0
    ids[mask == 0] = PAD
    inputs = {"input_ids": ids, "attention_mask": mask}
    if is_seq2seq(model_type):
        inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (size, length), generator=generator)
        inputs["decoder_input_ids"][:, 0] = EOS
    return inputs


def real_positions(inputs: dict) -> torch.Tensor:
    """Return a mask of the positions whose logits are meaningful."""
    if "decoder_input_ids" in inputs:
        return torch.ones_like(inputs["decoder_input_ids"], dtype=torch.bool)
    return inputs["attention_mask"].bool()


def some_slow() -> list[Any]:
    """Return all families as parameters of a test. Those that are not among the most different ones are slow."""
    return [pytest.param(f, marks=() if f in DIFFERENT else pytest.mark.slow) for f in FAMILIES]
