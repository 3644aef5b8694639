"""The options of a swap, of generation and of an analysis, and those that several commands share."""

from __future__ import annotations

from dataclasses import dataclass

from t2r.options.definition import LARGEST_SEED, option

BOTH, CAUSAL, CROSS = "both", "causal", "cross"
"""What becomes recurrent in the decoder of an encoder-decoder."""


@dataclass(kw_only=True, repr=False, eq=False)
class SwapOptions:
    """Options of a swap. The names are the same in `t2r.swap`, on the command line, in recipes and in saved files."""

    feature_map: str = option("t2r", help="The feature map: t2r, elu, rfa, performer or hedgehog.")
    feature_size: int | None = option(
        None,
        help="Feature size: the number of rows of the state. The state of a layer has feature size x (head size + 1) "
        "numbers of 4 bytes for each head, or with grouped for each key/value head.",
        minimum=1,
        unset="the map's own; t2r: 32",
        of_map="always",
    )
    cross_feature_size: int | None = option(
        None,
        help="Feature size of cross attention, if that becomes recurrent.",
        minimum=1,
        unset="as feature_size",
    )
    softmax_layers: list[int] | None = option(
        None,
        help="Decoder layers, from 0, that keep softmax attention: 0-3,7 on the command line; for convert and inspect "
        "also auto:N, the N layers with the largest effect on the loss, which convert measures.",
        unset="none",
        hint="only convert and inspect accept auto:N",
    )
    softmax_every: int | None = option(
        None,
        help="Keep softmax attention in every n-th layer, counted from the last (4: the paper's T2R-75%).",
        minimum=1,
        unset="none",
    )
    recurrent: str = option(
        CAUSAL,
        help="Attention of an encoder-decoder's decoder that becomes recurrent: `causal`, which keeps cross attention "
        "exact, `cross`, or `both`, as in the paper.",
        choices=(CAUSAL, CROSS, BOTH),
        former={"causal,cross": BOTH},
    )
    shared: bool = option(True, help="Queries and keys share one feature map.", of_map="always")
    grouped: bool = option(
        True,
        help="With grouped-query attention, one key map and state for each key/value head; otherwise one for each "
        "query head, which makes the state larger.",
        of_map="always",
    )
    decay: bool = option(False, help="Each feature of causal attention decays at a learned rate.", of_map="always")
    rotary: bool = option(
        True,
        help="With rotary positions, apply the feature map to queries and keys after their rotation; otherwise before.",
    )
    init: str | None = option(
        None,
        help="Initialization of the feature map: paper or identity.",
        unset="the map's own",
        of_map="given",
    )
    activation: str = option(
        "relu", help="Activation of the t2r feature map: relu, elu, tanh, cos, gelu or softmax.", of_map="given"
    )
    key_weights: bool = option(
        False, help="Each key has a learned, query-independent weight (t2r and hedgehog).", of_map="given"
    )
    freeze_feature_map: bool = option(False, help="Do not train the feature maps.")
    seed: int = option(
        0, help="Seed for all random values of the feature maps.", minimum=0, maximum=LARGEST_SEED, of_map="always"
    )


@dataclass(kw_only=True)
class GenerationOptions:
    """Options of `generate`, named as in transformers. None selects the model's own default."""

    max_new_tokens: int = option(128, help="Maximum number of tokens to generate.", minimum=1, maximum=2**31 - 1)
    min_new_tokens: int | None = option(
        None, help="Minimum number of tokens to generate.", minimum=0, maximum=2**31 - 1, unset="the model's own"
    )
    do_sample: bool | None = option(None, help="Sample instead of greedy search.", unset="the model's own")
    temperature: float | None = option(
        None, help="Sampling temperature.", minimum=1e-6, maximum=1e6, unset="the model's own"
    )
    top_p: float | None = option(
        None,
        help="Sample from the most likely tokens whose probabilities add up to this value.",
        above=0,
        maximum=1,
        unset="the model's own",
    )
    top_k: int | None = option(
        None, help="Sample from this many of the most likely tokens; 0 for all.", minimum=0, unset="the model's own"
    )
    num_beams: int | None = option(None, help="Number of beams for beam search.", minimum=1, unset="the model's own")
    length_penalty: float | None = option(
        None, help="Length penalty of beam search: values above 0 favor long sequences.", unset="the model's own"
    )
    repetition_penalty: float | None = option(
        None, help="Values above 1 make repeated tokens less likely.", above=0, unset="the model's own"
    )
    num_return_sequences: int | None = option(
        None, help="Number of texts to generate per prompt.", minimum=1, unset="the model's own"
    )


@dataclass(kw_only=True)
class AnalysisOptions:
    """Options of `analyze` whose defaults differ from those of other commands."""

    limit: int = option(16, help="Maximum number of samples, spread over the text.", minimum=1)
    trials: int = option(256, help="Trials of the recall test at each distance.", minimum=1)


@dataclass(kw_only=True)
class TeachingOptions:
    """Options of `teach`."""

    top_k: int = option(64, help="The number of most likely tokens of each position that are stored.", minimum=1)
    block_size: int | None = option(
        None,
        help="Tokens per block, as in the recipe's distillation: 512 in distill-lm, 2048 in memory-lm.",
        minimum=2,
        unset="512, or fewer if the model has fewer positions",
    )
    temperature: float = option(1.0, help="Temperature of the distribution, as in the recipe's distillation.", above=0)


@dataclass(kw_only=True)
class RunOptions:
    """Options shared by several commands and functions."""

    device: str = option("auto", help="auto (a GPU if available), cpu, cuda, ...")
    dtype: str = option(
        "auto",
        help="auto (as saved), float32, bfloat16 or float16.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    seed: int | None = option(
        None, help="Random seed for sampling.", minimum=0, maximum=LARGEST_SEED, unset="a new one each time"
    )
    batch_size: int = option(8, help="Prompts or windows per batch.", minimum=1)
    limit: int | None = option(None, help="Maximum number of windows to evaluate.", minimum=1, unset="all")
    window: int | None = option(
        None, help="Tokens per window.", minimum=2, unset="512, or fewer if a model has fewer positions"
    )
    stride: int | None = option(
        None,
        help="Tokens by which the window advances, and that are scored in each window.",
        minimum=1,
        unset="half the window",
    )
    trials: int = option(32, help="Trials of the recall test at each distance.", minimum=1)
    beams: int = option(5, help="Beams of the search that translates --src.", minimum=1, maximum=1000)
    length_penalty: float = option(0.6, help="Length penalty of the beam search.")
    bleu_tokenize: str = option("13a", help="sacrebleu's tokenizer for BLEU, for example zh for Chinese references.")
