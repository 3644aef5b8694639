"""Swapped models for tests of the engine, and what `generate` does with them."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import t2r
from families import PAD, VOCABULARY, batch, is_seq2seq, tiny

RECIPE = {
    "rotary": False,
    "decay": True,
    "activation": "softmax",
    "init": "identity",
    "key_weights": True,
    "shared": False,
    "grouped": False,
}
CASES = {
    "gpt2": ("gpt2", {}),
    "gpt2 kept": ("gpt2", {"softmax_layers": [0]}),
    "gpt2 signed": ("gpt2", {"feature_map": "rfa"}),
    "opt": ("opt", {}),
    "adaptive_lm": ("adaptive_lm", {}),
    "llama": ("llama", {}),
    "llama recipe": ("llama", RECIPE),
    "llama recipe kept": ("llama", RECIPE | {"softmax_layers": [1]}),
    "qwen3": ("qwen3", {"rotary": False}),
    "gemma3": ("gemma3", {}),
    "marian": ("marian", {}),
    "marian kept": ("marian", {"softmax_layers": [0]}),
    "bart causal": ("bart", {"recurrent": "causal"}),
    "marian cross": ("marian", {"recurrent": "cross"}),
    "bart": ("bart", {}),
    "t5": ("t5", {}),
}


def swapped(case, dtype=torch.float64, merged=False):
    model_type, options = CASES[case]
    model = t2r.swap(tiny(model_type, dtype), **({"feature_size": 8, "recurrent": "both"} | options)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    return t2r.merge(model, force=True) if merged else model


def inputs(case):
    """Return padded prompts of different lengths."""
    model_type = CASES[case][0]
    given = batch(model_type, padding="right" if is_seq2seq(model_type) else "left")
    return {name: x for name, x in given.items() if not name.startswith("decoder")}


def prompts(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (1, n), generator=generator) for n in lengths]


def alone(model, prompt, **options):
    """Return the tokens that `generate` adds to one prompt."""
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    return out[0, 1 if model.config.is_encoder_decoder else prompt.shape[1] :].tolist()


def words():
    """Return a tokenizer whose tokens are the letters of the alphabet."""
    backend = Tokenizer(models.WordLevel({chr(33 + i): i for i in range(VOCABULARY - 3)}, unk_token="!"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="!")
