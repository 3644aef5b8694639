"""Tiny language models with a tokenizer, their texts, and short conversions of them."""

import random
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from t2r.pipelines.convert import convert

EOS, BLOCK = "<eos>", 16
CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "dogs", "ran", "to", "it", "in", "rain", "or", "sun"]
SHORT = (
    f"block_size={BLOCK}",
    f"batch_tokens={4 * BLOCK}",
    "transfer.steps=4",
    "distill.steps=4",
    "warmup_steps=0",
    "learning_rate=1e-3",
)


def words(count, seed=0):
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))


def make_tokenizer():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    marks = [EOS, "<user>", "<assistant>", "<end>"]
    trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=marks, show_progress=False)
    backend.train_from_iterator([words(500)], trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, pad_token=EOS)
    made.chat_template = CHAT
    return made


def make_model(model_type):
    torch.manual_seed(1)
    if model_type == "gpt2":  # with dropout, so that random states matter
        config = GPT2Config(
            vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=0, bos_token_id=0
        )
        return GPT2LMHeadModel(config)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=97, num_key_value_heads=2, max_position_embeddings=64, eos_token_id=0, bos_token_id=0, **sizes
    )
    return LlamaForCausalLM(config)


def make_world(folder):
    """Save models with tokenizers, and texts."""
    tokenizer = make_tokenizer()
    for model_type in ("gpt2", "llama"):
        make_model(model_type).save_pretrained(folder / model_type)
        tokenizer.save_pretrained(folder / model_type)
    (folder / "train.txt").write_text(words(1200))
    (folder / "valid.txt").write_text(words(300, seed=1))
    return folder


def run(world, out, model="gpt2", **options):
    defaults = {
        "train": str(world / "train.txt"),
        "overrides": SHORT,
        "device": "cpu",
        "progress": False,
    }
    source = str(world / model) if isinstance(model, str) else model
    return convert(source, str(out), **(defaults | options))


def weights(folder):
    return load_file(Path(folder) / "model.safetensors")


def assert_same(one, other):
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys()
    for name, x in ours.items():
        assert torch.equal(x, theirs[name]), (name, (x - theirs[name]).abs().max())
