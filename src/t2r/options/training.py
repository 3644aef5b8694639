"""The options of `convert` and `pretrain`: texts, budget, evaluation and training, beside those of the swap.

`Conversion` and `Pretraining` are the arguments of one call. Python functions, the command line and its help are made
from them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any

from t2r.options.definition import option, options_of, same
from t2r.options.groups import RunOptions, SwapOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Sources = str | Sequence[Any] | Mapping[str, Any]
"""Texts: one or several names, each optionally with a weight; or a mapping from name to weight, or pairs of both."""
LISTED: dict[str, Any] = {"type": str, "length": 0, "repeated": True}
"""A list of texts on the command line. Python functions also accept one text, and a mapping."""
WEIGHTS = "wiki.txt:2 reads a source twice per epoch; wiki.txt:60% makes it 60% of the tokens. Repeatable."


@dataclass(kw_only=True)
class TextOptions:
    """The texts that are trained on."""

    train: Sources | None = option(
        None,
        help="Training text: a file, a glob, JSONL (text or messages; .gz and .xz are read), or "
        f"datasets:NAME[:CONFIG[:SPLIT]]. {WEIGHTS}",
        details="Also a mapping from source to weight, or a list of pairs.",
        unset="the recipe's sources",
        **LISTED,
    )
    source: Sources | None = option(
        None,
        help="File of source sentences for an encoder-decoder, one per line; with a weight as for --train. Repeatable.",
        flags=("--src",),
        **LISTED,
    )
    target: Sources | None = option(
        None,
        help="File of the targets of each --src, or `teacher`: the model translates --src. Repeatable.",
        flags=("--tgt",),
        **LISTED,
    )
    source_language: str | None = option(
        None,
        help="Source language of a multilingual translation model: a code of its tokenizer, such as zh, zho_Hans.",
        details="It is saved with the model.",
    )
    target_language: str | None = option(
        None, help="Target language of a multilingual translation model (M2M100, NLLB, mBART)."
    )
    teacher_beams: int | None = same(
        RunOptions,
        "beams",
        default=None,
        unset=str(RunOptions.beams),
        help="Beams of the search for --tgt teacher. 1: greedy, several times as fast.",
    )
    join: int = option(
        1,
        help="Join neighboring pairs of lines: groups of 1, 2, ... up to this many, in turn, become one pair. For text "
        "with shorter lines than those that will be translated.",
        minimum=1,
    )
    documents: bool = option(False, help="Attention does not cross document boundaries inside a block.")


@dataclass(kw_only=True)
class BudgetOptions:
    """What is trained, and for how long."""

    recipe: str | None = option(
        None,
        help="The name of a shipped recipe, or a YAML file.",
        unset="distill-lm, with --src distill-mt, with --memory memory-lm or memory-mt",
    )
    overrides: Sequence[str] = option(
        (),
        help="Override the recipe: stage.field=value, or field=value for all stages. Repeatable.",
        flags=("--set",),
        **LISTED,
    )
    minutes: float | None = option(
        None,
        help="Time for the whole run: loading, generating teacher text, training and evaluation.",
        details="The stages share what remains for training in proportion to their tokens or steps. If time is short, "
        "the teacher generates less text, fewer windows are evaluated, and batches are smaller.",
        above=0,
        maximum=525_600,
        unset="the recipe's budget",
    )


@dataclass(kw_only=True)
class EvaluationOptions:
    """What the model is measured on."""

    valid: str | None = option(None, help="Text to measure perplexity on, before and after training.")
    valid_source: str | None = option(None, help="Source sentences to measure BLEU on.", flags=("--valid-src",))
    valid_target: str | None = option(None, help="References of --valid-src.", flags=("--valid-tgt",))
    limit: int | None = same(RunOptions, "limit")


@dataclass(kw_only=True)
class TrainingOptions:
    """How and where the model is trained and saved."""

    device: str = same(RunOptions, "device")
    bf16: bool | None = option(None, help="Train in bfloat16.", unset="on a GPU")
    compiled: bool | None = option(
        None,
        help="Compile layers with torch.compile.",
        details="Losses are compiled too, and steps are replayed as CUDA graphs. With parallel text, whose batches "
        "vary in shape, layers are not compiled.",
        unset="on a GPU",
        flags=("--compile/--no-compile",),
    )
    gradient_checkpointing: bool = option(
        False, help="Recompute activations in the backward pass: slower, but needs less memory."
    )
    save_steps: int | None = option(
        None, help="Optimizer steps between checkpoints.", minimum=1, unset="every three minutes"
    )
    report_to: str = option("none", help="none, tensorboard (in OUT.logs) or wandb.")
    restart: bool = option(False, help="Delete the unfinished run in OUT.run and start again.", flags=("--restart",))
    overwrite: bool = option(False, help="Replace an existing model in OUT.", flags=("--overwrite",))
    progress: bool = True
    """Show progress bars."""


@dataclass(kw_only=True, repr=False, eq=False)
class Training(SwapOptions, TrainingOptions, EvaluationOptions, BudgetOptions, TextOptions):
    """What `Conversion` and `Pretraining` have in common."""

    given: frozenset[str] = dataclasses.field(default=frozenset(), init=False, repr=False)
    """The names of the options that the caller gave: those of the swap override a recipe's."""

    def part(self, of: type) -> dict[str, Any]:
        """Return the values of the fields that another dataclass has, too."""
        return {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(of)}

    def swap(self, without: tuple[str, ...] = ("seed",)) -> dict[str, Any]:
        """Return the options of the swap that the caller gave."""
        names = [name for name in options_of(SwapOptions) if name in self.given and name not in without]
        return {name: getattr(self, name) for name in names}

    def numbers(self) -> dict[str, Any]:
        """Return the numbers that the caller gave, to be checked before anything is loaded."""
        group: type = type(self)
        known = [each for each in options_of(group).values() if each.type in (int, float) and not each.many]
        return {each.name: getattr(self, each.name) for each in known if each.name in self.given}


@dataclass(repr=False, eq=False)
class Conversion(Training):
    """The arguments of `t2r.convert`."""

    model: str | PreTrainedModel
    out: str
    _: KW_ONLY
    train: Sources | None = same(
        TextOptions,
        "train",
        help="Training text: a file, a glob, JSONL (text or messages; .gz and .xz are read), "
        "datasets:NAME[:CONFIG[:SPLIT]], or teacher, which trains on text generated by the model itself (with other "
        f"sources, on continuations of excerpts from them). {WEIGHTS}",
    )
    valid: str | None = same(
        EvaluationOptions,
        "valid",
        details="Without it, the last 2 % of the first text in `train` (if that is long enough), which are then not "
        "trained on.",
    )
    teacher_tokens: int = option(
        10_000_000, help="Tokens that the teacher generates for --train teacher.", minimum=1, maximum=10**15
    )
    memory: str | int | None = option(
        None,
        help="Bytes of a sequence, for example 8MiB: every head gets a window of the tokens that it needs, measured on "
        "the training text, and a state of what has left it. With --recipe none: windows only, without training.",
        type=str,
    )
    context: int | None = option(
        None,
        help="With --memory: tokens that windows are planned for, of an encoder-decoder target tokens.",
        minimum=32,
        unset="positions, at most 2,048; with --src the longest target of the text",
    )
    source_tokens: int | None = option(
        None,
        help="With --memory and --src: tokens of a source whose keys and values count.",
        minimum=1,
        unset="the longest source of the text",
    )
    nbits: int | None = option(
        None,
        help="With --memory: bits of the numbers of keys and values in windows: 8, with a scale for each key and "
        "value, or 16, as they are. With 16 windows are half as long, and a step on a CPU takes less time.",
        minimum=8,
        maximum=16,
        unset="8",
    )
    teacher: str | PreTrainedModel | None = option(
        None,
        help="If SOURCE is a conversion that is continued, its base model.",
        details="A model with other weights is refused.",
        type=str,
        unset="where it was then",
    )
    teacher_logits: str | None = option(
        None,
        help="Folder of t2r teach, which has the teacher's distribution of --train: distillations read it, and do not "
        "run the teacher.",
        unset="the teacher runs beside the student",
    )
    fsdp_size: int | None = option(
        None,
        help="Divide the weights of model and teacher, gradients and optimizer states among this many processes (FSDP "
        "2): the number that torchrun starts. For models that do not fit on one device.",
        minimum=2,
        unset="each process has all",
    )
    merged: bool = option(
        False,
        help="Merge the feature maps into the projections. A merged model cannot be trained further.",
        details="They are merged also where that does not pay.",
        flags=("--merge/--no-merge",),
    )
    revision: str | None = option(None, help="Branch, tag or commit on the hub.")
    trust_remote_code: bool = option(
        False, help="Allow code from the model's repository to run.", flags=("--trust-remote-code",)
    )
    tokenizer: PreTrainedTokenizerBase | None = None
    """The tokenizer of a model that is given as an object."""
    softmax_layers: list[int] | str | None = same(SwapOptions, "softmax_layers", type=int, length=0)  # type: ignore[assignment]
    seed: int = same(
        SwapOptions,
        "seed",
        help="Seed of the feature maps, the data order, dropout and the text the teacher generates.",
    )


@dataclass(repr=False, eq=False)
class Pretraining(Training):
    """The arguments of `t2r.pretrain`."""

    config: str
    out: str
    _: KW_ONLY
    target: Sources | None = same(
        TextOptions,
        "target",
        help="File of the targets of each --src; with --continued also `teacher`: the model translates --src before it "
        "is trained. Repeatable.",
    )
    recipe: str | None = same(BudgetOptions, "recipe", unset="the preset's, or scratch-lm, with --src scratch-mt")
    model_overrides: Sequence[str] = option(
        (),
        help="Override the model configuration: field=value. Repeatable.",
        flags=("--model-set",),
        **LISTED,
    )
    minutes: float | None = same(
        BudgetOptions, "minutes", help="Time for the whole run, in minutes: loading, training and evaluation."
    )
    tokenizer: PreTrainedTokenizerBase | str | None = option(
        None,
        help="A tokenizer folder.",
        type=str,
        unset="the model folder's, or one trained as the preset says",
    )
    continued: bool = option(
        False, help="Start from the weights in CONFIG, a model folder or hub name.", flags=("--continued",)
    )
    feature_map: str | None = same(  # type: ignore[assignment]
        SwapOptions,
        "feature_map",
        default=None,
        help="The feature map: t2r, elu, rfa, performer or hedgehog; softmax keeps softmax attention.",
        unset="CONFIG's, or softmax; t2r if another option of the swap is given",
    )
    softmax_layers: list[int] | None = same(
        SwapOptions, "softmax_layers", help="Decoder layers, from 0, that keep their softmax attention, such as 0-3,7."
    )
    seed: int = same(SwapOptions, "seed", help="Seed of the weights, the data order and dropout.")
