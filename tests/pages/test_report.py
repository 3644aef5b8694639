"""Reports: one page for each kind of result, which a real browser shows without errors, requests or overflow."""

import json
import sys
import xml.etree.ElementTree as ElementTree

import pytest
from typer.testing import CliRunner

import browser
import t2r
from families import tiny
from t2r import T2RError
from t2r.cli import app
from t2r.evaluation.overview import names_of
from t2r.experiments.record import REPOSITORY, recorded
from t2r.experiments.tables import record_tables

RECALL = {"distance": 16, "accuracy": 0.5, "chance": 0.125, "greedy": 0.4, "trials": 256, "interval": [0.4, 0.6]}
LOG = [{"step": step, "loss": 2.0 / step, "learning_rate": 1e-3} for step in (1, 2, 3)]
SCORES = {"perplexity": 20.0, "kl": 0.1, "tokens": 100, "word_perplexity": None, "bits_per_byte": None}
CONVERSION = {
    "task": "language-modeling",
    "teacher": SCORES | {"perplexity": 16.0, "kl": None},
    "swapped": SCORES | {"perplexity": 900.0},
    "stages": {"transfer": SCORES | {"perplexity": 40.0}, "distill": SCORES},
    "log": {"transfer": LOG, "distill": LOG},
    "mixture": [{"source": "a/<long>.txt", "tokens": 1000, "read": {"transfer": 500}, "share_read": 50.0}],
    "sensitivity": [[2, 0.5], [0, 0.25]],
    "recall": [RECALL],
    "teacher_recall": [RECALL | {"accuracy": 0.9375, "interval": [0.9, 0.96]}],
    "samples": [{"prompt": "She opened", "teacher": " the <door>.", "model": " a window. " * 30}],
    "speed": {"batch": 1, "dtype": "float32", "device": "cpu", "threads": 2}
    | {"points": [{"tokens": 512, "teacher": 20.0, "model": 30.0}]},
    "memory": [{"tokens": 512, "teacher": 2**20, "model": 2**21}, {"tokens": 4096, "teacher": 2**23, "model": 2**21}],
    "made": {"date": "2026-01-01", "command": "t2r convert " + "--option value " * 40, "versions": {"torch": "2.13"}},
}
EVALUATION = [
    {"model": f"models/{name}", "recall": [RECALL, RECALL | {"distance": 64}]} for name in ("teacher", "a" * 90)
]


@pytest.fixture(scope="module")
def conversion(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "rnn"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(CONVERSION))
    (folder / "recipe.yaml").write_text("name: mine\nstages: []\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "t2r", "feature_size": 32, "decay": True}))
    return folder


def words(path):
    """Return the text of a page, which must be well-formed."""
    return " ".join(" ".join(ElementTree.fromstring(path.read_bytes()).itertext()).split())


def test_a_conversion(conversion):
    path = t2r.report(conversion)
    assert path == conversion / "report.html"
    text = words(path)
    for part in (
        "Perplexity 20.00, +25.0 % against the teacher's 16.00",
        "transfer: loss",
        "feature_size",
        "name: mine",
        "<long>.txt",
        "torch",
    ):
        assert part in text, part


def test_a_conversion_begins_with_what_was_lost_and_saved(conversion):
    text = words(t2r.report(conversion))
    for part in (
        "perplexity 16.00 20.00 +25.0 %",
        "KL to the teacher, nats per token 0.1000",
        "memory of a sequence, 512 tokens 1.0 MiB 2.0 MiB 2.0× more",
        "memory of a sequence, 4,096 tokens 8.0 MiB 2.0 MiB 4.0× less",
        "tokens per second, after 512 tokens 20 30 1.50×",
        "recall of a word after 16 tokens 94 % (90-96) 50 % (40-60) -44 points",
        "the keys and values of 1,024 tokens",
        "TEACHER:window=1020,sinks=4",
        "batch 1, float32 on cpu (2 threads)",
        "256 trials, chance 12.5 %",
        "Prompt: \u201cShe opened\u201d teacher the <door>. this model a window.",
    ):
        assert part in text, part
    assert text.index("recall of a word") < text.index("Samples") < text.index("Stages") < text.index("transfer: loss")
    page = (conversion / "report.html").read_text()
    assert "From the teacher" not in page  # no bars of perplexity


OLD = ("recall", "teacher_recall", "samples", "speed", "memory")


def test_results_of_older_versions(tmp_path):
    """They lack what was measured beside the teacher. Memory is that of the model in the folder."""
    model = t2r.swap(tiny("llama"), feature_size=8)
    model.save_pretrained(tmp_path)
    results = {name: value for name, value in CONVERSION.items() if name not in OLD}
    (tmp_path / "results.json").write_text(json.dumps(results | {"recall": [RECALL]}))
    stages = "[{name: transfer, train: maps}, {name: distill, train: all, map_learning_rate: 1e-2}]"
    (tmp_path / "recipe.yaml").write_text(f"stages: {stages}")
    text = words(t2r.report(tmp_path))
    assert "recall of a word after 16 tokens 50 % (40-60)" in text
    assert "memory of a sequence" in text
    assert "this folder holds a t2r model" not in text  # it is in the place of the base model's dtype
    assert "dtype float64" in text
    assert "Samples" not in text
    # The learning rate that they logged is that of the maps.
    assert "distill: learning rate of the maps" in text
    assert "transfer: learning rate" in text
    assert "transfer: learning rate of" not in text


def test_the_learning_rates_of_a_stage(tmp_path):
    log = [{**entry, "map_learning_rate": 1e-2} for entry in LOG]
    (tmp_path / "results.json").write_text(json.dumps(CONVERSION | {"log": {"distill": log}}))
    assert "distill: learning rate; that of the maps is 10 times as high" in words(t2r.report(tmp_path))


def test_without_matplotlib(conversion, tmp_path, monkeypatch):
    """After a plain install, a page has no figures, and a line says which extra adds them."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "evaluation.json").write_text(json.dumps(EVALUATION))
    out = tmp_path / "all.html"
    done = CliRunner().invoke(app, ["report", str(conversion), str(tmp_path / "evaluation.json"), "--out", str(out)])
    assert done.exit_code == 0
    how = "pip install '.[plots]' in a clone of t2r"
    assert done.stderr == f"t2r: note: the page has no figures: they require the plots extra, {how}\n"
    assert done.stdout.strip() == str(out)
    assert "<figure>" not in out.read_text()
    assert "perplexity 16.00 20.00" in words(out)
    record = REPOSITORY / "records" / "figure-distance-small.json"
    assert "Euclidean distance" in words(t2r.report(str(record), tmp_path / "record.html"))


def test_the_record_of_an_experiment(tmp_path):
    record = recorded("smollm2-decode-gpu")
    (tmp_path / "record.json").write_text(json.dumps(record))
    text = words(t2r.report(tmp_path))
    for point in record["steps"][0]["result"][0]["points"]:
        assert f"{point['milliseconds']:.2f}" in text
    assert "t2r bench decode" in text
    assert "tokens/s" in text


def test_every_published_record_has_a_page(tmp_path):
    for file in sorted((REPOSITORY / "records").iterdir()):
        record = json.loads(file.read_text())
        text = words(t2r.report(str(file), tmp_path / "page.html"))
        tables = [table for table in record_tables(record) if not table.startswith("| ms per step")]
        for cell in (cell for table in tables for cell in table.splitlines()[-1].strip("| ").split("|")):
            assert " ".join(cell.split()) in text


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """Return the folder of two grids: one shipped, with figures of its own, and one that is not."""
    rows = [{"first": i, "last": i, "model": 0.5, "teacher": 0.4} for i in range(3)]
    steps = [{"cell": {"model": "teacher"}, "name": "teacher", "command": "t2r pretrain x teacher", "seconds": 1.0}]
    for k in (8, 64):
        name, cell = f"pretrained-t2r-{k}", {"model": "full", "k": str(k)}
        scores = {"text": "valid", "window": 8, "tokens": 9, "perplexity": 10.0 * k}
        analysis = {"model": name, "teacher": "teacher", "by_distance": rows, "mean": {"euclidean": 1 / k}}
        for step, command, result in (
            (name, f"t2r convert teacher {name}", {"seconds": {"a": 1.0}}),
            (f"quality-{k}", f"t2r evaluate {name}", [{"model": name} | scores]),
            (f"analysis-{k}", f"t2r analyze {name}", analysis),
        ):
            steps.append({"cell": cell, "name": step, "command": command, "seconds": 1.0, "result": result})
    folder = tmp_path_factory.mktemp("grid")
    for name in ("figure-distance", "mine"):
        record = {"experiment": name, "scale": "paper", "date": "2026-01-01", "machine": {"cores": 2}, "steps": steps}
        (folder / f"{name}-paper.json").write_text(json.dumps(record))
    return folder


def test_the_folder_of_a_grid(grid):
    """The records of experiments with scales are named after them, and several can share a folder."""
    text = words(t2r.report(grid))
    shipped, _, mine = text.partition("Experiment mine")
    assert "Experiment figure-distance" in shipped
    # The figures of the experiment, with a line for each label, come before those that every grid has.
    assert "Distance to the teacher's attention by feature size" in shipped
    assert shipped.index("finetuned") < shipped.index("Perplexity of each model")
    assert "finetuned, 64" in shipped  # the title of a bar, made from the labels of its cell
    assert "holds: Attention is closer to the transformer's with larger feature sizes. 8: 0.125, 64: 0.016." in shipped
    assert "Claims of the paper" not in mine
    assert "Distance to" not in mine
    for part in (shipped, mine):
        assert part.count("Attention by distance") == 1
        for number in ("640.00", "0.125"):
            assert number in part


def test_several_results_on_one_page(tmp_path, conversion):
    (tmp_path / "evaluation.json").write_text(json.dumps(EVALUATION))
    out = tmp_path / "all.html"
    run = CliRunner().invoke(app, ["report", str(conversion), str(tmp_path / "evaluation.json"), "--out", str(out)])
    assert run.stdout.strip() == str(out)
    assert "Conversion: rnn" in words(out)
    assert "Recall by distance" in words(out)


def test_models_with_the_same_folder_name_are_distinguished():
    results = [{"model": model} for model in ("runs/a/rnn", "runs/b/rnn", "teacher")]
    assert names_of(results) == ["a/rnn", "b/rnn", "teacher"]
    assert names_of(results[:1] * 2) == ["rnn (1)", "rnn (2)"]
    assert names_of([results[0], results[0] | {"variant": "window"}]) == ["rnn", "rnn, window"]


def test_no_results(tmp_path):
    with pytest.raises(T2RError, match="neither results"):
        t2r.report(tmp_path)
    (tmp_path / "x.json").write_text('{"a": 1}')
    with pytest.raises(T2RError, match="not a result"):
        t2r.report(tmp_path / "x.json")
    with pytest.raises(T2RError, match="does not exist"):
        t2r.report(tmp_path / "nothing")
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize(
    "content",
    ['{"stages": [], "task": "x"}', '{"stages": {"a": 1}}', '{"by_distance": []}', '{"rows": [], "settings": {}}',
     '{"experiment": "x"}', '[{"model": 3}]', '[{"model": "x"}, 3]'],
)  # fmt: skip
def test_results_of_another_form(tmp_path, content):
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(T2RError, match="not a complete result"):
        t2r.report(tmp_path / "x.json")
    assert not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize("out", ["", "/"])
def test_a_page_without_a_name(tmp_path, out):
    (tmp_path / "x.json").write_text('{"stages": {}}')
    with pytest.raises(T2RError, match="out must be the path of the HTML file"):
        t2r.report(tmp_path / "x.json", out)


@pytest.mark.skipif(browser.PROGRAM is None, reason="no Chromium or Chrome is installed")
def test_in_a_browser(tmp_path, conversion, grid):
    (tmp_path / "evaluation.json").write_text(json.dumps(EVALUATION))
    page = t2r.report([conversion, tmp_path / "evaluation.json", grid], tmp_path / "all.html")
    phone = browser.measure(page, tmp_path, 390, dark=True)
    desk = browser.measure(page, tmp_path, 1200)
    for seen in (phone, desk):
        assert not seen["console"]
        assert not seen["requests"]
        assert not seen["wide"]
        assert seen["scroll"] <= seen["width"]
        assert seen["figures"] == 5 + 5
        assert seen["tables"] >= 7
    assert phone["width"] == 390
    assert phone["background"] != desk["background"]


@pytest.mark.skipif(browser.PROGRAM is None, reason="no Chromium or Chrome is installed")
def test_the_browser_sees_a_broken_page(tmp_path):
    bad = tmp_path / "bad.html"
    bad.write_text('<div style="width:900px">wide</div><img src="http://example.org/a.png"><script>nothing()</script>')
    seen = browser.measure(bad, tmp_path, 390)
    assert seen["wide"] == ["DIV."]
    assert seen["scroll"] > seen["width"]
    assert seen["requests"]
    assert seen["console"]
