"""Tiny models of every kind that vLLM serves, with random weights, and what `generate()` says to ten prompts.

python kinds.py FOLDER [KIND ...]      # writes FOLDER/KIND, with the answers in answers.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    OlmoConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    StableLmConfig,
)

import t2r

LENGTHS = (1, 2, 3, 7, 16, 33, 64, 129, 300, 500)
"""Tokens of the prompts."""
NEW_TOKENS = 24
VOCABULARY = 512

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA, QWEN2, QWEN3 = LlamaConfig(**SIZES), Qwen2Config(**SIZES), Qwen3Config(**SIZES)
GEMMA: dict[str, Any] = SIZES | {"sliding_window": 32, "query_pre_attn_scalar": 32, "tie_word_embeddings": False}
MISTRAL = MistralConfig(**SIZES, sliding_window=32)
GEMMA2 = Gemma2Config(**GEMMA)
GEMMA3 = Gemma3TextConfig(**GEMMA)
PHI3 = Phi3Config(**SIZES)
NEOX = GPTNeoXConfig(**{name: size for name, size in SIZES.items() if name != "num_key_value_heads"})
HYBRID = {"softmax_layers": [1, 3]}


def plan(windows: list[list[int]], states: list[list[bool]] | None = None, sinks: int = 0) -> dict[str, Any]:
    return {"plan": {"windows": windows, "states": states, "sinks": sinks}}


SLIDING = plan([[32, 32], [0, 0], [48, 48], [0, 0]], [[False, False], [True, True]] * 2)
MIXED = plan([[8, 40], [0, 16], [0, 0], [24, 24]], [[True, False], [True, True], [True, True], [False, True]], sinks=2)

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "llama-hybrid": (LLAMA, HYBRID),
    "qwen3": (QWEN3, {}),
    "qwen3-hybrid": (QWEN3, HYBRID),
    # The other options of a swap
    "decay": (LLAMA, {"decay": True}),
    "key-weights": (LLAMA, {"feature_map": "hedgehog", "key_weights": True, "shared": False}),
    "ungrouped": (QWEN2, {"grouped": False, "activation": "tanh"}),
    "elu": (LLAMA, {"feature_map": "elu"}),
    "rfa": (LLAMA, {"feature_map": "rfa", "softmax_every": 4}),
    "performer": (LLAMA, {"feature_map": "performer"}),
    "unrotated": (QWEN3, {"rotary": False, "softmax_layers": [0]}),
    "merged": (QWEN2, {"rotary": False, "feature_size": 16, "key_weights": True}),
    "merged-decay": (LLAMA, {"rotary": False, "feature_size": 16, "decay": True, "softmax_layers": [2]}),
    # Memory plans
    "plan-sliding": (LLAMA, SLIDING),
    "plan-mixed": (QWEN3, MIXED | {"feature_map": "hedgehog", "key_weights": True, "shared": False, "decay": True}),
    "plan-gemma2": (GEMMA2, MIXED),
    # Other families, whose softmax layers have sliding windows, bounds of scores, or fused projections
    "mistral-hybrid": (MISTRAL, HYBRID),
    "gemma2-hybrid": (GEMMA2, {"softmax_layers": [0, 1]}),
    "gemma3-hybrid": (GEMMA3, {"softmax_layers": [0, 1]}),
    "phi3-hybrid": (PHI3, HYBRID),
    "gemma": (GemmaConfig(**SIZES), HYBRID),
    "granite": (GraniteConfig(**SIZES, attention_multiplier=0.2), HYBRID),
    "olmo": (OlmoConfig(**SIZES), HYBRID),
    "olmo2": (Olmo2Config(**SIZES), HYBRID),
    "phi": (PhiConfig(**SIZES), HYBRID),
    "stablelm": (StableLmConfig(**SIZES), HYBRID),
    "gpt-neox": (
        GPTNeoXConfig(**{name: size for name, size in SIZES.items() if name != "num_key_value_heads"}),
        HYBRID,
    ),
}
"""The configuration of the base model, and the options of the swap."""


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def words(prompt: list[int]) -> str:
    return " ".join(f"w{token}" for token in prompt)


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer that knows `words`."""
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    names = [*special.values(), *(f"w{token}" for token in range(len(special), VOCABULARY))]
    made = Tokenizer(WordLevel({name: token for token, name in enumerate(names)}, unk_token="<pad>"))
    made.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(folder)


def make(kind: str) -> Any:
    """Return a swapped model whose maps are no longer as they were initialized."""
    config, options = KINDS[kind]
    torch.manual_seed(0)
    model = t2r.swap(AutoModelForCausalLM.from_config(config).eval(), **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "feature_map" in name or "norm" in name or "bias" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return t2r.merge(model) if kind.startswith("merged") else model


@torch.no_grad()
def answer(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=NEW_TOKENS,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def main(folder: Path, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    for kind in kinds or list(KINDS):
        model = make(kind)
        model.save_pretrained(folder / kind)
        save_tokenizer(folder / kind)
        saved = AutoModelForCausalLM.from_pretrained(folder / kind).eval()
        answers = [answer(saved, prompt) for prompt in prompts()]
        (folder / kind / "answers.json").write_text(json.dumps(answers))
        print(f"{kind}: {len({token for tokens in answers for token in tokens})} different tokens", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
