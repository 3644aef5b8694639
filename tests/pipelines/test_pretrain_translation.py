"""The pretrain pipeline on parallel text: any attention in the decoder, joint and separate vocabularies, and errors."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianMTModel,
    MarianTokenizer,
    NllbTokenizer,
)

import t2r
from families import SEQ2SEQ, TOKENS
from t2r import cli
from t2r.attention.recurrence import recurrent_sites
from t2r.errors import T2RError
from t2r.pipelines.pretrain import make_model as from_shape
from t2r.pipelines.pretrain import pretrain, summary
from t2r.training.loop.trainer import StageTrainer
from t2r.training.recipes.preset import load_preset
from t2r.training.recipes.recipe import load_recipe
from t2r.training.sessions import session as sessions
from translating import make_model, make_tokenizer, sentences, write_pairs

SMALL = ("d_model=32", "encoder_layers=1", "encoder_ffn_dim=32", "decoder_ffn_dim=32")
SHORT = ("block_size=128", "batch_tokens=256", "steps=3", "warmup_steps=0")
SEPARATE = "share_encoder_decoder_embeddings=false"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    write_pairs(folder, "train", 120)
    write_pairs(folder, "valid", 4, seed=1, longest=5)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T2R_CACHE", str(tmp_path / "cache"))


def run(world, out, config="marian-tiny", **options):
    given = {
        "source": str(world / "train.src"),
        "target": str(world / "train.tgt"),
        "overrides": SHORT,
        "model_overrides": SMALL,
        "device": "cpu",
        "progress": False,
    }
    return pretrain(str(config), str(out), **(given | options))


@pytest.mark.parametrize("options", [{}, {"feature_size": 4, "cross_feature_size": 8, "recurrent": "both"}])
@pytest.mark.parametrize("model_type", ["marian", "fsmt"])
def test_random_weights_are_those_of_fairseq(model_type, options):
    """Xavier's, with a smaller gain for queries, keys and values. Embeddings have 1 / sqrt(d_model)."""
    preset = load_preset("marian-tiny")
    fields = {name: x for name, x in preset.model.items() if name != "model_type"} | TOKENS | {"vocab_size": 512}
    if model_type == "fsmt":
        fields |= {"src_vocab_size": 512, "tgt_vocab_size": 512}
    shape = AutoConfig.for_model(model_type, **fields)
    model = from_shape(shape, options, 0, load_preset("marian-large-paper").init)
    found = {name: p.std().item() * 64**0.5 for name, p in model.named_parameters() if p.dim() == 2 and p.shape[0] > 4}
    expected = {"q_proj": 0.5**0.5, "k_proj": 0.5**0.5, "v_proj": 0.5**0.5, "out_proj": 1, "fc1": 2 / 3**0.5 / 2**0.5}
    expected["fc2"] = expected["fc1"]
    checked = {name.split(".")[-2] for name in found} & expected.keys()
    assert checked == expected.keys()
    for name, deviation in found.items():
        kind = name.split(".")[-2]
        if kind in expected:
            assert deviation == pytest.approx(expected[kind], rel=0.05), name
        elif "embed_tokens" in name or "shared" in name:
            assert deviation == pytest.approx(1, rel=0.05), name
    again = from_shape(shape, options, 0, "xavier").state_dict()
    assert all(torch.equal(x, again[name]) for name, x in model.state_dict().items())


def test_the_whole_way(world, tmp_path):
    out = tmp_path / "out"
    valid = {"valid_source": str(world / "valid.src"), "valid_target": str(world / "valid.tgt")}
    overrides = (*SHORT[:2], "steps=30", "learning_rate=1e-2")
    results = run(world, out, **valid, overrides=overrides)
    assert results["task"] == "translation"
    assert results["stages"]["pretrain"]["loss"] < 0.7 * results["untrained"]["loss"]
    assert len(summary(results).rows) == 2
    assert json.loads((out / "results.json").read_text()) == results
    loaded, info = AutoModelForSeq2SeqLM.from_pretrained(out, output_loading_info=True)
    assert type(loaded) is MarianMTModel
    assert not any(info.values())
    tokenizer = AutoTokenizer.from_pretrained(out)
    line = sentences(1)[0]
    ids = tokenizer(text_target=line).input_ids
    assert ids == tokenizer(line).input_ids  # one vocabulary
    assert ids[-1] == tokenizer.eos_token_id == loaded.generation_config.forced_eos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == line
    assert loaded.generation_config.decoder_start_token_id == tokenizer.pad_token_id
    tied = loaded.get_output_embeddings().weight
    assert tied is loaded.model.encoder.embed_tokens.weight is loaded.model.decoder.embed_tokens.weight
    card = (out / "README.md").read_text()
    assert "pipeline_tag: translation" in card
    assert "AutoModelForSeq2SeqLM" in card
    # A conversion of the result is a conversion of any model.
    stages = ("block_size=64", "batch_tokens=64", "steps=1", "warmup_steps=0")
    files = {"source": str(world / "train.src"), "target": str(world / "train.tgt")}
    t2r.convert(str(out), str(tmp_path / "rnn"), **files, overrides=stages, device="cpu", progress=False)


def test_separate_vocabularies_and_recurrent_attention(world, tmp_path):
    """The embeddings of the encoder are its own; those of the decoder are tied to its output."""
    pytest.importorskip("sentencepiece", reason="needs the translation extra")
    (tmp_path / "other.tgt").write_text("".join(f"{line.replace('w', 'ж')}\n" for line in sentences(120)))
    out = tmp_path / "out"
    options = {"feature_map": "t2r", "feature_size": 4, "cross_feature_size": 8, "recurrent": "cross"}
    changes = (*SMALL, SEPARATE)
    given = {"target": str(tmp_path / "other.tgt"), "model_overrides": changes, "overrides": ("steps=2",)}
    results = run(world, out, **given, **options)
    assert 256 < results["target_vocabulary"] <= 512
    model = AutoModelForSeq2SeqLM.from_pretrained(out)
    assert model.t2r_config.cross_feature_size == 8
    assert len(recurrent_sites(model)) == 2  # one cross attention in each of two layers
    inner, head = model.model, model.get_output_embeddings().weight
    assert inner.decoder.embed_tokens.weight is head
    assert inner.encoder.embed_tokens.weight is not head
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert type(tokenizer) is MarianTokenizer
    ids = tokenizer(text_target="ж3 ж7 ☃").input_ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ж3 ж7 ☃"
    assert tokenizer.unk_token_id not in ids
    assert ids != tokenizer("ж3 ж7 ☃").input_ids
    assert tokenizer.convert_tokens_to_ids([tokenizer.eos_token, tokenizer.pad_token]) == [0, 2]


def test_a_batch_of_the_paper_is_accumulated_to_one_step(world, tmp_path, monkeypatch):
    """One block per forward pass, and the gradient of the mean over all tokens of the batch."""
    seen = []
    real = StageTrainer.compute_loss

    def watched(self, model, inputs, *args, num_items_in_batch=None, **kwargs):
        seen.append((self.state.global_step, inputs["input_ids"].shape, int(num_items_in_batch)))
        return real(self, model, inputs, *args, num_items_in_batch=num_items_in_batch, **kwargs)

    monkeypatch.setattr(StageTrainer, "compute_loss", watched)
    sizes = ("block_size=64", f"batch_tokens={64 * 8}", "steps=2")  # the paper's: 3584 x 128
    run(world, tmp_path / "out", recipe="paper-mt-scratch", overrides=sizes)
    assert [step for step, _, _ in seen] == [0] * 8 + [1] * 8
    assert all(rows * length <= 64 for _, (rows, length), _ in seen)
    assert len({count for step, _, count in seen if step == 0}) == 1  # all forward passes have one denominator
    assert load_recipe(tmp_path / "out" / "recipe.yaml").stages[0].optimizer == "adam"


def test_continued_training_on_its_own_translations(world, tmp_path):
    make_model().save_pretrained(tmp_path / "first")  # its translations end
    make_tokenizer().save_pretrained(tmp_path / "first")
    few, _ = write_pairs(tmp_path, "few", 6, longest=3)
    given = {"model_overrides": (), "continued": True, "source": few, "target": "teacher", "recipe": "scratch-mt"}
    results = run(world, tmp_path / "more", tmp_path / "first", **given)
    assert [entry["target"] for entry in results["mixture"]] == ["teacher"]
    (written,) = (tmp_path / "cache" / "translations").glob("*.txt")
    assert len(written.read_text().splitlines()) == 6
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "more"))
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_the_languages_of_a_multilingual_model_are_saved_with_it(tmp_path, monkeypatch):
    first, more = tmp_path / "first", tmp_path / "more"
    tokenizer = NllbTokenizer(vocab={"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "▁": 4, "a": 5, "b": 6})
    sizes = {"vocab_size": len(tokenizer), "decoder_layers": 1, "encoder_layers": 1, "pad_token_id": 1}
    M2M100ForConditionalGeneration(M2M100Config(**SEQ2SEQ | sizes)).save_pretrained(first)
    tokenizer.save_pretrained(first)
    (tmp_path / "pairs").write_text("a b a\nb a\n")
    words = ["--src", tmp_path / "pairs", "--tgt", tmp_path / "pairs", "--continued", "--recipe", "scratch-mt"]
    words += ["--set", "block_size=16", "--set", "batch_tokens=16", "--set", "steps=1", "--device", "cpu", "-q"]
    words += ["--source-language", "zho_Hans", "--target-language", "deu_Latn"]
    monkeypatch.setattr(sys, "argv", ["t2r", "pretrain", *map(str, [first, more, *words])])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert not exit_.value.code
    saved = AutoTokenizer.from_pretrained(more)
    assert (saved.src_lang, saved.tgt_lang) == ("zho_Hans", "deu_Latn")
    german = tokenizer.convert_tokens_to_ids("deu_Latn")
    assert AutoModelForSeq2SeqLM.from_pretrained(more).generation_config.forced_bos_token_id == german


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"source": None, "target": None, "train": "t.txt"}, "marian-tiny is an encoder-decoder: give it parallel"),
        ({"config": "gpt2-tiny", "model_overrides": ()}, "gpt2-tiny is a language model: train it on text"),
        ({"target": "teacher"}, "has no teacher"),
        ({"target_language": "de"}, "no languages to choose from"),
        ({"target": None}, "1 file of sources and 0 of targets"),
        ({"valid_target": "v"}, "give both a source and a target"),
    ],
)
def test_mistakes_are_told_before_anything_is_trained(world, tmp_path, monkeypatch, options, words):
    monkeypatch.setattr(sessions, "run_stage", None)
    with pytest.raises(T2RError) as error:
        run(world, tmp_path / "out", **options)
    assert words in str(error.value)
    assert not (tmp_path / "out.run").exists()
