"""Converts a small transformer into an RNN, and measures the quality, speed and memory of both.

The teacher is a small GPT-2 that `t2r pretrain` trained on novels. It is in this folder, with excerpts of
novels. No GPU or network is required. The demo takes five minutes, or twenty with --full, on any machine: training ends
when its time is over, and a slow or busy machine makes fewer steps. An interrupted demo is resumed by the same command.
All numbers are measured during the run and written to an HTML page.
"""

from __future__ import annotations

import time

BEGAN = time.perf_counter()  # includes the import of torch

import json
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

import t2r
from t2r.bench import decoding, figures
from t2r.reporting import COLORS, Page, bars, environment, lines, terminal

HERE = Path(__file__).parent


# --- Conversions and their time budgets ---------------------------------------------------------------------

MINUTES, FULL_MINUTES = 5, 20
WINDOWS, FULL_WINDOWS = 32, 64
"""Maximum number of windows on which perplexity is measured."""

# In a few minutes, the number of steps matters more than their size: a batch is one block of text.
BLOCKS = ["block_size=512", "batch_tokens=512"]
TRANSFER = [
    "transfer.minutes=0.45",  # a share of the training time
    "transfer.optimizer=muon",  # with heads this small, as good after 150 steps as AdamW after 450
    "transfer.learning_rate=3e-2",
    "transfer.warmup_steps=10",
]
# Small batches are noisy, so the pretrained weights have a small learning rate.
DISTILL = [
    "distill.minutes=0.55",
    "distill.learning_rate=1e-4",
    "distill.map_learning_rate=5e-3",
    "distill.betas=[0.8,0.95]",
    "distill.schedule=linear",
    "distill.warmup_steps=10",
]
LEARNED = {"feature_size": 32}


@dataclass(frozen=True)
class Student:
    """One conversion of the teacher: a recipe, options of the swap, and its share of the time."""

    name: str
    share: float
    recipe: str = "distill-lm"
    overrides: list[str] = field(default_factory=lambda: [*BLOCKS, *TRANSFER, *DISTILL])
    options: dict[str, Any] = field(default_factory=lambda: dict(LEARNED))
    merged: bool = True
    """Merge the feature maps into the projections."""


STUDENTS = [Student("RNN", share=1.0)]
FULL_STUDENTS = [
    Student("RNN", share=0.54),
    Student("T2R-75%", share=0.39, options=LEARNED | {"softmax_every": 4}),  # every fourth layer keeps softmax
    Student("ELU", share=0.07, recipe=str(HERE / "elu.yaml"), overrides=BLOCKS, options={}, merged=False),
]

PROMPT = "She opened the letter, and"
SAMPLE: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0, "max_new_tokens": 120, "seed": 0}
LENGTHS = (512, 2048, 8192)


# --- The demo -----------------------------------------------------------------------------------------------


def demo(teacher: str, train: str, valid: str, out: Path, full: bool, prompt: str, console: Console) -> None:
    torch.set_flush_denormal(True)  # decaying features produce denormals, which are slow on a CPU
    minutes, students = (FULL_MINUTES, FULL_STUDENTS) if full else (MINUTES, STUDENTS)
    page = Page("A transformer becomes an RNN")

    console.rule("The teacher")
    model, tokenizer = t2r.load(teacher, dtype="float32"), t2r.load_tokenizer(teacher)
    if tokenizer is None:
        raise t2r.T2RError(f"{teacher} has no tokenizer: give a model folder that has one")
    what = f"{model.config.model_type}, {model.num_parameters():,} parameters"
    console.print(what, highlight=False)
    page.paragraph(f"The teacher is {what}.")
    with one_thread():
        began = time.perf_counter()
        t2r.generate(model, prompt, tokenizer=tokenizer, **SAMPLE)
        sample = time.perf_counter() - began
    # Reserved for after the conversions: a tenth of the time for evaluation, and samples of every model.
    later = 6 * minutes + 4 * sample * (1 + len(students))
    left = minutes - (time.perf_counter() - BEGAN + later) / 60

    results: dict[str, dict[str, Any]] = {}
    models: dict[str, Any] = {"teacher": model}
    for student in students:
        console.rule(f"Converted: {student.name}")
        folder = out / student.name.lower().strip("%")
        merged = student.merged and model.config.model_type == "gpt2"  # which can always be merged
        asked = {"train": train, "valid": valid, "limit": FULL_WINDOWS if full else WINDOWS, "merged": merged}
        share = max(student.share * left, student.share * minutes / 4)
        results[student.name] = convert(teacher, student, asked, minutes, round(share, 3), folder, console)
        models[student.name] = t2r.load(folder, dtype="float32")
        show_conversion(student.name, results[student.name], folder, valid, page, console)
    if len(students) > 1:
        console.rule("Comparison")
        show_scores(results, page, console)
    show_training(results, page)

    with one_thread():
        console.rule("Samples")
        show_samples(models, tokenizer, prompt, page, console)
        console.rule("Cost per generated token")
        lengths = fitting(models, 60 * minutes - (time.perf_counter() - BEGAN))
        with console.status("") as status:
            report = decoding.run(models, lengths, steps=8, repeats=3, progress=status.update)
        for part in decoding.tables(report):
            terminal.show(part, console)
        page.heading("Cost per generated token")
        figures.add_decoding(page, report)

    seconds = time.perf_counter() - BEGAN
    show_machine(seconds, page)
    page.write(out / "index.html")
    reached = ", ".join(f"{name} {final(result):.2f} ({against(result)})" for name, result in results.items())
    first = score(next(iter(results.values()))["teacher"])
    console.print(f"\nPerplexity: teacher {first:.2f}, {reached}, in {seconds / 60:.1f} minutes", highlight=False)
    console.print(f"All results and curves: {out / 'index.html'}", highlight=False)


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: a decoding step of a model this small is too little work for several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def fitting(models: dict[str, Any], seconds: float) -> list[int]:
    """Return the lengths, at least the first, that all models can read within `seconds`, by timing one block."""
    began = time.perf_counter()
    for model in models.values():
        count = min(LENGTHS[0], getattr(model.config, "max_position_embeddings", None) or LENGTHS[0])
        with torch.no_grad():
            model(torch.zeros(1, count, dtype=torch.long, device=model.device))
    block = time.perf_counter() - began
    # A factor of 2, because attention to a long context takes longer, and steps are timed after each length.
    return [length for length in LENGTHS if length == LENGTHS[0] or 2 * block * length / LENGTHS[0] < seconds]


def convert(
    teacher: str,
    student: Student,
    asked: dict[str, Any],
    total: float,
    minutes: float,
    folder: Path,
    console: Console,
) -> dict[str, Any]:
    """Convert the teacher, unless the same conversion is already finished, and return its results. An interrupted
    conversion is resumed with its original time budget."""
    asked = asked | {"recipe": student.recipe, "overrides": student.overrides} | student.options
    known = {"teacher": teacher, "files": versions(teacher), "total": total, **asked}
    mark, results = folder.with_name(f"{folder.name}.json"), folder / "results.json"
    before = json.loads(mark.read_text(encoding="utf-8")) if mark.exists() else {}
    same = before.get("asked") == json.loads(json.dumps(known))
    if same and results.exists() and results.stat().st_mtime_ns > mark.stat().st_mtime_ns:
        console.print(f"{folder} already contains this conversion. Remove it to run it again", highlight=False)
        done: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
        return done
    if folder.exists():
        console.print(f"{folder} contains another conversion or teacher: it is replaced", highlight=False)
    if not same:
        before = {"asked": known, "minutes": minutes}
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_text(json.dumps(before), encoding="utf-8")
    return t2r.convert(
        teacher,
        str(folder),
        overwrite=True,
        restart=not same,
        minutes=before["minutes"],
        progress=sys.stderr.isatty(),
        **asked,
    )


def versions(teacher: str) -> list[Any]:
    """Identify the weight files of the teacher, by name, size and time of modification."""
    files = sorted(Path(teacher).glob("*.safetensors"))
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def final(results: dict[str, Any]) -> float:
    """Return the perplexity after the last stage."""
    return score(list(results["stages"].values())[-1])


def score(measured: dict[str, Any]) -> float:
    """Return the perplexity. JSON has null for a value that is not finite."""
    return float(measured["perplexity"] or "nan")


def against(results: dict[str, Any]) -> str:
    return f"{final(results) / score(results['teacher']) - 1:+.1%}"


# --- Output: the same numbers in the terminal and on the page -----------------------------------------------


def show(header: Sequence[str], rows: Sequence[Sequence[str]], console: Console, title: str | None = None) -> None:
    table = Table(title=title)
    for i, heading in enumerate(header):
        table.add_column(heading, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    terminal.show(table, console)


def show_conversion(name: str, results: dict[str, Any], folder: Path, valid: str, page: Page, console: Console) -> None:
    """Show the perplexity after each step of the conversion, and that of the saved model, which must equal the last."""
    teacher = results["teacher"]
    measured = {"teacher": teacher, "swapped, not trained": results["swapped"]}
    for stage, values in results["stages"].items():
        measured[f"after {results['steps'][stage]:,} steps of {stage}"] = values
    (saved,) = t2r.evaluate([folder], valid, window=teacher["window"], limit=teacher["windows"], generation=False)
    measured["merged and saved, as loaded" if results["merged"] else "saved, as loaded"] = saved | {"kl": None}
    rows = []
    for words, values in measured.items():
        kl = "" if values["kl"] is None else f"{values['kl']:.4f}"
        rows.append((words, f"{score(values):.2f}", f"{score(values) / score(teacher) - 1:+.1%}", kl))
    header = ("model", "perplexity", "against the teacher", "KL to the teacher")
    title = f"Perplexity on {teacher['windows']} windows of {teacher['window']} tokens"
    show(header, rows, console, title)
    page.heading(f"{name}: quality of the conversion")
    page.table(header, rows, title)


def show_scores(results: dict[str, dict[str, Any]], page: Page, console: Console) -> None:
    header = ("model", "perplexity", "its teacher's", "against the teacher")
    rows = [
        (name, f"{final(result):.2f}", f"{score(result['teacher']):.2f}", against(result))
        for name, result in results.items()
    ]
    show(header, rows, console)
    page.heading("Comparison")
    page.table(header, rows)
    page.figures({"All models": bars({name: final(result) for name, result in results.items()}, "perplexity")})


def show_training(results: dict[str, dict[str, Any]], page: Page) -> None:
    page.heading("Training")
    says = {"transfer": "relative error of attention outputs", "distill": "KL to the teacher"}
    drawn = {}
    for stage, what in says.items():
        logs = {name: result["log"][stage] for name, result in results.items() if stage in result["log"]}
        curves = {name: ([e["step"] for e in log], [e["loss"] for e in log]) for name, log in logs.items()}
        drawn[f"{stage}: {what}, on the training text"] = lines(curves, "step", what, log_y=True, colors=COLORS[1:])
    page.figures(drawn)


def show_samples(models: dict[str, Any], tokenizer: Any, prompt: str, page: Page, console: Console) -> None:
    """Show a sample of each model, with the same prompt and seed."""
    table = Table(show_lines=True)
    texts = {}
    for name, model in models.items():
        texts[name] = prompt + t2r.generate(model, prompt, tokenizer=tokenizer, **SAMPLE)[0].text
        table.add_column(name, ratio=1)
    table.add_row(*(text.replace("[", "\\[") for text in texts.values()))
    console.print(table)
    page.heading("Samples")
    page.paragraph(f"The same prompt and the same seed, temperature {SAMPLE['temperature']}: {prompt!r}")
    page.quotes(texts)


def show_machine(seconds: float, page: Page) -> None:
    facts = environment.describe()
    cpu, gpus = facts["devices"]["cpu"], facts["devices"]["cuda"]
    machine = [("date", time.strftime("%Y-%m-%d %H:%M")), ("this run", f"{seconds:.0f} seconds")]
    machine += [("cpu", f"{cpu['cores']} cores, torch uses {cpu['threads']} threads")]
    machine += [(f"cuda:{i}", gpu["name"]) for i, gpu in enumerate(gpus)]
    machine += [(name, version) for name, version in facts["versions"].items() if version]
    page.heading("Machine")
    page.table(("", ""), machine)


def calm() -> None:
    """Print log messages of t2r on stderr, and only errors of other libraries."""
    notes = logging.StreamHandler(sys.stderr)
    notes.setFormatter(logging.Formatter("t2r: note: %(message)s"))
    logging.getLogger("t2r").setLevel(logging.INFO)
    logging.getLogger("t2r").addHandler(notes)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.simplefilter("ignore", UserWarning)


# Files of the demo.
TEACHER, TRAIN, VALID = (str(HERE / name) for name in ("teacher", "novels/train.txt.xz", "novels/valid.txt.xz"))


def main(
    teacher: Annotated[
        str, typer.Option(help="The folder of a language model.", show_default="examples/teacher")
    ] = TEACHER,
    train: Annotated[str, typer.Option(help="Training text.", show_default="novels")] = TRAIN,
    valid: Annotated[str, typer.Option(help="Text to measure perplexity on.", show_default="other novels")] = VALID,
    out: Annotated[
        Path | None, typer.Option(help="The output folder.", show_default="runs/demo or runs/demo-full")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Train longer, and also convert with T2R-75% and ELU.")] = False,
    prompt: Annotated[str, typer.Option(help="Prompt of the samples.")] = PROMPT,
) -> None:
    """Convert a teacher into an RNN, compare the two, and write an HTML page with the results."""
    out = out or Path("runs", "demo-full" if full else "demo")
    calm()
    try:
        demo(teacher, train, valid, out, full, prompt, Console())
    except t2r.T2RError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        print("\ninterrupted; the same command resumes", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    typer.run(main)
