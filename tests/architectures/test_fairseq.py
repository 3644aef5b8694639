"""Import of fairseq checkpoints: test files in its format, and reference implementations of its models.

The references use fairseq's state dictionary, so that they do not depend on the code that they test.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, pad
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

import t2r
from t2r import T2RError, cli
from t2r.architectures.fairseq.checkpoint import read_checkpoint
from t2r.architectures.fairseq.dictionary import read_dictionary
from t2r.pipelines.fairseq import import_fairseq

HIDDEN, FFN, HEADS, LAYERS, WORDS, OTHER_WORDS = 16, 24, 2, 2, 40, 48
PAD, EOS = 1, 2
LM = {
    "arch": "transformer_lm_wiki103",
    "decoder_layers": LAYERS,
    "decoder_attention_heads": HEADS,
    "activation_fn": "relu",
    "dropout": 0.3,
    "attention_dropout": 0.1,
    "activation_dropout": 0.0,
    "relu_dropout": 0.2,
    "decoder_layerdrop": 0.25,
    "adaptive_input": True,
    "adaptive_input_cutoff": "10,20",
    "adaptive_input_factor": 4,
    "adaptive_softmax_cutoff": "10,20",
    "adaptive_softmax_factor": 4.0,
    "adaptive_softmax_dropout": 0.2,
    "tie_adaptive_weights": True,
    "tie_adaptive_proj": True,
    "no_decoder_final_norm": True,
}
MT = {
    "arch": "transformer_vaswani_wmt_en_de_big",
    "source_lang": "en",
    "target_lang": "de",
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "activation_fn": "relu",
    "dropout": 0.3,
    "max_source_positions": 64,
    "max_target_positions": 48,
    "share_all_embeddings": True,
}

# --- The computation ----------------------------------------------------------------------------------------


def embedded(vectors: Tensor, tokens: Tensor) -> Tensor:
    """Return scaled embeddings plus sinusoids. Positions start after the padding index, and padding has none."""
    real = tokens != PAD
    positions = real.cumsum(1) * real + PAD
    half = HIDDEN // 2
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = positions[..., None].float() * frequencies
    waves = torch.cat([angles.sin(), angles.cos()], dim=-1) * real[..., None]
    return vectors * math.sqrt(HIDDEN) + waves.to(vectors)


class Block:
    """A layer, computed from the state dictionary."""

    def __init__(self, state: dict[str, Tensor], prefix: str) -> None:
        self.state, self.prefix = state, prefix

    def linear(self, name: str, x: Tensor) -> Tensor:
        name = f"{self.prefix}.{name}"
        return linear(x, self.state[f"{name}.weight"], self.state[f"{name}.bias"])

    def norm(self, name: str, x: Tensor) -> Tensor:
        name = f"{self.prefix}.{name}"
        return layer_norm(x, (HIDDEN,), self.state[f"{name}.weight"], self.state[f"{name}.bias"])

    def attend(self, name: str, x: Tensor, source: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = (
            self.linear(f"{name}.{side}_proj", y).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for side, y in (("q", x), ("k", source), ("v", source))
        )
        scores = (q @ k.mT / math.sqrt(HIDDEN // HEADS)).masked_fill(hidden[:, None], -math.inf)
        return self.linear(f"{name}.out_proj", (scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def feed(self, x: Tensor) -> Tensor:
        return self.linear("fc2", self.linear("fc1", x).relu())


def hidden_from(queries: Tensor, keys: Tensor, causal: bool) -> Tensor:
    """Return the mask of keys that a query must not attend to: padding and later positions."""
    hidden = (keys == PAD)[:, None].expand(-1, queries.shape[1], -1)
    return hidden | torch.ones_like(hidden[0]).triu(1) if causal else hidden


def translate(state: dict[str, Tensor], source: Tensor, target: Tensor) -> Tensor:
    """Compute the logits of a post-norm transformer."""
    x = embedded(state["encoder.embed_tokens.weight"][source], source) * (source != PAD)[..., None]
    for i in range(LAYERS):
        block = Block(state, f"encoder.layers.{i}")
        x = block.norm("self_attn_layer_norm", x + block.attend("self_attn", x, x, hidden_from(source, source, False)))
        x = block.norm("final_layer_norm", x + block.feed(x))
    y = embedded(state["decoder.embed_tokens.weight"][target], target)
    for i in range(LAYERS):
        block = Block(state, f"decoder.layers.{i}")
        y = block.norm("self_attn_layer_norm", y + block.attend("self_attn", y, y, hidden_from(target, target, True)))
        seen = block.attend("encoder_attn", y, x, hidden_from(target, source, False))
        y = block.norm("encoder_attn_layer_norm", y + seen)
        y = block.norm("final_layer_norm", y + block.feed(y))
    return y @ state["decoder.output_projection.weight"].T


def predict(state: dict[str, Tensor], settings: dict[str, Any], tokens: Tensor) -> Tensor:
    """Compute the log-probabilities of a pre-norm language model, word by word."""
    bounds = [0, 10, 20, WORDS] if settings["adaptive_input"] else [0, WORDS]
    if settings["adaptive_input"]:
        vectors = torch.zeros(*tokens.shape, HIDDEN, dtype=state["decoder.layers.0.fc1.weight"].dtype)
        for at in [(row, i) for row in range(tokens.shape[0]) for i in range(tokens.shape[1])]:
            band = next(b for b in range(3) if tokens[at] < bounds[b + 1])
            name = f"decoder.embed_tokens.embeddings.{band}"
            vectors[at] = state[f"{name}.1.weight"] @ state[f"{name}.0.weight"][tokens[at] - bounds[band]]
    else:
        vectors = state["decoder.embed_tokens.weight"][tokens]
    x = embedded(vectors, tokens)
    for i in range(LAYERS):
        block = Block(state, f"decoder.layers.{i}")
        y = block.norm("self_attn_layer_norm", x)
        x = x + block.attend("self_attn", y, y, hidden_from(tokens, tokens, True))
        x = x + block.feed(block.norm("final_layer_norm", x))
    if "decoder.layer_norm.weight" in state:
        x = Block(state, "decoder").norm("layer_norm", x)
    if not settings["adaptive_input"]:
        return (x @ state["decoder.output_projection.weight"].T).log_softmax(-1)
    softmax = "decoder.adaptive_softmax"
    if settings["tie_adaptive_weights"]:
        head = torch.cat([state[f"{softmax}.head.word_proj.weight"], state[f"{softmax}.head.class_proj.weight"]])
    else:
        head = state[f"{softmax}.head.weight"]
    scores = (x @ head.T).log_softmax(-1)
    parts = [scores[..., :10]]
    for i in range(2):
        project = state[f"{softmax}.tail.{i}.0.weight"]
        tied = settings["tie_adaptive_weights"] and settings["tie_adaptive_proj"]
        words = x @ (project if tied else project.T) @ state[f"{softmax}.tail.{i}.2.weight"].T
        parts.append(words.log_softmax(-1) + scores[..., 10 + i, None])
    return torch.cat(parts, -1)


# --- The files ----------------------------------------------------------------------------------------------


def layer(state: dict[str, Tensor], prefix: str, *attentions: str) -> None:
    for attention in attentions:
        for side in ("q", "k", "v", "out"):
            state[f"{prefix}.{attention}.{side}_proj.weight"] = random(HIDDEN, HIDDEN)
            state[f"{prefix}.{attention}.{side}_proj.bias"] = random(HIDDEN)
    for norm in [*(f"{attention}_layer_norm" for attention in attentions), "final_layer_norm"]:
        state[f"{prefix}.{norm}.weight"], state[f"{prefix}.{norm}.bias"] = 1 + random(HIDDEN), random(HIDDEN)
    for name, shape in (("fc1", (FFN, HIDDEN)), ("fc2", (HIDDEN, FFN))):
        state[f"{prefix}.{name}.weight"], state[f"{prefix}.{name}.bias"] = random(*shape), random(shape[0])


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64) * 0.4


def table(words: int, size: int, padding: bool = True) -> Tensor:
    made = random(words, size)
    if padding:
        made[PAD] = 0
    return made


def lm_state(settings: dict[str, Any]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {"decoder.version": torch.tensor([3.0])}
    embed, softmax = "decoder.embed_tokens", "decoder.adaptive_softmax"
    if settings["adaptive_input"]:
        for i, words in enumerate((10, 10, WORDS - 20)):
            state[f"{embed}.embeddings.{i}.0.weight"] = table(words, HIDDEN // 4**i, i == 0)
            state[f"{embed}.embeddings.{i}.1.weight"] = random(HIDDEN, HIDDEN // 4**i)
        state[f"{embed}._float_tensor"] = torch.zeros(1)
        tied, tied_projections = settings["tie_adaptive_weights"], settings["tie_adaptive_proj"]
        if tied:
            state[f"{softmax}.head.word_proj.weight"] = state[f"{embed}.embeddings.0.0.weight"]
            state[f"{softmax}.head.class_proj.weight"] = random(2, HIDDEN)
            state[f"{softmax}.head._float_tensor"] = torch.zeros(1)
        else:
            state[f"{softmax}.head.weight"] = random(12, HIDDEN)
        for i, words in enumerate((10, WORDS - 20)):
            own, size = f"{embed}.embeddings.{i + 1}", HIDDEN // 4 ** (i + 1)
            state[f"{softmax}.tail.{i}.0.weight"] = (
                state[f"{own}.1.weight"] if tied and tied_projections else random(size, HIDDEN)
            )
            state[f"{softmax}.tail.{i}.2.weight"] = state[f"{own}.0.weight"] if tied else random(words, size)
        state[f"{softmax}.version"] = torch.tensor([1])
    else:
        state[f"{embed}.weight"] = table(WORDS, HIDDEN)
        shared = settings.get("share_decoder_input_output_embed")
        state["decoder.output_projection.weight"] = state[f"{embed}.weight"] if shared else random(WORDS, HIDDEN)
    state["decoder.embed_positions._float_tensor"] = torch.zeros(1)
    for i in range(LAYERS):
        layer(state, f"decoder.layers.{i}", "self_attn")
    if not settings["no_decoder_final_norm"]:
        state["decoder.layer_norm.weight"], state["decoder.layer_norm.bias"] = 1 + random(HIDDEN), random(HIDDEN)
    return state


def mt_state(settings: dict[str, Any]) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for part in ("encoder", "decoder"):
        state[f"{part}.version"] = torch.tensor([3.0])
        state[f"{part}.embed_positions._float_tensor"] = torch.zeros(1)
    source = table(WORDS, HIDDEN)
    target = source if settings["share_all_embeddings"] else table(OTHER_WORDS, HIDDEN)
    shared = settings["share_all_embeddings"] or settings.get("share_decoder_input_output_embed")
    state["encoder.embed_tokens.weight"], state["decoder.embed_tokens.weight"] = source, target
    state["decoder.output_projection.weight"] = target if shared else random(OTHER_WORDS, HIDDEN)
    for i in range(LAYERS):
        layer(state, f"encoder.layers.{i}", "self_attn")
        layer(state, f"decoder.layers.{i}", "self_attn", "encoder_attn")
    return state


@contextmanager
def foreign(*names: str) -> Iterator[list[type]]:
    """Create classes that pickle under these names, as if their packages were installed."""
    before, made = dict(sys.modules), []
    try:
        for full in names:
            module, _, name = full.rpartition(".")
            made.append(type(name, (), {"__module__": module}))
            for package in (module.split(".")[0], module):
                sys.modules.setdefault(package, types.ModuleType(package))
            setattr(sys.modules[module], name, made[-1])
        yield made
    finally:
        for name in set(sys.modules) - set(before):
            del sys.modules[name]


def built(cls: type, **state: Any) -> Any:
    made = cls()
    made.__dict__.update(state)
    return made


def write_args(path: Path, settings: dict[str, Any], state: dict[str, Tensor], *, zipped: bool = True) -> Path:
    """Write a checkpoint as fairseq did until 2020: with args, meter objects, and a numpy loss."""
    with foreign("fairseq.meters.AverageMeter", "fairseq.meters.TimeMeter") as (average, timer):
        content = {
            "args": argparse.Namespace(**settings, data="data-bin/corpus", lr=[0.0005]),
            "model": OrderedDict(state),
            "optimizer_history": [{"criterion_name": "AdaptiveLoss", "num_updates": 3}],
            "extra_state": {
                "train_meters": OrderedDict(loss=built(average, sum=1.5, count=2), wall=built(timer, start=0.0)),
                "val_loss": numpy.float64(3.5),
                "best": numpy.arange(3.0),
            },
            "last_optimizer_state": {"state": {0: {"exp_avg": torch.ones(2)}}, "param_groups": []},
        }
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path


def write_cfg(path: Path, settings: dict[str, Any], state: dict[str, Tensor], *, nodes: bool = True) -> Path:
    """Write a checkpoint as fairseq does since 2020: with sections, as omegaconf containers or plain dictionaries."""
    omegaconf = (
        "omegaconf.dictconfig.DictConfig",
        "omegaconf.listconfig.ListConfig",
        "omegaconf.nodes.AnyNode",
        "omegaconf.base.ContainerMetadata",
        "fairseq.dataclass.configs.CommonConfig",
    )
    with foreign(*omegaconf) as (dictionary, sequence, node, metadata, common):

        def wrap(value: Any, parent: Any = None) -> Any:
            if not nodes:
                return value
            facts = built(metadata, ref_type=Any, object_type=common, key_type=str, resolver_cache=defaultdict(dict))
            if isinstance(value, argparse.Namespace) or not isinstance(value, dict | list):
                return built(node, _metadata=facts, _parent=parent, _val=value)
            made = built(dictionary if isinstance(value, dict) else sequence, _metadata=facts, _parent=parent)
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            made._content = {key: wrap(v, made) for key, v in inner}
            made._content = made._content if isinstance(value, dict) else list(made._content.values())
            return made

        task = {"_name": "translation", "data": "data-bin", "max_target_positions": 48}
        task |= {name: value for name, value in settings.items() if name.endswith("_lang")}
        model = {"_name": settings["arch"], "max_target_positions": "${task.max_target_positions}"}
        model |= {name: value for name, value in settings.items() if name != "arch" and not name.endswith("_lang")}
        legacy = argparse.Namespace(**model) if "encoder_layers" in model else model
        config = wrap({"common": {"seed": 1, "betas": [0.9, 0.98]}, "task": task, "model": legacy})
        torch.save({"cfg": config, "args": None, "model": OrderedDict(state), "extra_state": {}}, path)
    return path


def write_dictionary(path: Path, size: int) -> str:
    words = [f"w{i}" for i in range(size - 4 - 2)] + ["madeupword0000", "madeupword0001"]
    path.write_text("".join(f"{word} {size - i}\n" for i, word in enumerate(words)))
    return str(path)


@pytest.fixture
def dictionary(tmp_path) -> str:
    return write_dictionary(tmp_path / "dict.txt", WORDS)


@pytest.fixture
def run(monkeypatch, capsys):
    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["t2r", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return exit.value.code or 0, *capsys.readouterr()

    return run


def padded(words: int, side: str = "right") -> tuple[Tensor, Tensor]:
    """Return three rows of different lengths that end with the end token, and their mask."""
    tokens = torch.full((3, 9), PAD)
    for row, length in enumerate((9, 6, 4)):
        where = slice(0, length) if side == "right" else slice(9 - length, 9)
        tokens[row, where] = torch.cat([torch.randint(4, words, (length - 1,)), torch.tensor([EOS])])
    return tokens, (tokens != PAD).long()


WRITERS = {
    "args": write_args,
    "args before torch 1.6": lambda *a: write_args(*a, zipped=False),
    "cfg of omegaconf": write_cfg,
    "cfg as plain dictionaries": lambda *a: write_cfg(*a, nodes=False),
}
styles = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)

# --- Language models ----------------------------------------------------------------------------------------


def check_lm(path: Path, settings: dict[str, Any], state: dict[str, Tensor], dictionary: str) -> Any:
    out = path.parent / "model"
    import_fairseq(str(path), str(out), dictionary=dictionary)
    model = AutoModelForCausalLM.from_pretrained(out).eval()
    assert model.dtype == torch.float64
    for side in ("right", "left"):
        tokens, mask = padded(WORDS, side)
        with torch.no_grad():
            got = model(tokens, attention_mask=mask).logits
        real = mask.bool()
        if side == "left":  # in the reference, rows of left padding would be fully masked
            rows = [predict(state, settings, tokens[i : i + 1, 9 - n :])[0] for i, n in enumerate((9, 6, 4))]
            want = torch.stack([pad(row, (0, 0, 9 - row.shape[0], 0)) for row in rows])
        else:
            want = predict(state, settings, tokens)
        torch.testing.assert_close(got[real], want[real], rtol=1e-9, atol=1e-9)
    return model


@styles
def test_the_papers_language_model(tmp_path, dictionary, write):
    state = lm_state(LM)
    model = check_lm(write(tmp_path / "checkpoint_best.pt", LM, state), LM, state, dictionary)
    assert model.config.model_type == "adaptive_lm"
    assert model.lm_head.words[2].weight is model.model.embed_tokens.embeddings[2].weight
    assert model.lm_head.projections[1].weight is model.model.embed_tokens.projections[2].weight
    config = model.config
    assert (config.dropout, config.attention_dropout, config.activation_dropout) == (0.3, 0.1, 0.2)
    assert (config.layerdrop, config.softmax_dropout, config.cutoffs) == (0.25, 0.2, [10, 20])


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_adaptive_proj": False},
        {"tie_adaptive_proj": False, "tie_adaptive_weights": False},
        {"no_decoder_final_norm": False},
        {"adaptive_input": False, "adaptive_softmax_cutoff": None, "adaptive_input_cutoff": None},
        {
            "adaptive_input": False,
            "adaptive_softmax_cutoff": None,
            "adaptive_input_cutoff": None,
            "share_decoder_input_output_embed": True,
        },
    ],
    ids=["projections apart", "all apart", "norm at the end", "plain", "plain and tied"],
)
def test_other_language_models(tmp_path, dictionary, changes):
    settings = LM | changes
    state = lm_state(settings)
    check_lm(write_args(tmp_path / "lm.pt", settings, state), settings, state, dictionary)


def test_an_old_option_has_the_opposite_meaning(tmp_path, dictionary):
    """Before --tie-adaptive-proj there was --no-tie-adaptive-proj."""
    state = lm_state(LM)
    old = {name: value for name, value in LM.items() if name != "tie_adaptive_proj"} | {"no_tie_adaptive_proj": False}
    model = check_lm(write_args(tmp_path / "lm.pt", old, state), LM, state, dictionary)
    assert model.config.tie_adaptive_projections


def test_words_are_read_as_fairseq_numbers_them(tmp_path, dictionary):
    import_fairseq(str(write_args(tmp_path / "lm.pt", LM, lm_state(LM))), str(tmp_path / "out"), dictionary=dictionary)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("w0 w33 never-seen\nw1").input_ids == [4, 37, 3, EOS, 5]
    assert len(tokenizer) == WORDS


# --- Translation --------------------------------------------------------------------------------------------

TIES = {
    "all shared": {"share_all_embeddings": True},
    "decoder shared": {"share_all_embeddings": False, "share_decoder_input_output_embed": True},
    "none shared": {"share_all_embeddings": False},
}


def check_mt(path: Path, state: dict[str, Tensor], *dictionaries: str) -> Any:
    out = path.parent / "model"
    source, target = dictionaries
    import_fairseq(str(path), str(out), dictionary=source, target_dictionary=target)
    tokens, mask = padded(state["encoder.embed_tokens.weight"].shape[0])
    prefix, _ = padded(state["decoder.embed_tokens.weight"].shape[0])
    prefix = torch.cat([torch.full((3, 1), EOS), prefix[:, :-1]], dim=1)
    inputs = {"input_ids": tokens, "attention_mask": mask, "decoder_input_ids": prefix}
    real, want = prefix != PAD, translate(state, tokens, prefix)
    model = AutoModelForSeq2SeqLM.from_pretrained(out, dtype=torch.float32).eval()
    with torch.no_grad():
        got = model(**inputs, use_cache=False).logits[real]
    torch.testing.assert_close(got, want[real].float(), rtol=1e-4, atol=1e-4)
    # The stock forward does not support float64. That of t2r, with the same attention, does.
    model = t2r.swap(AutoModelForSeq2SeqLM.from_pretrained(out).eval(), recurrent="both")
    assert model.dtype == torch.float64
    with torch.no_grad(), t2r.exact_attention(model):
        got = model(**inputs, use_cache=False).logits[real]
    torch.testing.assert_close(got, want[real], rtol=1e-9, atol=1e-9)
    return model


@styles
def test_the_papers_translation_model(tmp_path, dictionary, write):
    state = mt_state(MT)
    model = check_mt(write(tmp_path / "checkpoint.pt", MT, state), state, dictionary, dictionary)
    assert model.config.model_type == "fsmt"
    assert model.config.langs == ["en", "de"]
    assert (model.config.dropout, model.config.max_position_embeddings) == (0.3, 64)
    decoder = model.model.decoder
    assert decoder.output_projection.weight is decoder.embed_tokens.weight
    assert decoder.embed_tokens.weight is model.model.encoder.embed_tokens.weight


@pytest.mark.parametrize("ties", list(TIES)[1:])
def test_two_dictionaries(tmp_path, dictionary, ties, caplog):
    settings = MT | TIES[ties]
    state = mt_state(settings)
    other = write_dictionary(tmp_path / "dict.de.txt", OTHER_WORDS)
    model = check_mt(write_args(tmp_path / "checkpoint.pt", settings, state), state, dictionary, other)
    assert (model.config.src_vocab_size, model.config.tgt_vocab_size) == (WORDS, OTHER_WORDS)
    assert ("ties all of its embeddings or none" in caplog.text) == (ties == "decoder shared")
    assert (tmp_path / "model" / "dict.target.txt").read_text() == Path(other).read_text()


def test_sections_within_the_model(tmp_path, dictionary):
    """transformer_base writes `encoder: {layers: 2}`."""
    state = mt_state(MT)
    nested: dict[str, Any] = {"encoder": {}, "decoder": {}}
    for name, value in MT.items():
        part, _, rest = name.partition("_")
        nested.get(part, nested)[rest if part in nested else name] = value
    torch.save({"cfg": {"task": None, "model": nested}, "model": state}, tmp_path / "checkpoint.pt")
    check_mt(tmp_path / "checkpoint.pt", state, dictionary, dictionary)


def test_old_names_of_tensors(tmp_path, dictionary):
    """Old files have fused projections, numbered norms, and no separate output tensor if it is tied."""
    state, norms = mt_state(MT), {"self_attn": "0", "encoder_attn": "1", "final": "2"}
    old: dict[str, Tensor] = {}
    for name, tensor in state.items():
        stem, _, kind = name.rpartition(".")
        if stem.endswith("q_proj"):
            stem = stem.removesuffix("q_proj")
            old[f"{stem}in_proj_{kind}"] = torch.cat([state[f"{stem}{side}_proj.{kind}"] for side in "qkv"])
        elif stem.endswith("_layer_norm"):
            layer_name, _, norm = stem.removesuffix("_layer_norm").rpartition(".")
            number = "1" if norm == "final" and name.startswith("encoder") else norms[norm]
            old[f"{layer_name}.layer_norms.{number}.{kind}"] = tensor
        elif not stem.endswith(("k_proj", "v_proj")) and "version" not in name and "output_projection" not in name:
            old[name] = tensor
    path = write_args(tmp_path / "checkpoint.pt", MT, old, zipped=False)
    check_mt(path, state, dictionary, dictionary)


def test_half_precision_stays(tmp_path, dictionary):
    state = {name: tensor if "version" in name else tensor.half() for name, tensor in mt_state(MT).items()}
    import_fairseq(str(write_args(tmp_path / "a.pt", MT, state)), str(tmp_path / "out"), dictionary=dictionary)
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").dtype == torch.float16


CODES = "#version: 0.2\nl o\nlo w\ne r</w>\nlow er</w>\nl o\n"


def test_bpe_codes_make_a_tokenizer(tmp_path):
    pytest.importorskip("sacremoses")
    words = ["low@@", "er", "lower", "l@@", "o@@", "w", "n@@", "e@@", "wer", "."]
    (tmp_path / "dict.txt").write_text("".join(f"{word} 1\n" for word in words))
    (tmp_path / "codes").write_text(CODES)
    state = mt_state(MT)
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "decoder.output_projection.weight"):
        state[name] = state["encoder.embed_tokens.weight"][:14]
    path = write_args(tmp_path / "checkpoint.pt", MT, state)
    out = tmp_path / "out"
    import_fairseq(str(path), str(out), dictionary=str(tmp_path / "dict.txt"), bpe_codes=str(tmp_path / "codes"))
    tokenizer = AutoTokenizer.from_pretrained(out)
    number = {word: i + 4 for i, word in enumerate(words)}
    ids = tokenizer("lower new.").input_ids
    assert ids == [number["lower"], number["n@@"], number["e@@"], number["w"], number["."], EOS]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "lower new."


def test_the_files_of_the_tokenizer(tmp_path, dictionary, run):
    """Test the files that can be checked without sacremoses."""
    (tmp_path / "codes").write_text(CODES)
    path = write_args(tmp_path / "checkpoint.pt", MT, mt_state(MT))
    code, _, stderr = run("import", path, tmp_path / "o", "--dict", dictionary, "--bpe-codes", tmp_path / "codes")
    assert (code, stderr) == (0, "")
    assert (tmp_path / "o" / "merges.txt").read_text() == "l o\nlo w\ne r</w>\nlow er</w>\n"
    vocabulary = json.loads((tmp_path / "o" / "vocab-src.json").read_text())
    assert (vocabulary["<pad>"], vocabulary["</s>"], vocabulary["w0</w>"]) == (PAD, EOS, 4)
    assert json.loads((tmp_path / "o" / "tokenizer_config.json").read_text())["langs"] == ["en", "de"]


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ("e </w>\n", "subword-nmt 0.1"),
        ("alone\n", "line 1: expected two subwords"),
        (None, "cannot be read as BPE codes"),
    ],
)
def test_wrong_codes(tmp_path, dictionary, codes, message):
    path = write_args(tmp_path / "checkpoint.pt", MT, mt_state(MT))
    if codes:
        (tmp_path / "codes").write_text(codes)
    with pytest.raises(T2RError, match=message):
        import_fairseq(str(path), str(tmp_path / "out"), dictionary=dictionary, bpe_codes=str(tmp_path / "codes"))
    assert not (tmp_path / "out").exists()


# --- What comes after ---------------------------------------------------------------------------------------


def test_an_imported_language_model_becomes_an_rnn(tmp_path, dictionary, run):
    state = {name: t.float() if t.is_floating_point() else t for name, t in lm_state(LM).items()}
    path, lm, rnn = write_cfg(tmp_path / "lm.pt", LM, state), tmp_path / "lm", tmp_path / "rnn"
    code, stdout, stderr = run("import", path, lm, "--dict", dictionary)
    assert (code, stderr) == (0, "")
    assert "adaptive_lm: 2 layers" in stdout
    assert "40 words" in stdout
    code, stdout, _ = run("swap", lm, rnn, "--feature-size", 8)
    assert code == 0
    assert "2 of 2 decoder layers recurrent" in stdout
    code, stdout, _ = run("inspect", lm, "--json")
    assert (code, json.loads(stdout)["model_type"]) == (0, "adaptive_lm")
    for model in (lm, rnn):
        code, stdout, stderr = run("generate", model, "w1 w2 w3", "--min-new-tokens", 4, "--max-new-tokens", 4)
        assert (code, 0 < len(stdout.split()) <= 4) == (0, True), stderr  # special words are not printed
    text = tmp_path / "text"
    text.write_text("w1 w2 w3\nw4 w5\n" * 20)
    options = ("--window", 16, "--stride", 8, "--no-generation", "--json")
    code, stdout, stderr = run("evaluate", lm, rnn, "--text", text, *options)
    assert code == 0, stderr
    assert len(json.loads(stdout)) == 2


def test_an_imported_translation_model_becomes_an_rnn(tmp_path, dictionary, run):
    path, mt, rnn = write_args(tmp_path / "mt.pt", MT, mt_state(MT)), tmp_path / "mt", tmp_path / "rnn"
    code, stdout, _ = run("import", path, mt, "--dict", dictionary, "--json")
    assert code == 0
    assert json.loads(stdout)["tokenizer"] is False
    assert run("import", path, tmp_path / "again", "--dict", dictionary)[2].startswith("t2r: note: no BPE codes")
    code, stdout, _ = run("swap", mt, rnn, "--feature-size", 8, "--init", "identity")
    assert code == 0
    tokens, mask = padded(WORDS)
    model = AutoModelForSeq2SeqLM.from_pretrained(rnn).eval()
    out = model.generate(tokens, attention_mask=mask, num_beams=1, min_new_tokens=6, max_new_tokens=6)
    assert out.shape == (3, 7)
    with torch.no_grad():  # the same tokens as in one parallel forward
        again = model(input_ids=tokens, attention_mask=mask, decoder_input_ids=out[:, :-1]).logits
    again[..., EOS] = -math.inf
    assert torch.equal(again[:, :5].argmax(-1), out[:, 1:6])


# --- Refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "changes", "message"),
    [
        (MT, {"encoder_normalize_before": True}, "encoder_normalize_before=True: FSMT"),
        (MT, {"decoder_learned_pos": True}, "decoder_learned_pos=True"),
        (MT, {"cross_self_attention": True}, "cross_self_attention=True"),
        (MT, {"layernorm_embedding": True}, "layernorm_embedding=True"),
        (MT, {"activation_fn": "swiglu"}, "activation_fn=swiglu: supported are relu"),
        (MT, {"encoder_layers": 6}, "has 2 encoder layers, but its settings say 6"),
        (MT, {"decoder_attention_heads": 3}, "not a multiple of decoder_attention_heads"),
        (MT, {"decoder_attention_heads": None}, "has no setting decoder_attention_heads"),
        (LM, {"decoder_learned_pos": True}, "decoder_learned_pos=True: the adaptive language model"),
        (LM, {"character_embeddings": True}, "character_embeddings=True"),
        (LM, {"decoder_normalize_before": False}, "normalizes after each sublayer"),
        (LM, {"adaptive_input_cutoff": "5,20"}, "different bands for input and softmax"),
        (LM, {"adaptive_softmax_cutoff": None}, "requires both or neither"),
        (LM, {"adaptive_softmax_cutoff": "10,x"}, "has adaptive_softmax_cutoff=10,x, which is not a number"),
        (LM, {"decoder_attention_heads": "a"}, "has decoder_attention_heads=a, which is not a number"),
        (MT, {"dropout": "x"}, "has dropout=x, which is not a number"),
        (LM, {"adaptive_softmax_cutoff": "9,20", "adaptive_input_cutoff": "9,20"}, "does not match its settings"),
    ],
)
def test_unsupported_settings(tmp_path, dictionary, base, changes, message):
    state = lm_state(base) if base is LM else mt_state(base)
    path = write_args(tmp_path / "checkpoint.pt", base | changes, state)
    with pytest.raises(T2RError, match=message):
        import_fairseq(str(path), str(tmp_path / "out"), dictionary=dictionary)
    assert not (tmp_path / "out").exists()


def test_the_checkpoint_is_not_deleted_by_its_import(tmp_path, dictionary):
    path = write_args(tmp_path / "checkpoint.pt", LM, lm_state(LM))
    out = tmp_path / "out"
    import_fairseq(str(path), str(out), dictionary=dictionary)
    inside = out / "checkpoint.pt"
    inside.write_bytes(path.read_bytes())
    with pytest.raises(T2RError, match=r"saving to .*out would delete .*checkpoint.pt"):
        import_fairseq(str(inside), str(out), dictionary=dictionary, overwrite=True)
    assert inside.exists()


def replace(name: str, tensor: Tensor | None) -> Any:
    return lambda state: state.pop(name) if tensor is None else state.__setitem__(name, tensor)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (LM, replace("decoder.layers.0.self_attn.bias_k", torch.ones(1)), "does not use.*bias_k"),
        (LM, replace("decoder.layers.1.fc2.bias", None), "no tensor decoder.layers.1.fc2.bias"),
        (LM, replace("decoder.adaptive_softmax.version", None), "of an early fairseq"),
        (LM, replace("decoder.adaptive_softmax.head.word_proj.weight", torch.ones(10, HIDDEN)), "tied to"),
        (LM, replace("decoder.adaptive_softmax.tail.1.0.weight", torch.ones(HIDDEN, 1)), "tie_adaptive_proj"),
        (
            LM,
            replace("decoder.layers.0.fc1.bias", torch.ones(3)),
            r"layers.0.fc1.bias has shape \[3\], expected \[24\]",
        ),
        (MT, replace("decoder.output_projection.weight", torch.ones(WORDS, HIDDEN)), "tied to"),
        (MT, replace("encoder.embed_tokens.weight", torch.ones(WORDS, HIDDEN)), "share_all_embeddings, but"),
        (MT, replace("encoder.embed_tokens.weight", torch.ones(WORDS, 8)), "encoder_embed_dim=8"),
        (MT, replace("encoder.layer_norm.weight", torch.ones(HIDDEN)), "does not use.*encoder.layer_norm"),
        (MT, replace("decoder.version", torch.ones(1)), None),
    ],
)
def test_every_tensor_is_used_or_refused(tmp_path, dictionary, base, change, message):
    state = lm_state(base) if base is LM else mt_state(base)
    change(state)
    path = str(write_args(tmp_path / "checkpoint.pt", base, state))
    if message is None:
        import_fairseq(path, str(tmp_path / "out"), dictionary=dictionary)
        return
    with pytest.raises(T2RError, match=message):
        import_fairseq(path, str(tmp_path / "out"), dictionary=dictionary)
    assert os.listdir(tmp_path) in (["checkpoint.pt", "dict.txt"], ["dict.txt", "checkpoint.pt"])


class Harmful:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("function", "name"),
    [(os.system, r"(posix|nt)\.system"), (eval, r"eval"), (getattr, r"getattr"), (print, r"print")],
)
def test_nothing_of_a_file_is_run(tmp_path, run, dictionary, zipped, function, name):
    proof = tmp_path / "proof"
    harm = Harmful(function, f"touch {proof}" if function is os.system else f"open({str(proof)!r}, 'w')")
    path = tmp_path / "checkpoint.pt"
    content = {"args": argparse.Namespace(**LM), "model": lm_state(LM), "extra_state": harm}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(T2RError, match=rf"is refused: it requests {name}, which is not allowed"):
        read_checkpoint(str(path))
    code, stdout, stderr = run("import", path, tmp_path / "out", "--dict", dictionary)
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert not proof.exists()
    assert not (tmp_path / "out").exists()


def test_what_stands_in_for_fairseq_does_nothing_either(tmp_path):
    """Names of fairseq are allowed, but they refer to stand-ins and not to fairseq."""
    before = set(torch.serialization.get_safe_globals())
    with foreign("fairseq.checkpoint_utils.run", "fairseq.dataclass.constants.Choices") as (harmful, choices):
        args = argparse.Namespace(**LM | {"activation_fn": Harmful(choices, "gelu")})
        content = {"args": args, "model": lm_state(LM), "extra_state": Harmful(harmful, "rm -r /")}
        torch.save(content, tmp_path / "checkpoint.pt")
    read = read_checkpoint(str(tmp_path / "checkpoint.pt"))
    assert (read.settings["decoder_layers"], read.activation()) == (LAYERS, "gelu")
    assert "fairseq.checkpoint_utils" not in sys.modules
    assert set(torch.serialization.get_safe_globals()) == before  # names are allowed for that file only


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("share", [0.5, 0.98])
def test_a_file_that_is_cut_off(tmp_path, dictionary, zipped, share):
    path = write_args(tmp_path / "checkpoint.pt", LM, lm_state(LM), zipped=zipped)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(T2RError, match="is not a checkpoint, or is damaged or truncated"):
        import_fairseq(str(path), str(tmp_path / "out"), dictionary=dictionary)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a checkpoint"),
        (b"no pickle at all\n" * 50, "not a checkpoint"),
        ([1, 2], "has no 'model'"),
        ({"state_dict": {}}, "has no 'model'"),
        ({"model": {"a": 1}}, "not a dictionary of tensors"),
        ({"model": {}}, "not a dictionary of tensors"),
        ({"model": {"a": torch.ones(1)}}, "neither 'args' nor a 'cfg'"),
        ({"model": {"a": torch.ones(1)}, "args": {"arch": "resnet"}}, "has no decoder"),
        ({"model": {"encoder.a": torch.ones(1)}, "args": {"arch": "roberta"}}, "no tensor encoder.embed_tokens.weight"),
        (None, "there is no file"),
    ],
)
def test_what_is_not_a_checkpoint(tmp_path, dictionary, content, message):
    path = tmp_path / "checkpoint.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(T2RError, match=message):
        import_fairseq(str(path), str(tmp_path / "out"), dictionary=dictionary)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a 1\nb 2\n", "has 6 words, including fairseq's 4 special words, but the checkpoint was trained with 40"),
        ("a 1\nb\n", "line 2: expected a word and its count"),
        ("a 1\n\nb 1\n", "line 2: expected a word"),
        ("a 1\na 1\n", "line 2: 'a' is a duplicate"),
        ("</s> 5\n", "line 1: </s> is a special word of fairseq"),
        (None, "cannot be read as a dictionary"),
    ],
)
def test_wrong_dictionaries(tmp_path, text, message):
    path, words = write_args(tmp_path / "lm.pt", LM, lm_state(LM)), tmp_path / "dict.txt"
    if text is not None:
        words.write_text(text)
    with pytest.raises(T2RError, match=message):
        import_fairseq(str(path), str(tmp_path / "out"), dictionary=str(words))


def test_dictionaries_as_fairseq_reads_them(tmp_path):
    path = tmp_path / "dict.txt"
    path.write_text("the 10\nnew york 5\nthe 3 #fairseq:overwrite\nmadeupword0000 0")
    words = read_dictionary(str(path))
    assert words[5:] == ["new york", "the", "madeupword0000"]
    assert words[:5] == ["<s>", "<pad>", "</s>", "<unk>", "<overwritten-4>"]


def test_the_wrong_options(tmp_path, dictionary):
    lm, mt = write_args(tmp_path / "lm.pt", LM, lm_state(LM)), write_args(tmp_path / "mt.pt", MT, mt_state(MT))
    with pytest.raises(T2RError, match="give one dictionary and no BPE codes"):
        import_fairseq(str(lm), str(tmp_path / "out"), dictionary=dictionary, target_dictionary=dictionary)
    other = tmp_path / "dict.de.txt"
    other.write_text(Path(dictionary).read_text().replace("w0 ", "other "))
    with pytest.raises(T2RError, match="must be the same"):
        import_fairseq(str(mt), str(tmp_path / "out"), dictionary=dictionary, target_dictionary=str(other))
