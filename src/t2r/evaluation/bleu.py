"""Scores of translations: BLEU and chrF by sacrebleu, the paper's tokenized BLEU, paired tests, and copied words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from t2r.errors import T2RError
from t2r.options import RunOptions
from t2r.words import extra

BLEU_TOKENIZE = RunOptions.bleu_tokenize
"""sacrebleu's default."""
NEEDS = f"BLEU needs the translation extra: {extra('translation')}"
OWN_TOKENIZERS = {"zh": "zh", "ja": "ja-mecab", "ko": "ko-mecab"}
"""Languages without spaces between words, which sacrebleu tokenizes itself."""
TWO_LETTERS = {
    "ces": "cs", "deu": "de", "eng": "en", "fra": "fr", "ita": "it", "jpn": "ja", "kor": "ko", "nld": "nl", "pol": "pl",
    "por": "pt", "rus": "ru", "spa": "es", "zho": "zh",
}  # fmt: skip
"""Codes of the Moses tokenizer for NLLB's."""
SPLIT_COMPOUNDS = ("de",)
"""Target languages whose compounds are split at hyphens before tokenized BLEU, as in published results for EN-DE."""
SAMPLES = 1000
"""Resamples of the paired bootstrap, sacrebleu's default."""
LENGTHS = (10, 20, 30, 40, 60)
"""Upper bounds of the ranges of source lengths, in tokens of the first model's tokenizer."""


def score(
    translations: Sequence[str], references: Sequence[str], *, tokenize: str = BLEU_TOKENIZE
) -> dict[str, float | str]:
    """Return BLEU and chrF by sacrebleu, with their signatures."""
    bleu, chrf = metrics(tokenize)
    if not references:
        raise T2RError("there are no references to score against")
    found = [metric.corpus_score(list(translations), [list(references)]) for metric in (bleu, chrf)]
    return {
        "bleu": found[0].score,
        "bleu_signature": str(bleu.get_signature()),
        "chrf": found[1].score,
        "chrf_signature": str(chrf.get_signature()),
    }


def metrics(tokenize: str = BLEU_TOKENIZE) -> tuple[Any, Any]:
    """Return sacrebleu's BLEU and chrF. Raises T2RError if they are not available."""
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError as error:
        raise T2RError(NEEDS) from error
    if tokenize not in BLEU.TOKENIZERS:
        raise T2RError(f"BLEU has no tokenizer {tokenize!r}: choose one of {', '.join(BLEU.TOKENIZERS)}")
    try:
        return BLEU(tokenize=tokenize), CHRF()
    except (ImportError, RuntimeError, OSError) as error:  # a tokenizer that needs a package or a file of its own
        raise T2RError(f"BLEU cannot use its tokenizer {tokenize!r}: {' '.join(str(error).split())}") from error


# --- Tokenized BLEU -----------------------------------------------------------------------------------------


def tokenized_bleu(translations: Sequence[str], references: Sequence[str], language: str) -> dict[str, Any]:
    """Return the paper's BLEU, and a signature that says how words were made.

    Translations and references are tokenized by Moses and not further. German compounds are split at hyphens, as is
    usual for EN-DE. Chinese, Japanese and Korean are tokenized by sacrebleu. It is a few points away from sacrebleu's
    default, and only comparable with other tokenized BLEU."""
    if own := OWN_TOKENIZERS.get(language):
        bleu, _ = metrics(own)
        found = bleu.corpus_score(list(translations), [list(references)]).score
        return {"tokenized_bleu": found, "tokenized_bleu_signature": str(bleu.get_signature())}
    bleu, _ = metrics("none")
    bleu._force = True  # no warning that the text looks tokenized: it is
    sides = [moses(lines, language) for lines in (translations, references)]
    found = bleu.corpus_score(sides[0], [sides[1]]).score
    compounds = "|compounds:split" if language in SPLIT_COMPOUNDS else ""
    made = f"tok:moses-{language}{compounds}|sacremoses:{version('sacremoses')}"
    return {
        "tokenized_bleu": found,
        "tokenized_bleu_signature": str(bleu.get_signature()).replace("tok:none", made),
    }


def moses(lines: Sequence[str], language: str) -> list[str]:
    """Tokenize lines with the Moses tokenizer, without escapes. German compounds are split at hyphens."""
    try:
        from sacremoses import MosesTokenizer
    except ImportError as error:
        raise T2RError(NEEDS) from error
    tokenizer = MosesTokenizer(lang=language)
    found = [tokenizer.tokenize(line, return_str=True, escape=False) for line in lines]
    if language in SPLIT_COMPOUNDS:
        found = [re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line) for line in found]
    return found


def language_of(reference: str | Path, target_language: str | None = None) -> str:
    """Return the language of references: that of the model's target language code, or of the file's ending
    (`test.de`, `test.de.xz`, `datasets:NAME@de`), or `en`."""
    if target_language:
        code = re.split(r"[_-]", target_language)[0].lower()
        return TWO_LETTERS.get(code, code)
    found = re.search(r"[.@]([a-z]{2,3})(?:\.(?:xz|gz|txt))*$", Path(str(reference)).name)
    if found is None or found[1] in ("txt", "xz", "gz", "ref", "tgt", "trg", "tok", "out", "bpe", "sgm", "spm"):
        return "en"
    return TWO_LETTERS.get(found[1], found[1])


# --- Comparison with the first model ------------------------------------------------------------------------


def paired_bootstrap(
    systems: Sequence[Sequence[str]], references: Sequence[str], *, tokenize: str = BLEU_TOKENIZE
) -> list[dict[str, Any]]:
    """Return the 95 % interval of BLEU and chrF of each system, and the p-value of its difference from the first.

    The same resamples of the test set are scored for both systems (Koehn 2004, by sacrebleu)."""
    from sacrebleu.significance import PairedTest

    bleu, chrf = metrics(tokenize)
    named: list[tuple[str, Sequence[str]]] = [(str(i), list(lines)) for i, lines in enumerate(systems)]
    test = PairedTest(named, {"bleu": bleu, "chrf": chrf}, [list(references)], test_type="bs", n_samples=SAMPLES)
    _, scores = test()
    columns = [column for name, column in scores.items() if name != "System"]
    found = []
    for lines, results in zip(systems, zip(*columns, strict=True), strict=True):
        row: dict[str, Any] = {}
        same = list(lines) == list(systems[0])  # sacrebleu's p-value is the smallest possible one for equal outputs
        for name, result in zip(("bleu", "chrf"), results, strict=True):
            row[f"{name}_interval"] = [float(result.mean - result.ci), float(result.mean + result.ci)]
            if result.p_value is not None:
                row[f"{name}_p"] = 1.0 if same else float(result.p_value)
        found.append(row)
    return found


def bleu_by_length(
    translations: Sequence[str], references: Sequence[str], lengths: Sequence[int], *, tokenize: str = BLEU_TOKENIZE
) -> list[dict[str, Any]]:
    """Return BLEU by source length: `first` to `last` tokens (None: no limit), `lines`, `bleu`."""
    bleu, _ = metrics(tokenize)
    found, first = [], 1
    for last in (*LENGTHS, None):
        chosen = [i for i, n in enumerate(lengths) if n >= first and (last is None or n <= last)]
        if chosen:
            ours, theirs = ([side[i] for i in chosen] for side in (translations, references))
            value = bleu.corpus_score(ours, [theirs]).score
            found.append({"first": first, "last": last, "lines": len(chosen), "bleu": value})
        first = (last or 0) + 1
    return found


# --- Copying ------------------------------------------------------------------------------------------------

# Not the digits of H200, 5G or 12.5kg, nor a part of them.
NUMBER = re.compile(r"(?<![A-Za-z\d])(?<!\d[.,:])\d++(?:[.,:]\d++)*+(?![A-Za-z\d])")
# Words end with a letter or digit: no quotes, hyphens or possessives.
LATIN = re.compile(r"[A-Za-zÀ-ÖØ-öø-ɏ](?:(?!'s\b)[A-Za-z0-9_À-ÖØ-öø-ɏ'-])*(?<!['-])")
WORD = re.compile(r"[^\W\d_](?:(?!'s\b)[\w'-])*(?<!['-])")


def copy_accuracy(
    sources: Sequence[str], references: Sequence[str], translations: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return how many numbers and names that stand in both source and reference also stand in the translation.

    A name is a capitalized word inside a sentence, or, in a source in another script, any word in Latin letters."""
    found = {}
    for kind, find in (("numbers", numbers), ("names", names)):
        total = copied = 0
        for source, reference, translation in zip(sources, references, translations, strict=True):
            wanted = find(source) & every(reference)
            total += len(wanted)
            copied += len(wanted & every(translation))
        found[kind] = {"total": total, "copied": copied, "accuracy": copied / total if total else None}
    return found


def numbers(text: str) -> set[str]:
    return set(NUMBER.findall(text))


def names(text: str) -> set[str]:
    """Return the words of a source that are expected to be copied."""
    letters = [char for char in text if char.isalpha()]
    latin = sum(char < "\u0250" for char in letters)
    if latin < 0.9 * len(letters):  # another script, with product names and code between
        return {word for word in LATIN.findall(text) if len(word) > 1}
    return {word for word in WORD.findall(text)[1:] if len(word) > 1 and word[0].isupper()}


def every(text: str) -> set[str]:
    """Return all numbers and words of a text."""
    return {*NUMBER.findall(text), *WORD.findall(text), *LATIN.findall(text)}
