"""A tiny translation model that has learned a little, its tokenizer, and parallel text of made-up words."""

import copy
import functools
import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerFast

from families import EOS, PAD, SEQ2SEQ

WORDS = 12
"""w3 to w14; the translation of each is the next one."""
VOCABULARY = 3 + WORDS


def make_tokenizer():
    words = {"<pad>": PAD, "<unk>": 1, "</s>": EOS} | {f"w{i}": i for i in range(3, VOCABULARY)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", EOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token="</s>", model_max_length=64
    )


def make_model():
    return copy.deepcopy(trained())


@functools.cache
def trained(steps=160):
    """What it writes depends on the source, and ends."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "encoder_layers": 1, "decoder_layers": 2, "dropout": 0.0, "init_std": 0.2}
    model = MarianMTModel(MarianConfig(**SEQ2SEQ | sizes))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    random_ = random.Random(0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, (step + 1) / 30) * (1 - step / steps)
        length = random_.randint(1, 6)
        words = torch.tensor([[random_.randrange(WORDS) for _ in range(length)] for _ in range(16)])
        ends = torch.full((16, 1), EOS)
        source, target = (torch.cat([3 + ids, ends], 1) for ids in (words, (words + 1) % WORDS))
        optimizer.zero_grad()
        model(input_ids=source, labels=target, use_cache=False).loss.backward()
        optimizer.step()
    return model.eval()


def sentences(count, seed=0, shortest=1, longest=12):
    generator = random.Random(seed)
    return [
        " ".join(f"w{generator.randrange(3, VOCABULARY)}" for _ in range(generator.randint(shortest, longest)))
        for _ in range(count)
    ]


def translated(line):
    """What a perfect model would write."""
    return " ".join(f"w{3 + (int(word[1:]) - 2) % WORDS}" for word in line.split())


def write_pairs(folder, name, count, seed=0, **options):
    """A file of sources and one of targets."""
    lines = sentences(count, seed, **options)
    paths = folder / f"{name}.src", folder / f"{name}.tgt"
    paths[0].write_text("".join(f"{line}\n" for line in lines))
    paths[1].write_text("".join(f"{translated(line)}\n" for line in lines))
    return tuple(map(str, paths))
