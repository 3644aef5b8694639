"""The mean of saved models."""

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer
from typer.testing import CliRunner

import t2r
from t2r.cli import app
from t2r.errors import T2RError
from translating import make_model, make_tokenizer


def save(folder, seed, dtype=torch.float32, swap=None, tokenizer=True, scale=1.0):
    model = make_model() if swap is None else t2r.swap(make_model(), **swap)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "embed_positions" not in name:
                weight += scale * 0.1 * torch.randn_like(weight)
    model.to(dtype).save_pretrained(folder)
    if tokenizer:
        make_tokenizer().save_pretrained(folder)
    return {name: x.clone() for name, x in model.state_dict().items()}


@pytest.mark.parametrize(
    ("swap", "dtype"), [(None, torch.float32), ({"feature_size": 4, "key_weights": True}, torch.bfloat16)]
)
def test_the_mean_of_three_models(tmp_path, swap, dtype):
    folders = [str(tmp_path / name) for name in "abc"]
    weights = [save(folder, seed, dtype, swap) for seed, folder in enumerate(folders)]
    result = CliRunner().invoke(app, ["average", *folders, str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "the mean of 3 models" in result.stdout
    model, info = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out", dtype="auto", output_loading_info=True)
    assert not any(info.values())
    assert model.dtype == dtype
    assert isinstance(model, t2r.T2RForSeq2SeqLM) is (swap is not None)
    for name, x in model.state_dict().items():
        expected = torch.stack([each[name].double() for each in weights]).mean(0)
        assert torch.allclose(x.double(), expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-7), name
        if all(torch.equal(weights[0][name], each[name]) for each in weights):
            assert torch.equal(x, weights[0][name])  # a table of positions stays as it is
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("w3 w4").input_ids == make_tokenizer()("w3 w4").input_ids


def test_models_that_do_not_belong_together(tmp_path):
    save(tmp_path / "plain", 0)
    save(tmp_path / "rnn", 0, swap={"feature_size": 4})
    save(tmp_path / "wider", 0, swap={"feature_size": 8})
    words = make_tokenizer()
    save(tmp_path / "other", 0, tokenizer=False)
    words.add_tokens(["new"])
    words.save_pretrained(tmp_path / "other")
    for seed in (1, 2):
        save(tmp_path / f"rfa{seed}", 0, swap={"feature_map": "rfa", "feature_size": 4, "seed": seed})
    for pair, said in (
        (("plain",), "at least two"),
        (("plain", "rnn"), "different configurations: "),
        (("rnn", "wider"), "different configurations: feature_size is 4 and 8"),
        (("plain", "other"), "different tokenizers"),
        (("rfa1", "rfa2"), "different configurations: seed is 1 and 2"),
        (("plain", "none/at/all"), "there is no folder"),
    ):
        with pytest.raises(T2RError, match=said):
            t2r.average([str(tmp_path / name) if "/" not in name else name for name in pair], str(tmp_path / "out"))
        assert not (tmp_path / "out").exists()
    with pytest.raises(T2RError, match="would replace the model"):
        t2r.average([str(tmp_path / "plain")] * 2, str(tmp_path / "plain"), overwrite=True)
