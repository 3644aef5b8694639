"""Tiny models of every kind that vLLM serves, with random weights, and what `generate()` says to ten prompts.

python kinds.py FOLDER [KIND ...]      # writes FOLDER/KIND, with the answers in answers.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

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
LLAMA, QWEN3 = LlamaConfig(**SIZES), Qwen3Config(**SIZES)
HYBRID = {"softmax_layers": [1, 3]}

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "llama-hybrid": (LLAMA, HYBRID),
    "qwen3": (QWEN3, {}),
    "qwen3-hybrid": (QWEN3, HYBRID),
}
"""The configuration of the base model, and the options of the swap."""


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def make(kind: str) -> Any:
    """Return a swapped model whose maps are no longer as they were initialized."""
    config, options = KINDS[kind]
    torch.manual_seed(0)
    model = t2r.swap(AutoModelForCausalLM.from_config(config).eval(), **options)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "feature_map" in name or "norm" in name or "bias" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


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
        saved = AutoModelForCausalLM.from_pretrained(folder / kind).eval()
        answers = [answer(saved, prompt) for prompt in prompts()]
        (folder / kind / "answers.json").write_text(json.dumps(answers))
        print(f"{kind}: {len({token for tokens in answers for token in tokens})} different tokens", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
