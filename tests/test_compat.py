"""Names that are private in transformers, or differ between its versions, are used only in `t2r.compat`, and work."""

import io
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import (
    AddedToken,
    AutoConfig,
    ByT5Tokenizer,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    M2M100Tokenizer,
    MarianConfig,
    MarianTokenizer,
    ViTConfig,
)

import t2r
from families import DECODER, POSITIONS, batch, tiny
from t2r import compat

PACKAGE = Path(t2r.__file__).parent
PRIVATE = (
    "_attn_implementation",
    "_supports_attention_backend",
    "_prepare_cache_for_generation",
    "_validate_generated_length",
    "_mask_length",
    "_model_mapping",
    "MAPPING_NAMES",
    "from_pretrained.__func__",
    "._from_config(",
    "_save_checkpoint",
    "_load_from_checkpoint",
    "_n_gpu",
    "_prepare_inputs",
    "_beam_search",
    "_prefill(",
    "_tied_weights_keys",
    "_no_split_modules",
    "_weight_conversions",
    "all_tied_weights_keys",
    "_encode_plus",
    "_convert_token_to_id",
    "tokens_trie",
    "rope_type",
    "original_max_seq_len",
)
DEFINES = {"architectures/adaptive_lm/modeling.py"}
"""Models defined by t2r use the same private names as the models of transformers."""


def test_private_names_are_used_at_the_boundary_only():
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name == "compat.py" or name in DEFINES:
            continue
        text = path.read_text()
        found += [f"{name}: {word}" for word in PRIVATE if re.search(rf"(?<![A-Za-z]){re.escape(word)}", text)]
    assert not found


def test_the_attention_implementation_of_every_part():
    model = tiny("t5")
    compat.set_attention_implementation(model, "t2r")
    assert compat.attention_implementation(model) == "t2r"
    assert {compat.attention_implementation(part) for part in (model.encoder, model.decoder)} == {"t2r"}


def test_the_attention_implementation_that_loading_asks_for(tmp_path):
    t2r.swap(tiny("gpt2", torch.float32), feature_size=8).save_pretrained(tmp_path)
    assert compat.requested_attention(AutoConfig.from_pretrained(tmp_path)) is None
    assert compat.requested_attention(AutoConfig.from_pretrained(tmp_path, attn_implementation="sdpa")) == "sdpa"


def test_models_on_the_attention_interface():
    assert compat.on_attention_interface(tiny("llama"))
    assert not compat.on_attention_interface(tiny("fsmt"))


def test_up_to_which_length_a_rotation_is_constant():
    assert compat.constant_rotation(tiny("llama")) is None
    assert compat.constant_rotation(tiny("gpt2")) is None
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    model = LlamaForCausalLM(LlamaConfig(**(DECODER | {"rope_parameters": rope})))
    assert compat.constant_rotation(model) == POSITIONS


def test_generate_requests_a_cache_and_checks_the_length(monkeypatch):
    model, inputs = t2r.swap(tiny("gpt2"), feature_size=8), batch("gpt2")
    asked, told = [], []
    start, check = model.start_cache, model.check_generated_length
    monkeypatch.setattr(model, "start_cache", lambda *args: asked.append(args[2:]) or start(*args))
    monkeypatch.setattr(model, "check_generated_length", lambda length: told.append(length) or check(length))
    model.generate(**inputs, max_new_tokens=4, num_beams=2, pad_token_id=0)
    assert asked == [(6, 12)]  # rows times beams, and all tokens except the last, which is never read
    assert told == [13]


@pytest.mark.parametrize("mask", [torch.ones(2, 5), torch.tensor([[0.0, 1], [1, 1]])])
def test_the_length_of_the_prompt_is_known_when_the_cache_is_made(mask, monkeypatch):
    model, found = t2r.swap(tiny("gpt2"), feature_size=8), []
    ids, start = torch.full(mask.shape, 5), model.start_cache

    def noted(generation_config, model_kwargs, *args):
        found.append(compat.prompt_length(generation_config, model_kwargs))
        return start(generation_config, model_kwargs, *args)

    monkeypatch.setattr(model, "start_cache", noted)
    model.generate(ids, attention_mask=mask.long(), max_new_tokens=2, pad_token_id=0)
    assert found == [mask.shape[1]]


def test_assistants_are_recognized():
    config = GenerationConfig()
    assert not compat.is_assistant(config)
    config.is_assistant = True
    assert compat.is_assistant(config)


def test_language_models_by_their_configuration():
    assert compat.has_language_model(LlamaConfig)
    assert compat.has_language_model(GPT2Config)
    assert compat.has_language_model(MarianConfig)
    assert not compat.has_language_model(ViTConfig)


def test_a_model_is_built_from_its_configuration():
    config = tiny("gpt2").config
    built = compat.build_from_config(type(tiny("gpt2")), config, dtype=torch.bfloat16)
    assert built.dtype == torch.bfloat16


def test_tied_weights_are_known():
    model = tiny("gpt2")
    assert compat.tied_weights(model) == {"lm_head.weight"}
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_module_around_a_model_is_divided_like_the_model():
    class Around(compat.WrapsModel, torch.nn.Module):
        wrapped = tiny("gpt2")

    around = Around()
    assert not around.is_distributed_loading_by_transformers
    assert around.fsdp_size is None
    Around.wrapped._fsdp_size, Around.wrapped._is_distributed_loading_by_transformers = 2, True
    assert bool(around.fsdp_size == 2) == all(hasattr(Around.wrapped, name) for name in compat.DISTRIBUTES)
    assert bool(around.is_distributed_loading_by_transformers) == (around.fsdp_size == 2)


def test_pipelines_know_swapped_models(caplog):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, pipeline
    from transformers.utils import logging

    model = t2r.swap(tiny("gpt2", torch.float32), feature_size=8)
    words = {f"w{i}": i for i in range(90)} | {"<unk>": 90}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")), pad_token="w0", unk_token="<unk>"
    )
    logging.enable_propagation()
    try:
        written = pipeline("text-generation", model=model, tokenizer=tokenizer)("w5", max_new_tokens=2)
    finally:
        logging.disable_propagation()
    assert written[0]["generated_text"].startswith("w5")
    assert "is not supported" not in caplog.text


def test_serving_finds_the_class_that_a_folder_names(tmp_path, monkeypatch):
    """`transformers serve` looks in the package that it has imported, and transformers loads its package twice."""
    first, user = ModuleType("transformers"), ModuleType("user")
    user.transformers = first
    monkeypatch.setitem(sys.modules, "user", user)
    compat.announce_by_name(t2r.T2RForCausalLM)
    assert first.T2RForCausalLM is t2r.T2RForCausalLM
    serving = pytest.importorskip("transformers.cli.serving.model_manager")
    t2r.swap(tiny("llama")).save_pretrained(tmp_path)
    ByT5Tokenizer().save_pretrained(tmp_path)
    model, _ = serving.ModelManager(device="cpu", model_timeout=-1).load_model_and_processor(f"{tmp_path}@main")
    assert isinstance(model, t2r.T2RForCausalLM)


def test_a_trainer_asks_how_to_save_and_load_its_checkpoints(tmp_path):
    from transformers import Trainer, TrainingArguments

    asked = []

    class Asked(compat.TrainerHooks, Trainer):
        def save_checkpoint(self, save):
            asked.append("checkpoint")
            save()

        def save_weights(self, folder):
            asked.append(("save", folder.name))
            folder.mkdir(parents=True, exist_ok=True)
            return True

        def load_weights(self, folder):
            asked.append(("load", folder.name))
            return True

        def save_optimizer(self, folder):
            asked.append(("save optimizer", folder.name))
            return False

        def load_optimizer(self, folder):
            asked.append(("load optimizer", folder.name))
            return False

    rows = [{"input_ids": torch.arange(3, 9), "labels": torch.arange(3, 9)}] * 4
    for steps in (1, 2):
        arguments = TrainingArguments(
            str(tmp_path), max_steps=steps, save_steps=1, use_cpu=True, report_to=[], disable_tqdm=True
        )
        compat.use_one_gpu(arguments)
        assert arguments.n_gpu <= 1
        trainer = Asked(tiny("gpt2", torch.float32), arguments, train_dataset=rows)
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1") if steps == 2 else None)
    assert asked == [
        "checkpoint",
        ("save", "checkpoint-1"),
        ("save optimizer", "checkpoint-1"),
        ("load", "checkpoint-1"),
        ("load optimizer", "checkpoint-1"),
        "checkpoint",
        ("save", "checkpoint-2"),
        ("save optimizer", "checkpoint-2"),
    ]


# Slow tokenizers

LINES = [
    "haus baum katze",
    "",
    " ",
    "hund  hund</s>wasser <unk> ",
    "</s>",
    "<extra_id_1>feuer<extra_id_12>",
    ">>de<< berg",
    "a <left> b <right> c<single>d <single> e",
    "__de__ house tree <pa <pad",
    "Zürich 東京 🙂",
] * 2


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    """Sentencepiece models of two languages, a vocabulary of both, and the same words with other ids."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs the translation extra")
    root = tmp_path_factory.mktemp("pieces")
    known = {"</s>", "<unk>", "<s>", "<pad>"}
    for name, words in (("source", "haus baum katze hund wasser"), ("target", "house tree cat dog water")):
        made = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([words] * 50),
            model_writer=made,
            vocab_size=30,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        (root / f"{name}.spm").write_bytes(made.getvalue())
        model = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
        known |= {model.id_to_piece(i) for i in range(model.get_piece_size())}
    for name, words in (("vocab", sorted(known)), ("other", sorted(known, reverse=True))):
        (root / f"{name}.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    return root


def slow_tokenizer(kind, root):
    if kind == "byt5":
        return ByT5Tokenizer()
    source, target, vocabulary, other = (
        str(root / name) for name in ("source.spm", "target.spm", "vocab.json", "other.json")
    )
    if kind == "m2m_100":
        return M2M100Tokenizer(vocabulary, source, src_lang="de", tgt_lang="en")
    if kind == "marian":
        return MarianTokenizer(source, target, vocabulary, source_lang="de", target_lang="en")
    return MarianTokenizer(source, target, vocabulary, target_vocab_file=other, separate_vocabs=True)


def stock(tokenizer, add_special_tokens=True, **texts):
    return tokenizer(**texts, add_special_tokens=add_special_tokens, return_attention_mask=False)["input_ids"]


@pytest.fixture
def lean_calls(monkeypatch):
    """The number of texts in each call of a lean tokenizer, which is made for any amount of text."""
    calls = []
    encode = compat.LeanTokenizer._encode_plus
    monkeypatch.setattr(compat, "WORTHWHILE", 0)
    monkeypatch.setattr(
        compat.LeanTokenizer,
        "_encode_plus",
        lambda self, text, **options: calls.append(len(text)) or encode(self, text, **options),
    )
    return calls


@pytest.mark.parametrize("kind", ["byt5", "m2m_100", "marian", "separate"])
@pytest.mark.parametrize("split", [False, True])
def test_a_lean_tokenizer_has_the_ids_of_the_tokenizer(kind, split, pieces, lean_calls):
    tokenizer = slow_tokenizer(kind, pieces)
    added = [
        ("<left>", {"lstrip": True}),
        ("<right>", {"rstrip": True}),
        ("<single>", {"single_word": True}),
        ("und", {}),
    ]
    tokenizer.add_tokens([AddedToken(token, **options) for token, options in added])
    tokenizer.split_special_tokens = split
    before = {name: str(value) for name, value in vars(tokenizer).items()}
    assert (stock(tokenizer, text=LINES) != stock(tokenizer, text_target=LINES)) == (kind != "byt5")
    for add_special_tokens in (True, False):
        for side in ("text", "text_target", "text"):
            expected = stock(tokenizer, add_special_tokens, **{side: LINES})
            assert compat.encode(tokenizer, add_special_tokens=add_special_tokens, **{side: LINES}) == expected
    assert lean_calls == [compat.COMPARED[0], len(LINES)] * 6
    assert {name: str(value) for name, value in vars(tokenizer).items()} == before


def test_little_text_is_left_to_the_tokenizer(lean_calls, monkeypatch):
    monkeypatch.setattr(compat, "WORTHWHILE", 1000)
    tokenizer = ByT5Tokenizer()
    for line, lean in (("x" * 99, False), ("x" * 100, True)):
        assert compat.encode(tokenizer, text=[line] * 10) == stock(tokenizer, text=[line] * 10)
        assert bool(lean_calls) == lean


def test_a_tokenizer_with_its_own_steps_is_called_itself(lean_calls):
    class Own(ByT5Tokenizer):
        def prepare_for_model(self, ids, **options):
            return super().prepare_for_model(ids[::-1], **options)

    assert compat.encode(Own(), text=LINES) == stock(Own(), text=LINES) != stock(ByT5Tokenizer(), text=LINES)
    assert not lean_calls


def test_a_tokenizer_whose_copy_differs_is_called_itself(lean_calls):
    tokenizer = ByT5Tokenizer()
    for mode, offset in (("input", 3), ("target", 5)):  # these change the tokenizer, not its copy
        setattr(tokenizer, f"_switch_to_{mode}_mode", lambda offset=offset: setattr(tokenizer, "offset", offset))
    expected = stock(tokenizer, text_target=LINES)
    assert expected != stock(tokenizer, text=LINES)
    assert compat.encode(tokenizer, text_target=LINES) == expected
    assert lean_calls == [compat.COMPARED[0]]


def test_hidden_states_of_a_new_class_are_recorded():
    model, ids = tiny("llama", torch.float32), torch.tensor([[5, 6]])
    body = model.model
    new = type("Other", (type(body),), {})
    compat.record_outputs_as(new, type(body))
    body.__class__ = new
    assert len(model(ids, output_hidden_states=True).hidden_states) == 4
