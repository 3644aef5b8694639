"""Recipes and presets: the paper's settings, schedules, overrides, and errors."""

import dataclasses
import math
import re
from pathlib import Path

import pytest

from t2r.data.vocabulary import word_tokenizer
from t2r.errors import T2RError
from t2r.reporting.options import page as up_to_date
from t2r.training.loop.trainer import batch_shape
from t2r.training.recipes.preset import load_preset, shipped_presets
from t2r.training.recipes.recipe import OBJECTIVES, OPTIMIZERS, TRAINED, Stage, load_recipe, shipped_recipes
from t2r.training.recipes.schedule import KINDS, Schedule

# Copied from the paper's appendix (language modeling, conversion), not from the recipe.
PAPER = {
    "objective": "task",
    "train": "all",
    "steps": 142_000,
    "batch_tokens": 24_576,
    "block_size": 512,
    "optimizer": "nag",
    "momentum": 0.99,
    "weight_decay": 0.0,
    "clip_norm": 0.1,
    "schedule": "cosine_restarts",
    "warmup_init": 1e-7,
    "warmup_steps": 8_000,
    "learning_rate": 0.5,
    "min_learning_rate": 5e-5,
    "period": 135_000,
    "period_mult": 2.0,
    "shrink": 0.75,
    "dropout": True,
}
PAPER_SWAP = {"feature_map": "t2r", "feature_size": 32, "init": "paper"}


def fairseq_cosine(step, *, lr, warmup, init, floor, period, mult, shrink):
    """fairseq's `cosine` schedule, like its `step_update`."""
    if step < warmup:
        return init + step * (lr - init) / warmup
    now = step - warmup
    if mult != 1:
        i = math.floor(math.log(1 - now / period * (1 - mult), mult))
        length, now = mult**i * period, now - (1 - mult**i) / (1 - mult) * period
    else:
        i = math.floor(now / period)
        length, now = period, now - period * i
    low, high = floor * shrink**i, lr * shrink**i
    return low + 0.5 * (high - low) * (1 + math.cos(math.pi * now / length))


SETTINGS = {"lr": 0.5, "warmup": 8000, "init": 1e-7, "floor": 5e-5, "period": 135_000, "mult": 2, "shrink": 0.75}


# The same, from random initialization.
SCRATCH = PAPER | {
    "steps": 286_000,
    "batch_tokens": 73_728,  # max tokens 3072, 8 GPUs, update-freq 3
    "warmup_steps": 16_000,
    "learning_rate": 1.0,
    "min_learning_rate": 1e-4,
    "period": 270_000,
}
SCRATCH_SETTINGS = SETTINGS | {"lr": 1.0, "warmup": 16_000, "floor": 1e-4, "period": 270_000}


@pytest.mark.parametrize(
    ("name", "paper", "swap"), [("paper-lm", PAPER, PAPER_SWAP), ("paper-lm-scratch", SCRATCH, {})]
)
def test_paper_recipes_match_the_paper(name, paper, swap):
    recipe = load_recipe(name)
    (stage,) = recipe.stages
    effective = dataclasses.asdict(stage)
    assert {name: effective[name] for name in paper} == paper
    assert recipe.swap == swap
    # The other options do not apply to this stage, or have no effect.
    rest = set(effective) - set(paper)
    assert rest == {
        *("name", "tokens", "epochs", "minutes", "device_tokens", "map_learning_rate"),
        *("betas", "epsilon", "kl_weight", "task_weight", "temperature", "noise", "noise_from", "lora_rank"),
        *("label_smoothing", "average", "reach"),
    }
    assert (stage.label_smoothing, stage.average) == (0, 1)
    assert all(effective[name] is None for name in ("tokens", "epochs", "minutes", "device_tokens"))
    assert stage.map_learning_rate is None


# Typed from the appendix's tables of hyperparameters for translation: finetuning, and random initialization.
PAPER_MT = {
    "objective": "task",
    "train": "all",
    "steps": 20_000,
    "batch_tokens": 3584 * 8 * 16,  # max tokens, GPUs, update-freq
    "block_size": 3584,
    "optimizer": "adam",
    "betas": [0.9, 0.98],
    "epsilon": 1e-8,
    "weight_decay": 0.0,
    "clip_norm": None,  # fairseq's default
    "label_smoothing": 0.1,
    "schedule": "inverse_sqrt",
    "warmup_init": 1e-7,
    "warmup_steps": 4_000,
    "learning_rate": 2e-4,
    "average": 5,  # "the parameters from the last five epochs were again averaged"
    "dropout": True,
}
SCRATCH_MT = PAPER_MT | {"steps": 30_000, "learning_rate": 5e-4}
PAPER_MT_SWAP = {
    "feature_map": "t2r",
    "feature_size": 4,
    "cross_feature_size": 32,
    "init": "paper",
    "recurrent": "both",
}


@pytest.mark.parametrize(
    ("name", "paper", "swap"), [("paper-mt", PAPER_MT, PAPER_MT_SWAP), ("paper-mt-scratch", SCRATCH_MT, {})]
)
def test_recipes_of_the_papers_translation_are_the_paper(name, paper, swap):
    recipe = load_recipe(name)
    (stage,) = recipe.stages
    effective = dataclasses.asdict(stage)
    assert {name: effective[name] for name in paper} == paper
    assert recipe.swap == swap
    assert set(effective) - set(paper) == {
        *("name", "tokens", "epochs", "minutes", "device_tokens", "map_learning_rate", "min_learning_rate"),
        *("momentum", "period", "period_mult", "shrink"),
        *("kl_weight", "task_weight", "temperature", "noise", "noise_from", "lora_rank", "reach"),
    }
    assert stage.reach is None
    assert (stage.noise, stage.min_learning_rate, stage.map_learning_rate) == (0, 0, None)
    (alone,) = recipe.a_block_at_a_time().stages
    assert alone.device_tokens == 3584  # so that 128 forwards make a step
    (given,) = load_recipe(name, ["device_tokens=7168"]).a_block_at_a_time().stages
    assert given == alone
    assert batch_shape(given) == (1, 128)


@pytest.mark.parametrize("step", [0, 1, 2_000, 3_999, 4_000, 4_001, 10_000, 19_999])
def test_inverse_square_root_rates_of_the_paper(step):
    """fairseq's `inverse_sqrt`, as its `step_update` has it."""
    (stage,) = load_recipe("paper-mt").stages
    warm = 1e-7 + step * (2e-4 - 1e-7) / 4000
    expected = warm if step < 4000 else 2e-4 * 4000**0.5 * step**-0.5
    assert stage.make_schedule(stage.steps).at(step) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 1e-7),
        (1, 1e-7 + 0.4999999 / 8000),
        (4_000, 0.25000005),
        (7_999, 1e-7 + 0.4999999 * 7999 / 8000),
        (8_000, 0.5),
        (8_001, None),
        (50_000, None),
        (75_500, 0.250025),  # half of the period: between peak and floor
        (100_000, None),
        (141_999, None),
        (142_999, None),  # the last step of the first cycle, which the run does not reach
        (143_000, 0.375),
    ],
)
def test_learning_rates_of_the_paper(step, rate):
    (stage,) = load_recipe("paper-lm").stages
    ours = stage.make_schedule(stage.steps).at(step)
    assert ours == pytest.approx(fairseq_cosine(step, **SETTINGS), rel=1e-9)
    if rate is not None:
        assert ours == pytest.approx(rate, rel=1e-9)


@pytest.mark.parametrize(
    ("step", "rate"),
    [
        (0, 1e-7),
        (1, 1e-7 + 0.9999999 / 16_000),
        (8_000, 0.50000005),
        (15_999, 1e-7 + 0.9999999 * 15_999 / 16_000),
        (16_000, 1.0),
        (16_001, None),
        (60_000, None),
        (151_000, 0.50005),  # half of the period: between peak and floor
        (200_000, None),
        (285_999, None),  # the last step of the run and of the first cycle
        (286_000, 0.75),
    ],
)
def test_learning_rates_of_the_paper_from_scratch(step, rate):
    (stage,) = load_recipe("paper-lm-scratch").stages
    ours = stage.make_schedule(stage.steps).at(step)
    assert ours == pytest.approx(fairseq_cosine(step, **SCRATCH_SETTINGS), rel=1e-9)
    if rate is not None:
        assert ours == pytest.approx(rate, rel=1e-9)


# Copied from the paper (section on language modeling, and the appendix's table) and, for fairseq's defaults of
# `transformer_lm_wiki103`, from Baevski and Auli.
PAPER_MODEL = {
    "model_type": "adaptive_lm",
    "num_hidden_layers": 32,
    "num_attention_heads": 8,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "activation_function": "relu",
    "dropout": 0.2,
    "layerdrop": 0.2,
    "attention_dropout": 0.1,
    "activation_dropout": 0.1,
    "cutoffs": [20_000, 60_000],
    "adaptive_factor": 4,
    "softmax_dropout": 0.2,
    "tie_word_embeddings": True,
    "tie_adaptive_projections": True,
    "scale_embedding": True,
    "final_layer_norm": False,
    "first_position": 2,
}


def test_adaptive_lm_paper_matches_the_paper():
    preset = load_preset("adaptive-lm-paper")
    assert preset.plan() == load_recipe("paper-lm-scratch")
    assert preset.tokenizer == {"kind": "word"}
    assert preset.swap == {}
    # WikiText-103 has 267,735 words with <eos> and <unk>, and fairseq's dictionary of it 267,744 entries.
    words = word_tokenizer([f"w{i}" for i in range(267_733)])
    config = preset.make_config(words)
    effective = config.to_dict()
    assert {name: effective[name] for name in PAPER_MODEL} == PAPER_MODEL
    assert effective["vocab_size"] == 267_744
    assert config.hidden_size // config.num_attention_heads == 128
    assert (config.pad_token_id, config.eos_token_id) == (1, 2)


@pytest.mark.parametrize("mult", [1, 1.5, 2])
def test_restarts_match_fairseq(mult):
    settings = {"lr": 1.0, "warmup": 3, "init": 0.1, "floor": 0.01, "period": 7, "mult": mult, "shrink": 0.5}
    schedule = Schedule("cosine_restarts", 1.0, 100, 3, 0.1, 0.01, period=7, period_mult=mult, shrink=0.5)
    for step in range(60):
        assert schedule.at(step) == pytest.approx(fairseq_cosine(step, **settings)), step
    assert schedule.at(10) == pytest.approx(0.5)  # a new cycle begins at the shrunk peak


def test_other_schedules():
    def rates(kind, **fields):
        return [Schedule(kind, 2.0, 12, warmup_steps=2, floor=0.5, **fields).at(step) for step in (0, 1, 2, 7, 12, 20)]

    assert rates("constant") == [0, 1, 2, 2, 2, 2]
    assert rates("linear") == pytest.approx([0, 1, 2, 1.25, 0.5, 0.5])
    assert rates("cosine") == pytest.approx([0, 1, 2, 1.25, 0.5, 0.5])
    assert rates("inverse_sqrt") == pytest.approx([0, 1, 2, 2 * math.sqrt(2 / 7), 2 * math.sqrt(2 / 12), 2 * 0.1**0.5])
    assert Schedule("cosine", 2.0, 10).at(0) == 2  # no warm-up


@pytest.mark.parametrize(
    ("stage", "steps", "warmup", "period"),
    [
        ({"warmup_steps": 100}, 101, 100, None),
        ({"warmup_steps": 100}, 100, 10, None),
        ({"warmup_steps": 100}, 5, 0, None),
        ({"warmup_steps": 0}, 1, 0, None),
        ({"warmup_steps": 16_000, "period": 270_000, "schedule": "cosine_restarts"}, 286, 16, 270),
        ({"warmup_steps": 16_000, "period": 270_000, "schedule": "cosine_restarts"}, 16_001, 16_000, 270_000),
        ({"warmup_steps": 16_000, "period": 270_000, "schedule": "cosine_restarts"}, 1, 0, 1),
    ],
)
def test_a_budget_shorter_than_its_warm_up(stage, steps, warmup, period):
    fitted = Stage("a", "task", steps=steps, **stage).fitted(steps)
    assert (fitted.warmup_steps, fitted.period) == (warmup, period)
    rates = [fitted.make_schedule(steps).at(step) for step in range(steps)]
    assert max(rates) == fitted.learning_rate


def test_the_warm_up_of_a_time_budget_grows_with_its_steps():
    """There is no number of steps at which most of them become a warm-up."""
    stage = Stage("a", "task", minutes=1.0, warmup_steps=20)
    assert [stage.fitted(steps).warmup_steps for steps in (5, 20, 21, 32, 199, 200, 5000)] == [0, 2, 2, 3, 19, 20, 20]


def test_the_default_transfers_and_then_distills():
    recipe = load_recipe("distill-lm")
    assert [(s.objective, s.train) for s in recipe.stages] == [("transfer", "maps"), ("distill", "all")]
    assert (recipe.swap["feature_map"], recipe.swap["activation"]) == ("t2r", "softmax")
    assert shipped_recipes() == [
        *("distill-lm", "distill-mt", "finetune-lm", "finetune-mt", "memory-lm", "memory-mt", "none", "paper-lm"),
        *("paper-lm-scratch", "paper-mt", "paper-mt-scratch", "scratch-lm", "scratch-mt"),
    ]


def test_block_size_is_limited_to_the_positions(caplog):
    recipe = load_recipe("distill-lm", ["transfer.block_size=256"])
    assert recipe.for_positions(None) == recipe == recipe.for_positions(512)
    assert not caplog.messages
    first, second = recipe.for_positions(300).stages
    assert first == recipe.stages[0]
    assert (second.block_size, second.batch_tokens) == (300, 16384 // 300 * 300)
    assert caplog.messages == ["stage distill: block_size 512 is reduced to the model's 300 positions"]
    (small,) = load_recipe("paper-lm", ["batch_tokens=512"]).for_positions(384).stages
    assert (small.block_size, small.batch_tokens) == (384, 384)


def test_the_name_of_a_stage_may_be_a_number(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text("stages: [{name: 1, objective: task, steps: 3}]")
    (stage,) = load_recipe(path, ["1.steps=7"]).stages
    assert (stage.name, stage.steps) == ("1", 7)


def test_overrides():
    recipe = load_recipe(
        "distill-lm",
        [
            "transfer.steps=10",
            "distill.minutes=2.5",
            "learning_rate=1e-3",
            "distill.clip_norm=null",
            "betas=[0.5, 9e-1]",
        ],
    )
    first, second = recipe.stages
    assert (first.steps, first.tokens) == (10, None)  # a budget replaces the existing one
    assert (second.minutes, second.tokens) == (2.5, None)
    assert first.learning_rate == second.learning_rate == 0.001
    assert (first.clip_norm, second.clip_norm) == (1.0, None)
    assert first.betas == [0.5, 0.9]
    assert load_recipe("distill-lm").stages[0].tokens == 8_000_000


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("steps", "write stage.field=value"),
        ("=3", "write stage.field=value"),
        ("finish.steps=3", "no stage 'finish'; the stages are transfer, distill"),
        ("transfer.stepz=3", "unknown option stepz; the options are name, objective"),
        ("transfer.steps=many", "steps must be a whole number, at least 1 and at most 1,000,000,000; got 'many'"),
        ("transfer.steps=1.5", "steps must be a whole number, at least 1 and at most 1,000,000,000; got 1.5"),
        ("transfer.steps=true", "got True"),
        ("transfer.steps=.inf", "got inf"),
        ("transfer.steps=0", "steps must be a whole number, at least 1"),
        ("transfer.steps=null", "exactly one of"),
        ("transfer.steps=[", "not valid YAML"),
        ("transfer.learning_rate=fast", "learning_rate must be a number, above 0; got 'fast'"),
        ("transfer.learning_rate=0", "learning_rate must be a number, above 0; got 0.0"),
        ("transfer.learning_rate=null", "learning_rate must be a number, above 0; got None"),
        ("transfer.block_size=0", "block_size must be a whole number, at least 2"),
        ("transfer.block_size=500", "is not a multiple of block_size 500"),
        ("transfer.train=all", "transfer requires train: maps"),
        ("distill.train=some", "train must be one of maps, attention, all, lora; got 'some'"),
        ("distill.objective=win", "objective must be one of task, transfer, distill; got 'win'"),
        ("distill.optimizer=sgd", "optimizer must be one of adamw, adam, muon, nag; got 'sgd'"),
        ("distill.schedule=step", "schedule must be one of constant, linear"),
        ("distill.schedule=cosine_restarts", "stage 'distill': schedule cosine_restarts requires a period"),
        ("distill.period_mult=0.5", "period_mult must be a number, at least 1; got 0.5"),
        ("distill.betas=0.9", "betas must be a list of 2 numbers, at least 0 and below 1"),
        ("distill.betas=[0.9]", "betas must be a list of 2 numbers, at least 0 and below 1"),
        ("distill.betas=[0.9, 1.0]", "betas must be a list of 2 numbers"),
        ("distill.betas=[-1, 0.9]", "got [-1.0, 0.9]"),
        ("distill.betas=[a, b]", "got ['a', 'b']"),
        ("distill.epsilon=-1", "epsilon must be a number, above 0 and at most 1; got -1.0"),
        ("distill.weight_decay=-0.1", "weight_decay must be a number, at least 0; got -0.1"),
        ("distill.device_tokens=-4", "device_tokens must be a whole number, at least 1"),
        ("distill.warmup_steps=-5", "warmup_steps must be a whole number, at least 0"),
        ("distill.momentum=5", "momentum must be a number, at least 0 and below 1; got 5.0"),
        ("distill.period=0", "period must be a whole number, at least 1"),
        ("distill.kl_weight=-1", "kl_weight must be a number, at least 0; got -1.0"),
        ("distill.kl_weight=0", "nothing to minimize"),
        ("distill.minutes=.inf", "minutes must be a number, above 0 and at most 525,600; got inf"),
        ("distill.steps=1e30", "steps must be a whole number, at least 1 and at most 1,000,000,000; got 1000"),
        ("distill.learning_rate=.nan", "got nan"),
        ("distill.steps=2024-01-01", "got datetime.date(2024, 1, 1)"),
        ("distill.steps=2024-99-99", "is not valid YAML"),
        ("distill.name=../x", "a name may contain only"),
        ("distill.name=transfer", "two stages have the same name"),
    ],
)
def test_overrides_that_are_refused(override, words):
    with pytest.raises(T2RError) as error:
        load_recipe("distill-lm", [override])
    assert words in str(error.value)


STAGE = "{name: a, objective: task, steps: 3}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("stages: [", "is not valid YAML"),
        ("", "has no list of stages"),
        ("- 3", "has no list of stages"),
        ("stages: {a: 1}", "has no list of stages"),
        ("stages: []", "has no list of stages"),
        ("stages: [a]", "a stage requires a name and an objective"),
        ("stages: [{name: a}]", "a stage requires a name and an objective"),
        (f"stages: [{STAGE}]\nstage: 3", "no field stage"),
        (f"stages: [{STAGE}]\n3: 4\nb: 5", "no field 3, b"),
        ("stages: [{name: a, objective: task, steps: 3, 4: 5, c: 6}]", "stage 'a': unknown option 4, c"),
        (f"stages: [{STAGE}]\nswap: {{1: 2}}", "swap: unknown option 1"),
        (f"stages: [{STAGE}]\nswap: {{seed: 2024-01-01}}", "swap: seed must be a whole number"),
        ("[" * 100_000, "more than 50 levels"),
        ("day: 2024-99-99", "is not valid YAML"),
        ("stages: [{name: a, objective: task, steps: 3, lr: 1}]", "stage 'a': unknown option lr; the options are"),
        ("stages: [{name: a, objective: task}]", "exactly one of steps, tokens, epochs, minutes; got none"),
        ("stages: [{name: a, objective: task, steps: 3, epochs: 1}]", "got ['steps', 'epochs']"),
        (f"stages: [{STAGE}, {STAGE}]", "two stages have the same name"),
        (f"stages: [{STAGE}]\nswap: [t2r]", "swap must be a mapping of the options"),
        (
            f"stages: [{STAGE}]\nswap: {{feature_sise: 3}}",
            "swap: unknown option feature_sise; the options are feature_map",
        ),
    ],
)
def test_recipes_that_are_refused(tmp_path, text, words):
    file = tmp_path / "own.yaml"
    file.write_text(text)
    with pytest.raises(T2RError) as error:
        load_recipe(file, ["a.steps=4"] if "stages: [a]" in text else [])
    assert words in str(error.value)


def test_the_page_about_recipes(tmp_path):
    """The page documents every field and choice, and its example is a valid recipe."""
    page = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`([\w-]+)`", page))
    assert page == up_to_date(page), "run: python -m t2r.reporting.options docs/recipes.md"
    assert {f.name for f in dataclasses.fields(Stage)} <= told
    assert {*OBJECTIVES, *TRAINED, *OPTIMIZERS, *KINDS, *shipped_recipes()} <= told
    example, texts = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(example + texts)
    recipe = load_recipe(tmp_path / "mine.yaml")
    assert [stage.name for stage in recipe.stages] == ["transfer", "distill"]
    assert [str(source) for source in recipe.train] == ["wiki.txt:60%", "novels.txt:40%"]


def test_where_recipes_are_found(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("stages: [{name: 5, objective: task, steps: 1e3, learning_rate: 1e-3}]")
    recipe = load_recipe(file)
    assert (recipe.name, recipe.stages[0].name, recipe.stages[0].steps) == ("own", "5", 1000)
    assert recipe.stages[0].learning_rate == 0.001
    with pytest.raises(T2RError, match=r"no recipe 'paper'.*distill-lm, distill-mt, finetune-lm"):
        load_recipe("paper")
    with pytest.raises(T2RError, match=r"recipe file .* does not exist"):
        load_recipe(tmp_path / "none.yaml")
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(T2RError, match="cannot be read"):
        load_recipe(file)


def test_a_stage_made_in_python_is_checked_too():
    with pytest.raises(T2RError, match="exactly one"):
        Stage("a", "task")
    with pytest.raises(T2RError, match="minutes must be a number, above 0 and at most 525,600; got nan"):
        Stage("a", "task", minutes=math.nan)


# --- Presets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped_presets())
def test_shipped_presets(name):
    preset = load_preset(name)
    assert preset.name == name
    assert preset.description
    assert all(stage.objective == "task" for stage in preset.plan().stages)


# Typed from the appendix's table of hyperparameters for translation, random initialization.
PAPER_MARIAN = {
    "encoder_layers": 6,
    "decoder_layers": 6,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "d_model": 1024,
    "encoder_ffn_dim": 4096,
    "decoder_ffn_dim": 4096,
    "max_position_embeddings": 1024,
    "dropout": 0.3,
    "activation_function": "relu",  # fairseq's defaults from here on
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "scale_embedding": True,
    "share_encoder_decoder_embeddings": True,
    "tie_word_embeddings": True,
}


def test_the_papers_translation_model_is_the_paper():
    """Also the rest of its configuration: Marian has no norm before a sublayer, and sinusoidal positions."""
    preset = load_preset("marian-large-paper")
    tokenizer = word_tokenizer(["a", "b", "c"])
    config = preset.make_config(tokenizer)
    assert {name: getattr(config, name) for name in PAPER_MARIAN} == PAPER_MARIAN
    assert config.decoder_start_token_id == tokenizer.pad_token_id
    assert config.forced_eos_token_id == tokenizer.eos_token_id
    assert preset.plan() == load_recipe("paper-mt-scratch")
    assert preset.init == "xavier"
    assert not preset.separate
    assert load_preset("marian-large-paper", ["share_encoder_decoder_embeddings=false"]).separate
    with pytest.raises(T2RError, match="the tokenizer has one vocabulary and the model two"):
        load_preset("marian-tiny", ["share_encoder_decoder_embeddings=false"]).make_config(tokenizer)


def test_where_presets_are_found(tmp_path):
    import yaml

    preset = load_preset("gpt2-tiny", ["n_embd=32", "layer_norm_epsilon=1e-6"])
    assert (preset.model["n_embd"], preset.model["layer_norm_epsilon"]) == (32, 1e-6)
    file = tmp_path / "own.yaml"
    file.write_text(yaml.safe_dump(preset.to_dict(), sort_keys=False))
    assert load_preset(file) == preset
    assert preset.plan(["steps=7"]).stages[0].steps == 7
    assert preset.plan().stages[0].steps == 300  # an override is not kept
    with pytest.raises(T2RError, match=r"no preset 'gpt2'.*gpt2-tiny.*or a model folder"):
        load_preset("gpt2")
    with pytest.raises(T2RError, match=r"preset file .* does not exist"):
        load_preset(tmp_path / "none.yaml")


MODEL = "model: {model_type: gpt2}\n"
TOKENIZER = "tokenizer: {kind: bpe, vocab_size: 300}\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[", "is not valid YAML"),
        ("3", "has no model"),
        (TOKENIZER, "has no model"),
        (MODEL, "`tokenizer` requires a kind"),
        (MODEL + "tokenizer: bpe", "`tokenizer` requires a kind"),
        (MODEL + TOKENIZER + "learning_rate: 3", "no field learning_rate"),
        (MODEL + "tokenizer: {kind: bpe, vocab_size: 300, size: 3}", "a tokenizer has no field size"),
        (MODEL + "tokenizer: {kind: bpe, vocab_size: many}", "vocab_size must be an integer; got 'many'"),
        (MODEL + "tokenizer: {kind: letters}", "no tokenizer of kind 'letters'"),
        (MODEL + "tokenizer: {kind: bpe}", "a bpe tokenizer requires a vocab_size"),
        (MODEL + TOKENIZER + "recipe: 3", "`recipe` must be the name of a recipe or its contents"),
        (MODEL + TOKENIZER + "swap: {feature_sise: 3}", "swap: unknown option feature_sise"),
        ("model: {model_type: gpt7}\n" + TOKENIZER, "transformers has no model_type 'gpt7'"),
        ("model: {n_embd: 3}\n" + TOKENIZER, "transformers has no model_type"),
        ("model: {model_type: vit}\n" + TOKENIZER, "vit is not a causal language model"),
        ("model: {model_type: speech_to_text}\n" + TOKENIZER, "speech_to_text is not a causal language model"),
        ("model: {model_type: marian}\ntokenizer: {kind: word}", "must be of kind bpe"),
        ("model: {model_type: gpt2, n_layers: 3}\n" + TOKENIZER, "gpt2 has no field n_layers"),
    ],
)
def test_presets_that_are_refused(tmp_path, text, words):
    (file := tmp_path / "own.yaml").write_text(text)
    with pytest.raises(T2RError) as error:
        load_preset(file)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("n_layr=3", "gpt2 has no field n_layr"),
        ("n_layer", "write field=value"),
        ("=3", "write field=value"),
        ("model_type=bart", "write field=value, with a field"),
        ("n_layer=[", "not valid YAML"),
        ("n_layer=many", "n_layer"),
        ("vocab_size=5", "vocab_size 5 is less than the tokenizer's 7"),
    ],
)
def test_models_that_are_refused(override, words):
    with pytest.raises(T2RError) as error:
        load_preset("gpt2-tiny", [override]).make_config(word_tokenizer(["a", "b", "c"]))
    assert words in str(error.value)


def test_a_saved_recipe_loads_as_the_same(tmp_path):
    import yaml

    recipe = load_recipe("paper-lm", ["finetune.steps=7"])
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe.to_dict(), sort_keys=False))
    assert load_recipe(file) == recipe
