"""Words of several languages, and a small tokenizer trained on them."""

import random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

EOS = "<eos>"
CHAT = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
SENTENCE = "the cat sat on a mat; it's 1984, and naïve dogs don't übersetzen. Ça va? 東京 «так» 🙂"
WORDS = SENTENCE.split(" ")
# Splitting as in Llama 3 and Qwen: a run of newlines is one word, while GPT-2 separates the last newline.
LLAMA3 = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
SPLITS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama3": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(LLAMA3, "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    ),
    # Adds a space before the first word of a text, and keeps newlines inside words.
    "metaspace": pre_tokenizers.Metaspace(prepend_scheme="first"),
}


def words(count: int, seed: int = 0, ends: tuple[str, ...] = (" ", " ", " ", " ", "\n", "\n\n", "\n ")) -> str:
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) + rng.choice(ends) for _ in range(count))


def train(split: str = "gpt2", **special: str) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = SPLITS[split]
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if split != "metaspace" else []
    marks = ["<unk>", EOS, "<|user|>", "<|assistant|>", "<end>"]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=marks, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([words(3000)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
