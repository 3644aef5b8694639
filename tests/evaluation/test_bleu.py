"""Scores of translations, on sentences whose scores are known."""

import pytest

from t2r.evaluation.bleu import (
    bleu_by_length,
    copy_accuracy,
    every,
    language_of,
    moses,
    numbers,
    paired_bootstrap,
    score,
    tokenized_bleu,
)
from t2r.experiments.results import evaluation_tables

REFERENCES = [
    "Die E-Mail-Adresse von Anna ist nicht bekannt, sagte er.",
    "Im Jahr 2017 waren es 3,5 Prozent mehr als zuvor.",
    "Das ist (leider) nicht so einfach.",
]
TRANSLATIONS = [
    "Die E-Mail-Adresse von Anna ist unbekannt, sagte er.",
    "2017 waren es 3,5 Prozent mehr als vorher.",
    "Das ist nicht so einfach (leider).",
]


def test_words_are_those_of_moses_with_split_compounds():
    assert moses(["Annas E-Mail-Adresse (neu), z.B. heute."], "de") == [
        "Annas E ##AT##-##AT## Mail ##AT##-##AT## Adresse ( neu ) , z.B. heute ."
    ]
    assert moses(["A well-known fact, isn't it?"], "en") == ["A well-known fact , isn 't it ?"]


def test_tokenized_bleu_is_bleu_of_the_tokens():
    found = tokenized_bleu(TRANSLATIONS, REFERENCES, "de")
    sides = [moses(lines, "de") for lines in (TRANSLATIONS, REFERENCES)]
    assert found["tokenized_bleu"] == score(*sides, tokenize="none")["bleu"]
    assert found["tokenized_bleu"] != score(TRANSLATIONS, REFERENCES)["bleu"]
    assert "tok:moses-de|compounds:split|sacremoses:" in found["tokenized_bleu_signature"]
    assert "compounds" not in tokenized_bleu(["a b c d"], ["a b c d"], "en")["tokenized_bleu_signature"]
    chinese = tokenized_bleu(["我喜欢这本书。"], ["我喜欢这本书。"], "zh")
    assert chinese["tokenized_bleu"] == pytest.approx(100)
    assert "tok:zh" in chinese["tokenized_bleu_signature"]


@pytest.mark.parametrize(
    ("file", "target", "language"),
    [
        ("a/test.de", None, "de"),
        ("newstest2017.en.xz", None, "en"),
        ("test.txt", None, "en"),
        ("test.deu", None, "de"),
        ("datasets:wmt14:de-en:test@de", None, "de"),
        ("x", "deu_Latn", "de"),
        ("x", "zh_CN", "zh"),
    ],
)
def test_the_language_of_references(file, target, language):
    assert language_of(file, target) == language


def test_paired_bootstrap():
    good, bad = [*REFERENCES] * 20, ["das ist etwas anderes"] * 60
    first, same, worse = paired_bootstrap([good, good, bad], [*REFERENCES] * 20)
    assert first["bleu_interval"] == pytest.approx([100, 100])
    assert "bleu_p" not in first
    assert same["bleu_p"] == 1
    assert worse["bleu_p"] < 0.01
    assert worse["chrf_interval"][1] < 50


def test_bleu_by_length():
    parts = bleu_by_length(["a b c d", "x"], ["a b c d", "a b c d"], [4, 200])
    assert [(p["first"], p["last"], p["lines"]) for p in parts] == [(1, 10, 1), (61, None, 1)]
    assert parts[0]["bleu"] == pytest.approx(100)
    assert parts[1]["bleu"] == 0


def test_copied_numbers_and_names():
    sources = ["我在2017年用Firefox写了3.5行", "The report of Anna Schmidt cost 40 dollars", "Paris is far"]
    references = ["I wrote 3.5 lines in Firefox in 2017", "Der Bericht von Anna Schmidt kostete 40 Dollar", "Paris"]
    perfect = copy_accuracy(sources, references, references)
    # Paris begins a sentence; 40, 2017 and 3.5 are numbers; Firefox, Anna and Schmidt are names.
    assert perfect["numbers"] == {"total": 3, "copied": 3, "accuracy": 1.0}
    assert perfect["names"] == {"total": 3, "copied": 3, "accuracy": 1.0}
    found = copy_accuracy(sources, references, ["I wrote 35 lines in Firefox in 2017", "Anna Schmitt: 40", ""])
    assert found["numbers"]["copied"] == 2
    assert found["names"]["copied"] == 2
    assert copy_accuracy(["a w13"], ["a w13"], ["b"])["numbers"]["total"] == 0
    assert copy_accuracy(["a"], ["a"], ["a"])["names"]["accuracy"] is None


def test_the_table_of_a_record():
    first = {"model": "teacher", "source": "test.en.xz", "lines": 3, "beams": 5, **score(TRANSLATIONS, REFERENCES)}
    first |= tokenized_bleu(TRANSLATIONS, REFERENCES, "de")
    second = first | {"model": "rnn", "bleu_difference": -0.5, "bleu_p": 0.0123, "chrf_difference": 0.1}
    second["copied"] = {"numbers": {"total": 4, "copied": 3, "accuracy": 0.75}, "names": {"total": 0, "accuracy": None}}
    (table,) = evaluation_tables([first, second])
    assert "(-0.50, p = 0.012)" in table
    assert "75.0 %" in table
    assert "names" not in table


def test_numbers_and_words_are_whole():
    """A wrong number is not counted as right, because a part of it is."""
    assert numbers("12.5G, 3.5kg, 1.2.3 and 5; H200 at 10:30.") == {"1.2.3", "5", "10:30"}
    found = copy_accuracy(["我用 Python 写代码"], ["I write in Python."], ["I write in 'Python'."])
    assert found["names"] == {"total": 1, "copied": 1, "accuracy": 1.0}
    assert {"Python", "O'Neil", "well-known"} <= every("Python's O'Neil, a well-known-")
    assert language_of("test.tok") == "en"
