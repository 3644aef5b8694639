"""Memory budgets of encoder-decoders: windows of causal attention, beside exact or recurrent cross attention."""

import copy
import json
import re

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

import t2r
from families import EOS, PAD, tiny
from t2r import cli
from t2r.attention.recurrence import recurrent_sites
from t2r.budgets import descent
from t2r.budgets.costs import SINKS, Costs, Source, features_for
from t2r.budgets.descent import Descent
from t2r.budgets.limited import Limited
from t2r.budgets.text import Batch, Text
from t2r.errors import T2RError
from t2r.evaluation.sizes import translation_memory
from t2r.generation.engine import Engine
from t2r.pipelines.budget import plan_memory
from t2r.pipelines.convert import convert
from translating import make_model, make_tokenizer, write_pairs

LONGEST = 50
SHORT = ("block_size=256", "batch_tokens=256", "transfer.steps=2", "distill.steps=2", "warmup_steps=0")
families = pytest.mark.parametrize("family", ["marian", "bart", "fsmt"])


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("world")
    make_model().save_pretrained(folder / "marian")
    make_tokenizer().save_pretrained(folder / "marian")
    write_pairs(folder, "train", 60, shortest=2, longest=LONGEST - 1)
    write_pairs(folder, "valid", 3, seed=1, shortest=20, longest=30)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("T2R_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(descent.STEPS, "cpu", 4)


def pairs(world):
    return {"source": str(world / "train.src"), "target": str(world / "train.tgt"), "progress": False}


def longest(world, side):
    """The longest line, with the end of the sentence."""
    return max(len(line.split()) + 1 for line in (world / f"train.{side}").read_text().splitlines())


def costs_of(world, features=0):
    source = Source(longest(world, "src"), features)
    return Costs.of(make_model(), longest(world, "tgt"), source=source, nbits=8)


def budget_of(world, share, features=0):
    costs = costs_of(world, features)
    return int(costs.least + share * (costs.whole - costs.least))


def batch(rows=3, source=11, target=30, seed=0):
    """Sources and targets of different lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 14, (rows, source), generator=generator)
    prefix = torch.randint(3, 14, (rows, target), generator=generator)
    prefix[:, 0] = EOS
    mask, where = torch.ones_like(ids), torch.ones_like(prefix, dtype=torch.bool)
    for row in range(1, rows):
        mask[row, -2 * row :], where[row, -7 * row :] = 0, False
    ids[mask == 0] = PAD
    prefix[~where] = PAD
    return Batch({"input_ids": ids, "attention_mask": mask, "decoder_input_ids": prefix}, where)


# --- Costs ----------------------------------------------------------------------------------------------------


@families
@pytest.mark.parametrize("features", [0, 6])
def test_the_cost_of_a_plan_is_what_the_cache_holds(family, features):
    """In bfloat16, after a target that is longer than the longest window, and a source that is as long as planned."""
    model = tiny(family, torch.bfloat16)
    costs = Costs.of(model, 20, features=4, source=Source(9, features))
    windows = [
        [16 if (i + h) % 2 else layer.longest for h in range(layer.heads)] for i, layer in enumerate(costs.layers)
    ]
    how = {"recurrent": "both", "cross_feature_size": features} if features else {}
    rnn = t2r.swap(model, plan=costs.plan(windows), feature_size=4, **how)
    with torch.no_grad():
        cache = rnn(
            torch.arange(3, 12)[None], decoder_input_ids=torch.arange(3, 33)[None], use_cache=True
        ).past_key_values
    layers = [layer for part in cache.parts().values() for layer in part]
    held = sum(x.nbytes for layer in layers for name, x in layer.tensors().items() if name != "seen")
    assert held == costs.of_windows(windows)
    assert costs.cross == sum(layer.nbytes for layer in cache.parts()["cross"])


def test_limits_and_features():
    exact, states = (Costs.of(tiny("marian"), 64, source=Source(40, features)) for features in (0, 8))
    assert exact.whole - exact.cross == states.whole - states.cross
    with pytest.raises(
        T2RError,
        match=r"of which the keys and values of 40 source tokens are [\d.]+ KiB; with all keys "
        r"and values of 64 target tokens it is [\d.]+ KiB; fewer --source-tokens, or --recurrent both",
    ):
        exact.check(exact.least - 1)  # fmt: skip
    with pytest.raises(T2RError, match=r"the states of the source are .* it is [\d.]+ KiB$"):
        states.check(states.least - 1)
    with pytest.raises(T2RError, match=r"it is [\d.]+ KiB$"):
        exact.check(exact.whole + 1)
    model, source = tiny("marian"), Source(40)
    free = exact.whole - exact.cross
    assert features_for(model, 64, exact.cross + free, source) >= features_for(
        model, 64, exact.cross + free // 2, source
    )
    assert exact.one_window(exact.cross + free)[0][0] > 40  # what the source takes is not for windows


# --- What a byte is worth -------------------------------------------------------------------------------------


def limited(family="marian", made=None):
    model = tiny(family, torch.float32 if family == "fsmt" else torch.float64)  # its mask overflows in float64
    made = batch() if made is None else made
    text = Text([0], made.where.numel(), lambda blocks: made)
    return model, made, text, Limited(model, Costs.of(model, made.where.shape[1], source=Source(11)), text)


@families
def test_the_divergence_is_that_of_target_tokens_with_exact_cross_attention(family):
    model, made, text, measured = limited(family)
    windows = [[16, 23, 16, 30]] * 3
    plan = {"windows": windows, "sinks": SINKS, "states": [[False] * 4] * 3}
    rnn = t2r.swap(copy.deepcopy(model), plan=plan)
    with torch.no_grad():
        ours, theirs = (m(**made.inputs, use_cache=False).logits[made.where].log_softmax(-1) for m in (rnn, model))
    expected = (theirs.exp() * (theirs - ours)).sum(-1).mean()
    assert float(expected) > 1e-7
    assert measured.divergence(text, windows) == pytest.approx(float(expected), rel=1e-3)
    assert measured.divergence(text, [[layer.longest] * 4 for layer in measured.costs.layers]) == 0


def test_padding_is_worth_nothing():
    """A pair has the same divergence and worth alone, and padded beside longer ones."""
    made = batch()
    sizes = [torch.tensor([20.0, 25.0, 18.0, 22.0])] * 3
    each = []
    for row in range(3):
        ids = made.inputs["attention_mask"][row].bool()
        inputs = {name: made.inputs[name][row : row + 1, ids] for name in ("input_ids", "attention_mask")}
        target = made.inputs["decoder_input_ids"][row : row + 1, made.where[row]]
        alone = Batch(inputs | {"decoder_input_ids": target}, torch.ones_like(target, dtype=torch.bool))
        each.append((target.numel(), *limited()[3].worth(alone, sizes)))
    divergence, worth = limited()[3].worth(made, sizes)
    total = sum(count for count, _, _ in each)
    assert divergence == pytest.approx(sum(count * own for count, own, _ in each) / total, rel=1e-6)
    for i in range(3):
        mean = sum(count * own[i] for count, _, own in each) / total
        torch.testing.assert_close(worth[i], mean, rtol=1e-4, atol=1e-9)


def test_blocks_of_a_step_count_by_their_tokens():
    """Blocks of pairs are read one by one, because they differ in width."""
    made = [batch(rows=2), batch(rows=3, source=7, target=24, seed=5)]
    own, sizes = limited()[3], [torch.tensor([18.0, 22.0, 17.0, 20.0])] * 3
    text = Text(made, 64, lambda blocks: blocks[0], together=False)
    assert list(text.batches(10**6)) == text.batches_of([0, 1]) == made
    divergence, worth = Descent(own, text, lambda step: None, "a model", progress=False).worth(made, sizes)
    counts, each = [x.where.sum() for x in made], [own.worth(x, sizes) for x in made]
    mean = sum(count * found for count, (found, _) in zip(counts, each, strict=True)) / sum(counts)
    assert divergence == pytest.approx(float(mean))
    for i in range(3):
        mean = sum(count * found[i] for count, (_, found) in zip(counts, each, strict=True)) / sum(counts)
        torch.testing.assert_close(worth[i], mean.to(worth[i].dtype))


# --- Plans and conversions ------------------------------------------------------------------------------------


def test_plans_of_several_budgets(world, monkeypatch):
    memory = [budget_of(world, 0.2), budget_of(world, 0.8)]
    found = plan_memory(str(world / "marian"), memory, **pairs(world), states=False)
    assert all(each.used <= each.memory for each in found)
    assert {each.source_tokens for each in found} == {longest(world, "src")}
    assert {each.context for each in found} == {longest(world, "tgt")}
    assert {each.cross for each in found} == {costs_of(world).cross}
    assert found[0].divergence >= found[1].divergence
    # Another budget, and a source of another length, need no second descent; nor do states of the source.
    monkeypatch.setattr(Descent, "step", None)
    given = pairs(world)
    costs = costs_of(world)
    less = Costs.of(make_model(), costs.context, source=Source(20)).cross
    (shorter,) = plan_memory(
        str(world / "marian"), [memory[0] - costs.cross + less], **given, states=False, source_tokens=20
    )
    assert (shorter.source_tokens, shorter.cross) == (20, less)
    assert shorter.plan == found[0].plan
    (both,) = plan_memory(str(world / "marian"), [budget_of(world, 0.5, 32)], **given, recurrent="both")
    assert both.cross_features == 32
    assert both.cross == costs_of(world, 32).cross


@pytest.mark.parametrize("how", [{}, {"recipe": "none"}, {"recurrent": "both", "cross_feature_size": 8}])
def test_a_conversion_to_a_budget(world, tmp_path, how, caplog):
    both, out = "recurrent" in how, tmp_path / "rnn"
    memory = budget_of(world, 0.6, 8 if both else 0)
    valid = {"valid_source": str(world / "valid.src"), "valid_target": str(world / "valid.tgt")}
    overrides = () if "recipe" in how else SHORT
    with caplog.at_level("INFO", logger="t2r"):
        results = convert(
            str(world / "marian"), str(out), **pairs(world), **valid, memory=memory, overrides=overrides, **how
        )
    assert any("cross attention stays exact" in line for line in caplog.messages) != both
    planned = results["planned"]
    assert planned["used"] <= memory
    assert list(results["stages"]) == ([] if "recipe" in how else ["transfer", "distill"])
    rnn = AutoModelForSeq2SeqLM.from_pretrained(out)
    assert len(recurrent_sites(rnn)) == rnn.count_layers() * (0 if "recipe" in how else 1 + both)
    causal, cross = translation_memory(rnn)
    assert (cross.state, cross.token > 0) == ((planned["cross"], False) if both else (0, True))
    assert causal.token == 0
    assert cross.at(planned["source_tokens"]) == planned["cross"]
    page = t2r.report(out).read_text()
    assert page.count("<title>layer ") == sum(map(len, planned["plan"]["windows"]))
    kept = "has states of 8 features" if both else f"stays exact, .* for {planned['source_tokens']} source tokens"
    assert re.search(f"Cross attention {kept}", page)
    told = "\n".join(map(str, t2r.inspect(rnn).sites))
    assert f"windows={planned['plan']['windows'][0]}" in told


def test_a_plan_that_keeps_everything_translates_as_the_teacher(world, tmp_path):
    """In batches of different lengths, also of sources that are longer than planned."""
    whole = Costs.of(make_model(), 64, source=Source(longest(world, "src"))).whole
    results = convert(
        str(world / "marian"), str(tmp_path / "rnn"), **pairs(world), memory=whole, context=64, recipe="none", nbits=16
    )
    assert results["planned"]["divergence"] < 1e-6
    teacher, rnn = (AutoModelForSeq2SeqLM.from_pretrained(x) for x in (world / "marian", tmp_path / "rnn"))
    lines = ["w3 w4", " ".join(["w5 w6 w7"] * 19), "w9 w8 w7 w3 w4"]
    given = make_tokenizer()(lines, return_tensors="pt", padding=True)
    given = {name: given[name] for name in ("input_ids", "attention_mask")}
    for beams in (1, 3):
        how = {"max_new_tokens": 12, "num_beams": beams, "do_sample": False}
        expected = teacher.generate(**given, **how)
        assert torch.equal(rnn.generate(**given, **how), expected)
        assert torch.equal(Engine(rnn).generate(**given, **how), expected)


@pytest.mark.parametrize("recurrent", ["causal", "both"])
def test_states_of_a_plan_are_saved_and_continued(tmp_path, recurrent):
    """A batch of sources of different lengths: reordered, taken apart, saved, loaded, and read on."""
    windows = [[3, 7, 16, 5], [5] * 4, [0, 9, 2, 30]]
    model = t2r.swap(tiny("marian"), plan={"windows": windows, "sinks": 2}, feature_size=6, recurrent=recurrent).eval()
    made = batch(rows=3).inputs
    source = {name: made[name] for name in ("input_ids", "attention_mask")}
    tokens = made["decoder_input_ids"]
    with torch.no_grad():
        expected = model(**source, decoder_input_ids=tokens, use_cache=False).logits
        cache = model(**source, decoder_input_ids=tokens[:, :20], use_cache=True).past_key_values
        cache.save(tmp_path / "state")
        encoded = model.get_encoder()(**source)
        for held, rows in ((model.load_state(tmp_path / "state"), [0, 1, 2]), (cache.fork(1), [2, 0, 1])):
            held.batch_select_indices(torch.tensor(rows))
            out = model(
                encoder_outputs=(encoded[0][rows],),
                attention_mask=source["attention_mask"][rows],
                decoder_input_ids=tokens[rows, 20:],
                past_key_values=held,
            )
            torch.testing.assert_close(out.logits, expected[rows, 20:], atol=1e-5, rtol=1e-5)


# --- Bad input ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"memory": "1"}, "smallest plan of this model needs"),
        ({"memory": "1GiB"}, "with all keys and values of"),
        ({"memory": "20KiB", "context": 6400}, "longer than the model's"),
        ({"memory": "20KiB", "source_tokens": 6400}, "6,400 source tokens are more than the model's"),
        ({"memory": "20KiB", "recurrent": "cross"}, "give recurrent=causal or both, not cross"),
        ({"memory": "20KiB", "recurrent": "both", "recipe": "none"}, "states of cross attention must be trained"),
        ({"memory": "20KiB", "target": "teacher"}, "give targets"),
        ({"source_tokens": 64}, "source_tokens belongs to a memory budget"),
        ({"cross_feature_size": 8}, "changes nothing: cross attention stays exact"),
        (
            {"memory": "20KiB", "source": None, "target": None, "train": "x.txt"},
            "is an encoder-decoder: give it parallel",
        ),
    ],
)
def test_wrong_budgets_are_refused_and_leave_no_files(world, tmp_path, wrong, words, monkeypatch):
    monkeypatch.setattr(Descent, "step", None)  # nothing is measured
    with pytest.raises(T2RError, match=words):
        convert(str(world / "marian"), str(tmp_path / "rnn"), **pairs(world) | wrong)
    assert not list(tmp_path.glob("rnn*"))


def test_the_command_and_its_page(world, tmp_path, capsys):
    given = ["--src", world / "train.src", "--tgt", world / "train.tgt", "--memory", budget_of(world, 0.5)]
    words = ["plan", world / "marian", *given, "--device", "cpu"]
    assert cli.app(list(map(str, words)), standalone_mode=False) in (None, 0)
    told = capsys.readouterr().out
    assert f"for {longest(world, 'src')} source tokens" in told
    cli.app(list(map(str, [*words, "--json"])), standalone_mode=False)
    file = tmp_path / "plans.json"
    file.write_text(capsys.readouterr().out)
    assert json.loads(file.read_text())["plans"][0]["source_tokens"] == longest(world, "src")
    assert "Cross attention stays exact" in t2r.report(file).read_text()
