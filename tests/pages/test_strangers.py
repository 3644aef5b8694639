"""Pages of results that strangers wrote: they read no other files, and any contents are a page or one error."""

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

import t2r
from t2r import T2RError

PERPLEXITY = {
    "model": "models/rnn",
    "text": "a.txt",
    "tokens": 9,
    "window": 512,
    "stride": 256,
    "perplexity": 3.0,
    "interval": [2.0, 4.0],
    "word_perplexity": 5.0,
    "bits_per_byte": 1.0,
    "kl": 0.1,
    "agreement": 0.9,
    "by_position": [{"first": 1, "last": 8, "perplexity": 4.0}, {"first": 9, "last": 16, "perplexity": 3.0}],
}
RECALL = {"distance": 16, "accuracy": 0.5, "chance": 0.125, "greedy": 0.4, "trials": 256, "interval": [0.4, 0.6]}
TRANSLATED = {
    "model": "models/rnn",
    "parameters": 5,
    "source": "a.zh",
    "reference": "a.en",
    "lines": 2,
    "beams": 5,
    "length_penalty": 0.6,
    "bleu": 20.0,
    "chrf": 40.0,
    "bleu_signature": "x",
    "chrf_signature": "y",
    "by_length": [
        {"first": 1, "last": 8, "bleu": 20.0, "lines": 1},
        {"first": 9, "last": 16, "bleu": 20.0, "lines": 1},
    ],
    "copied": {},
}
SCORES = {"perplexity": 20.0, "kl": 0.1, "tokens": 100, "word_perplexity": None, "bits_per_byte": None}
LOG = [{"step": step, "loss": 2.0 / step, "learning_rate": 1e-3, "map_learning_rate": 1e-2} for step in (1, 2, 3)]
CONVERSION = {
    "task": "language-modeling",
    "teacher": SCORES,
    "swapped": SCORES,
    "stages": {"distill": SCORES},
    "log": {"distill": LOG},
    "mixture": [{"source": "a.txt", "tokens": 1000, "read": {"distill": 500}, "share_read": 50.0}],
    "sensitivity": [[2, 0.5]],
    "recall": [RECALL],
    "teacher_recall": [RECALL],
    "samples": [{"prompt": "She", "teacher": " the", "model": " a"}],
    "speed": {"batch": 1, "dtype": "float32", "device": "cpu", "threads": 2}
    | {"points": [{"tokens": 512, "teacher": 20.0, "model": 30.0}]},
    "memory": [{"tokens": 512, "teacher": 2**20, "model": 2**21}],
    "advice": "far",
    "made": {
        "date": "2026-01-01",
        "command": "t2r",
        "versions": {"torch": "2"},
        "devices": {"cpu": {"cores": 2, "threads": 2}},
    },
}
PLANS = {
    "plans": [
        {
            "memory": 1000,
            "used": 900 + extra,
            "divergence": 0.1,
            "one_window": 32,
            "one_window_divergence": 0.2,
            "recall": 0.5,
            "features": 8,
            "context": 64,
            "plan": {"windows": [[4, 64], [0, 8]], "sinks": 2, "states": [True, True]},
        }
        for extra in (0, 9)
    ]
}
RECORD = {
    "experiment": "ops-cpu",
    "complete": True,
    "date": "2026-01-01",
    "machine": {"cpu": "x", "cores": 2, "threads": 2, "gpus": []},
    "versions": {"torch": "2"},
    "commit": None,
    "steps": [
        {"name": "a", "command": "t2r evaluate x", "seconds": 1.0, "result": [PERPLEXITY]},
        {"name": "b", "command": "t2r convert x b", "seconds": 1.0, "result": {"stages": {"distill": SCORES}}},
    ],
}
BENCHMARK = {"settings": {"batch": 1}, "rows": [{"length": n, "model": "x", "tokens_per_second": 1.5} for n in (8, 9)]}
RESULTS = {
    "conversion": CONVERSION,
    "evaluation": [PERPLEXITY | {"recall": [RECALL]}] * 2,
    "translation": [TRANSLATED],
    "plans": PLANS,
    "record": RECORD,
    "benchmark": BENCHMARK,
}
STRANGE = (0, None, 2**63, "x", [])


def changed(value: Any) -> Iterator[Any]:
    """Yield copies of a result with each of its parts replaced."""
    yield from STRANGE
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        for other in changed(part):
            copied = copy.copy(value)
            copied[key] = other
            yield copied


@pytest.mark.parametrize("name", RESULTS)
def test_any_part_may_be_wrong(tmp_path, monkeypatch, name):
    """Without figures, which take most of the time."""
    monkeypatch.setattr("t2r.reporting.page.can_draw", lambda: False)
    path = tmp_path / "x.json"
    path.write_text(json.dumps(RESULTS[name]))
    t2r.report(path)
    for result in changed(RESULTS[name]):
        path.write_text(json.dumps(result))
        with suppress(T2RError):
            t2r.report(path)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("[" * 10_000 + "]" * 10_000, id="10,000 levels"),
        pytest.param(
            '{"stages": {}, "teacher": {"perplexity": 0}, "memory": [{"tokens": 1, "teacher": 1, "model": 0}]}'
        ),
        pytest.param('{"stages": {"a": {"perplexity": 1e400}}, "teacher": {"perplexity": 3}}', id="an infinity"),
        pytest.param(f'{{"stages": {{"a": {{"perplexity": {10**400}}}}}, "teacher": null}}', id="a big integer"),
        pytest.param('{"plans": [{"used": 0}]}', id="zero bytes"),
        pytest.param('{"settings": {}, "rows": []}', id="no rows"),
        pytest.param('{"settings": {}, "rows": [{"length": 0, "model": "a", "tokens_per_second": Infinity}]}', id="0"),
    ],
)
def test_numbers_that_are_none(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with suppress(T2RError):
        t2r.report(path)


SECRET = "the secret of the user"


def test_files_outside_of_a_result_are_not_shown(tmp_path, caplog):
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "1-rnn.txt").write_text(SECRET)
    folder = tmp_path / "result"
    (folder / "texts").mkdir(parents=True)
    (folder / "texts" / "1-rnn.txt").write_text("its own translation\n" * 20)
    (folder / "texts" / "2-rnn.txt").symlink_to(tmp_path / "secret")
    (folder / "notes.txt").write_text(SECRET)
    outside = ("/etc/passwd", "/proc/self/environ", tmp_path / "secret", tmp_path / "1-rnn.txt", folder / "notes.txt")
    for output in (*outside, folder / "texts" / "2-rnn.txt", folder / "texts" / ".." / ".." / "1-rnn.txt"):
        caplog.clear()
        (folder / "x.json").write_text(json.dumps([TRANSLATED | {"output": str(output)}]))
        page = t2r.report(folder / "x.json").read_text()
        assert "Translations" not in page, output
        assert SECRET not in page
        assert "is not shown" in caplog.text, output
    own = folder / "texts" / "1-rnn.txt"
    (folder / "x.json").write_text(json.dumps([TRANSLATED | {"output": str(own)}]))
    assert t2r.report(folder / "x.json").read_text().count("its own translation") == 8


@pytest.mark.parametrize("name", ["recipe.yaml", "config.json"])
def test_links_out_of_a_folder_are_not_shown(tmp_path, name):
    (tmp_path / "secret").write_text(json.dumps({"model_type": SECRET}))
    folder = tmp_path / "rnn"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(CONVERSION))
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(T2RError, match=f"{name} is outside of"):
        t2r.report(folder)
    assert not (folder / "report.html").exists()


def test_steps_outside_of_an_experiment_are_not_shown(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "results.json").write_text(json.dumps(CONVERSION))
    folder = tmp_path / "work"
    folder.mkdir()
    steps = [{"name": "../other", "command": "t2r convert x y", "seconds": 1.0, "result": CONVERSION}]
    (folder / "record.json").write_text(json.dumps(RECORD | {"steps": steps}))
    with pytest.raises(T2RError, match="is outside of"):
        t2r.report(folder)
