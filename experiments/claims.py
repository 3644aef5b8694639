"""The claims of the paper, each compared with records."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import correlation
from typing import Any

from t2r.experiments.cells import Cell, cells_of_record
from t2r.experiments.record import recorded

T2R, TRANSLATES = "t2r-32", "t2r-32-4"
"""The paper's sizes, also those of the scale small."""
Verdict = tuple[bool | None, str]
"""Whether a claim holds, or None if it is not decided; and the numbers that say so."""


class Missing(Exception):
    """The record does not have a value that a claim is about."""


class Cells(dict[str, Cell]):
    """The cells of a record, whose missing values raise `Missing`."""

    def value(self, name: str, measure: str) -> float:
        found = self[name][measure] if name in self else None
        if found is None:
            raise Missing(f"{measure} of {name}")
        return found

    def seconds(self, name: str) -> float:
        if name not in self or not self[name].seconds:
            raise Missing(f"time of {name}")
        return sum(self[name].seconds) / len(self[name].seconds)

    def by_size(self, start: str, measure: str, least: int = 2) -> dict[int, float]:
        """Return a measure by size, of the cells that are called `start`-K, of which there must be `least`."""
        names = {int(name.rpartition("-")[2]): name for name in self if name.rpartition("-")[0] == start}
        found = {size: self.value(name, measure) for size, name in sorted(names.items())}
        if len(found) < least:
            raise Missing(f"{measure} of {start}")
        return found


@dataclass(frozen=True)
class Claim:
    """A claim of the paper, the experiment that measures it, and a function of its record."""

    text: str
    experiment: str
    judge: Callable[[Any], Verdict]
    read: Callable[[Mapping[str, Any]], Any] = lambda record: Cells(cells_of_record(record))
    """Makes the argument of `judge` from the record."""
    repeated: tuple[str, ...] = ()
    """Other experiments whose records may have the same models, trained again."""


def verdicts(scale: str) -> list[tuple[Claim, Verdict | None]]:
    """Return all claims with their verdicts in the published records of a scale. None: not measured yet."""
    found = []
    for claim in CLAIMS:
        record = recorded(f"{claim.experiment}-{scale}")
        again = (recorded(f"{name}-{scale}") for name in claim.repeated)
        others = [other for other in again if other is not None]
        found.append((claim, None if record is None else judged(claim, record, others)))
    return found


def claims_list(scale: str) -> str:
    """Return a Markdown list of all claims, and whether they hold in the published records of a scale."""
    lines = []
    for claim, verdict in verdicts(scale):
        if verdict is None:
            call = f"t2r reproduce {claim.experiment} --scale {scale}"
            lines.append(f"- **not measured yet**: {claim.text} (`{call}`)\n")
        else:
            lines.append(f"- **{in_a_word(verdict)}**: {claim.text}. {verdict[1]}.\n")
    return "".join(lines)


def claims_of(record: Mapping[str, Any]) -> list[str]:
    """Return the claims that a record is about, as lines of text: whether each holds in it, and the numbers."""
    if "scale" not in record:
        return []
    found = [(claim, judged(claim, record)) for claim in CLAIMS if claim.experiment == record["experiment"]]
    return [f"{in_a_word(verdict)}: {claim.text}. {verdict[1]}." for claim, verdict in found if verdict is not None]


def in_a_word(verdict: Verdict) -> str:
    return "not decided" if verdict[0] is None else "holds" if verdict[0] else "does not hold"


def judged(claim: Claim, record: Mapping[str, Any], repeated: Sequence[Mapping[str, Any]] = ()) -> Verdict | None:
    """Return whether a claim holds in a record. None: the record does not have the values.

    A claim that holds in some but not all of the `repeated` records is not decided."""
    found: dict[Verdict, str] = {}
    for each in (record, *repeated):
        try:
            found.setdefault(claim.judge(claim.read(each)), each["experiment"])
        except Missing:
            if each is record:
                return None
    if len({holds for holds, _ in found}) == 1:
        return next(iter(found))
    return None, "; ".join(f"{told} ({name})" for (_, told), name in found.items())


# --- Language modeling --------------------------------------------------------------------------------------


def gains_from_pretraining(cells: Cells) -> Verdict:
    pairs = {
        name: [cells.value(f"{start}-{name}", "test") for start in ("random", "pretrained")] for name in (T2R, "rfa")
    }
    (t2r, better), (rfa, worse) = pairs[T2R], pairs["rfa"]
    return better < t2r and worse > rfa, f"T2R {t2r:.2f} to {better:.2f}, RFA {rfa:.2f} to {worse:.2f}"


def best_conversion(cells: Cells) -> Verdict:
    own = cells.value(f"pretrained-{T2R}", "test")
    others = rivals(cells, T2R, "test")
    told = ", ".join(f"{name} {value:.2f}" for name, value in others.items())
    return own < min(others.values()), f"T2R {own:.2f}; {told}"


def rivals(cells: Cells, t2r: str, measure: str, suffix: str = "") -> dict[str, float]:
    """Return a measure of the other recurrent models of a table, by name."""
    titles = {f"pretrained-{name}": name.upper() for name in ("elu", "rfa")}
    titles |= {f"random-{name}": f"{title} (random)" for name, title in (("elu", "ELU"), ("rfa", "RFA"), (t2r, "T2R"))}
    found = {title: cells.value(name + suffix, measure) for name, title in titles.items()}
    for name, title in (("pretrained-performer", "Performer"), ("random-performer", "Performer (random)")):
        if name + suffix in cells:  # the paper's tables do not have it
            found[title] = cells.value(name + suffix, measure)
    return found


def kept_layers_match(cells: Cells) -> Verdict:
    # A teacher that is given was not trained on the text of the others: the fair one is finetuned on it too.
    finetuned = "finetuned" in cells
    teacher = cells.value("finetuned" if finetuned else "teacher", "test")
    own, told = cells.value("pretrained-t2r-75-32", "test"), " finetuned on the same text" if finetuned else ""
    return own <= 1.01 * teacher, f"T2R-75% {own:.2f}, transformer{told} {teacher:.2f}; equal here means within 1 %"


def cheaper_conversion(names: tuple[str, str], least: float) -> Callable[[Cells], Verdict]:
    def judge(cells: Cells) -> Verdict:
        ratio = cells.seconds(names[0]) / cells.seconds(names[1])
        if cells[names[0]].machine != cells[names[1]].machine:
            raise Missing("times on one machine")
        return ratio >= least, f"{ratio:.1f} times the training time, counted as holding from {least:g}"

    return judge


def map_alone_is_worse(cells: Cells) -> Verdict:
    full = cells.value(f"pretrained-{T2R}", "test")
    alone, frozen = (cells.value(f"pretrained-t2r-{name}-32", "test") for name in ("maps", "frozen"))
    return full < min(alone, frozen), f"all {full:.2f}, only the map {alone:.2f}, all but the map {frozen:.2f}"


def few_parameters(cells: Cells) -> Verdict:
    base, own = (cells[name].parameters if name in cells else None for name in ("teacher", f"pretrained-{T2R}"))
    if not base or not own:
        raise Missing("parameters")
    share = 100 * (own / base - 1)
    return share < 0.2, f"{share:.2f} % here; the paper's own configuration computes to 0.24 %"


def common(cells: Cells, measure: str, *starts: str) -> list[dict[int, float]]:
    """Return a measure of several series of cells, by the feature sizes that all of them have."""
    series = [cells.by_size(start, measure) for start in starts]
    sizes = [size for size in series[0] if all(size in each for each in series)]
    if len(sizes) < 2:
        raise Missing("feature sizes")
    return [{size: each[size] for size in sizes} for each in series]


def matters_more_when_small(cells: Cells) -> Verdict:
    random, pretrained = common(cells, "valid", "random-t2r", "pretrained-t2r")
    gaps = {size: random[size] / pretrained[size] - 1 for size in random}
    smallest, largest = min(gaps), max(gaps)
    told = ", ".join(f"{100 * gap:+.1f} % at {size}" for size, gap in gaps.items())
    return gaps[smallest] > gaps[largest], f"Perplexity from random initialization, against pretrained: {told}"


def relu_is_best(cells: Cells) -> Verdict:
    found = {name: cells.value(f"activation-{name}", "test") for name in ("elu", "tanh", "cos")}
    relu = cells.value(f"pretrained-{T2R}", "test")
    told = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
    return relu <= min(found.values()), f"relu {relu:.2f}, {told}"


def tolerates_small_batches(cells: Cells) -> Verdict:
    loss = {}
    for start, kind in (("pretrained", "conversion-batch"), ("random", "scratch-batch")):
        sizes = cells.by_size(kind, "test", least=1)
        usual = cells.value(f"{start}-{T2R}", "test")
        if 0 < cells[f"{start}-{T2R}"].batch_tokens <= min(sizes):
            raise Missing("a small batch")
        loss[start] = sizes[min(sizes)] / usual - 1
    told = f"{100 * loss['pretrained']:+.1f} % in conversion, {100 * loss['random']:+.1f} % from random initialization"
    return loss["pretrained"] < loss["random"], f"Perplexity with the smallest batch: {told}"


def comes_closer(cells: Cells) -> Verdict:
    before, frozen, full = common(cells, "euclidean", "swapped", "pretrained-t2r-frozen", "pretrained-t2r")
    told = "; ".join(f"{size}: {before[size]:.3f}, {frozen[size]:.3f}, {full[size]:.3f}" for size in full)
    return (
        all(full[size] < frozen[size] < before[size] for size in full),
        f"By feature size, before, with the map frozen, and after: {told}",
    )


def closer_when_larger(cells: Cells) -> Verdict:
    full = cells.by_size("pretrained-t2r", "euclidean")
    return full[max(full)] < full[min(full)], ", ".join(f"{size}: {value:.3f}" for size, value in full.items())


def peakier(cells: Cells) -> Verdict:
    random, pretrained = common(cells, "entropy", "random-t2r", "pretrained-t2r")
    told = "; ".join(f"{size}: {random[size]:.2f}, {pretrained[size]:.2f}" for size in pretrained)
    holds = all(pretrained[size] < random[size] for size in pretrained) and all(
        side[max(side)] < side[min(side)] for side in (random, pretrained)
    )
    return holds, f"Entropy by feature size, from random initialization and pretrained: {told}"


def correlates(cells: Cells) -> Verdict:
    pairs = [
        (entropy, cells.value(f"{start}-{size}", "valid"))
        for start in ("random-t2r", "pretrained-t2r")
        for size, entropy in cells.by_size(start, "entropy").items()
    ]
    found = correlation(*zip(*pairs, strict=True))
    return found > 0.5, f"Pearson's correlation over {len(pairs)} models is {found:.2f}"


# --- Translation --------------------------------------------------------------------------------------------


def random_is_worst(cells: Cells) -> Verdict:
    found = {name: cells.value(f"random-{name}-en-de", "tokenized_bleu") for name in (TRANSLATES, "elu", "rfa")}
    own = found.pop(TRANSLATES)
    told = ", ".join(f"{name.upper()} {value:.1f}" for name, value in found.items())
    return own < min(found.values()), f"T2R {own:.1f}, {told} tokenized BLEU, EN-DE"


def conversion_translates_best(cells: Cells) -> Verdict:
    own = cells.value(f"pretrained-{TRANSLATES}-en-de", "tokenized_bleu")
    others = rivals(cells, TRANSLATES, "tokenized_bleu", "-en-de")
    told = ", ".join(f"{name} {value:.1f}" for name, value in others.items())
    return own > max(others.values()), f"T2R {own:.1f}; {told} tokenized BLEU, EN-DE"


def causal_matters_less(cells: Cells) -> Verdict:
    found = {
        (int(cell.labels["cross"]), int(cell.labels["causal"])): cells.value(name, "tokenized_bleu")
        for name, cell in cells.items()
        if "causal" in cell.labels
    }
    sizes = {size for both in found for size in both} or {0}
    largest, smallest = max(sizes), min(sizes)
    if largest == smallest or not {(largest, largest), (largest, smallest), (smallest, largest)} <= set(found):
        raise Missing("feature sizes")
    best = found[largest, largest]
    by_causal, by_cross = best - found[largest, smallest], best - found[smallest, largest]
    told = f"from {largest} to {smallest} features, causal attention loses {by_causal:.1f} BLEU, cross {by_cross:.1f}"
    return by_causal < by_cross, told[0].upper() + told[1:]


Points = Mapping[str, list[Mapping[str, Any]]]


def points_of(record: Mapping[str, Any]) -> Points:
    """Return the points of a benchmark of translation, by model, in the order of lengths."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for part in record["steps"]:
        if part["name"] == "translate" and "result" in part:
            for point in part["result"]["points"]:
                found.setdefault(point["model"], []).append(point)
    if not {"T2R 32-4", "ELU 64-64", "RFA 32-4"} <= set(found):
        raise Missing("translation")
    return found


def constant(points: Points) -> Verdict:
    own = points["T2R 32-4"]
    speeds = [point["tokens_per_second"] for point in own if point["length"] >= 128]
    if len(speeds) < 2:
        raise Missing("lengths from 128 tokens on")
    same = own[0]["cache_bytes"] == own[-1]["cache_bytes"]
    lengths = f"{own[0]['length']:,} to {own[-1]['length']:,}"
    told = (
        f"{min(speeds):,.0f} to {max(speeds):,.0f} tokens/s from 128 tokens on, counted as holding within 20 %; memory "
    )
    return same and max(speeds) < 1.2 * min(
        speeds
    ), f"{told}{'is' if same else 'is not'} the same from {lengths} tokens"


def faster_than_others(points: Points) -> Verdict:
    own = points["T2R 32-4"][-1]
    gains = {
        name: own["tokens_per_second"] / points[name][-1]["tokens_per_second"] - 1 for name in ("ELU 64-64", "RFA 32-4")
    }
    told = ", ".join(f"{100 * gain:+.0f} % against {name}" for name, gain in gains.items())
    return min(gains.values()) >= 0.15, f"{told}, at {own['length']:,} tokens"


def smaller_than_elu(points: Points) -> Verdict:
    less = 1 - points["T2R 32-4"][-1]["cache_bytes"] / points["ELU 64-64"][-1]["cache_bytes"]
    return less >= 0.65, f"{100 * less:.0f} % less, counted as holding from 65 %"


def steps_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the milliseconds of a decoding step of the language model, by model, after 512 tokens."""
    parts = [part for part in record["steps"] if part["name"] == "decode" and "result" in part]
    return {
        point["model"]: point["milliseconds"]
        for part in parts
        for report in part["result"]
        for point in report["points"]
        if point["length"] == 512
    }


def faster_generation(steps: Mapping[str, float]) -> Verdict:
    captured = {name: time for name, time in steps.items() if name.endswith(", engine") and "window" not in name}
    own = next((time for name, time in captured.items() if name.startswith("T2R ")), None)
    other = next((time for name, time in captured.items() if not name.startswith("T2R ")), None)
    if own is None or other is None:
        raise Missing("decoding")
    return other / own >= 3, f"{other / own:.1f} times as fast after 512 tokens, counted as holding from 3"


CLAIMS = (
    Claim("T2R from the pretrained transformer is the best of the recurrent models", "table1", best_conversion),
    Claim("T2R gains from pretraining, while RFA loses", "table1", gains_from_pretraining),
    Claim("T2R-75% is as good as the transformer", "table1", kept_layers_match),
    Claim(
        "Conversion is about 5 times cheaper than training from scratch",
        "table1",
        cheaper_conversion((f"random-{T2R}", f"pretrained-{T2R}"), 4.0),
        repeated=("figure-feature-size", "figure-entropy", "ablations"),
    ),
    Claim("Training only the map, or all but the map, is worse than training everything", "table1", map_alone_is_worse),
    Claim("T2R adds fewer than 0.2 % parameters", "table1", few_parameters),
    Claim("Pretraining matters more the smaller the feature size is", "figure-feature-size", matters_more_when_small),
    Claim("Other activations than relu do not help", "ablations", relu_is_best),
    Claim("Conversion tolerates small batches better than training from scratch", "ablations", tolerates_small_batches),
    Claim("Finetuning brings attention closer to the transformer's, less so with the map frozen", "figure-distance",
          comes_closer),
    Claim("Attention is closer to the transformer's with larger feature sizes", "figure-distance", closer_when_larger),
    Claim("Attention is peakier with larger feature sizes and with pretraining", "figure-entropy", peakier),
    Claim("Entropy of attention correlates with perplexity", "figure-entropy", correlates),
    Claim("In translation, T2R from the pretrained transformer is the best of the recurrent models", "table2",
          conversion_translates_best),
    Claim("In translation, T2R from random initialization is the worst", "table2", random_is_worst),
    Claim(
        "In translation, conversion is about 1.5 times cheaper than training from scratch",
        "table2",
        cheaper_conversion((f"random-{TRANSLATES}-en-de", f"pretrained-{TRANSLATES}-en-de"), 1.3),
    ),
    Claim("The feature size of causal attention matters less than that of cross attention", "ablations-mt",
          causal_matters_less),
    Claim("T2R generates about 4 times as fast as the transformer at 512 words", "figure-speed", faster_generation,
          steps_of),
    Claim("Tokens per second and memory of T2R do not depend on the length", "figure-speed", constant, points_of),
    Claim("T2R is at least 15 % faster than ELU and RFA", "figure-speed", faster_than_others, points_of),
    Claim("T2R has 70 % less memory for attention than ELU", "figure-memory", smaller_than_elu, points_of),
)  # fmt: skip
"""In the order of the paper."""
