"""Recipes: the paper's settings value for value, the rates of its schedule, overrides, and what is refused."""

import dataclasses
import math

import pytest

from t2r.errors import T2RError
from t2r.training.recipe import Stage, load_recipe, shipped_recipes
from t2r.training.schedule import Schedule

# Typed from the paper's appendix (language modeling, conversion), not from the recipe.
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
}
PAPER_SWAP = {"feature_map": "t2r", "feature_size": 32, "init": "paper"}


def fairseq_cosine(step, *, lr, warmup, init, floor, period, mult, shrink):
    """fairseq's `cosine`, as its `step_update` has it."""
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


def test_paper_lm_is_the_paper():
    recipe = load_recipe("paper-lm")
    (stage,) = recipe.stages
    effective = dataclasses.asdict(stage)
    assert {name: effective[name] for name in PAPER} == PAPER
    assert recipe.swap == PAPER_SWAP
    # Whatever else a stage has does not apply to this one, or is as good as absent.
    rest = set(effective) - set(PAPER)
    assert rest == {
        *("name", "tokens", "epochs", "minutes", "device_tokens", "map_learning_rate"),
        *("betas", "epsilon", "kl_weight", "task_weight", "temperature", "lora_rank"),
    }
    assert all(effective[name] is None for name in ("tokens", "epochs", "minutes", "device_tokens"))
    assert stage.map_learning_rate is None


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
def test_paper_rates(step, rate):
    (stage,) = load_recipe("paper-lm").stages
    ours = stage.make_schedule(stage.steps).at(step)
    assert ours == pytest.approx(fairseq_cosine(step, **SETTINGS), rel=1e-9)
    if rate is not None:
        assert ours == pytest.approx(rate, rel=1e-9)


@pytest.mark.parametrize("mult", [1, 1.5, 2])
def test_restarts_are_fairseqs(mult):
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


def test_the_default_transfers_and_then_distills():
    recipe = load_recipe("distill-lm")
    assert [(s.objective, s.train) for s in recipe.stages] == [("transfer", "maps"), ("distill", "all")]
    assert recipe.swap["feature_map"] == "hedgehog"
    assert shipped_recipes() == ["distill-lm", "paper-lm"]


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
    assert (first.steps, first.tokens) == (10, None)  # a budget replaces the one that was there
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
        ("finish.steps=3", "no stage 'finish'; there are transfer, distill"),
        ("transfer.stepz=3", "no field 'stepz'"),
        ("transfer.steps=many", "'many' is not a whole number"),
        ("transfer.steps=1.5", "1.5 is not a whole number"),
        ("transfer.steps=true", "True is not a whole number"),
        ("transfer.steps=.inf", "inf is not a whole number"),
        ("transfer.steps=0", "steps must be positive"),
        ("transfer.steps=null", "exactly one of"),
        ("transfer.steps=[", "not YAML"),
        ("transfer.learning_rate=fast", "'fast' is not a number"),
        ("transfer.learning_rate=0", "learning_rate must be positive"),
        ("transfer.learning_rate=null", "None is not a number"),
        ("transfer.block_size=0", "block_size must be positive"),
        ("transfer.block_size=500", "not a whole number of 500-token blocks"),
        ("transfer.train=all", "it trains maps only"),
        ("distill.train=some", "no train 'some'; choose one of maps"),
        ("distill.objective=win", "no objective 'win'"),
        ("distill.optimizer=sgd", "no optimizer 'sgd'"),
        ("distill.schedule=step", "no schedule 'step'"),
        ("distill.schedule=cosine_restarts", "stage 'distill': schedule cosine_restarts needs a period"),
        ("distill.period_mult=0.5", "a cycle cannot be shorter"),
        ("distill.betas=0.9", "betas are two numbers"),
        ("distill.betas=[0.9]", "betas are two numbers"),
        ("distill.name=../x", "a name is made of"),
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
        ("stages: [", "is not YAML"),
        ("", "has no list of stages"),
        ("- 3", "has no list of stages"),
        ("stages: {a: 1}", "has no list of stages"),
        ("stages: []", "has no list of stages"),
        ("stages: [a]", "a stage needs a name and an objective"),
        ("stages: [{name: a}]", "a stage needs a name and an objective"),
        (f"stages: [{STAGE}]\nstage: 3", "no field stage"),
        ("stages: [{name: a, objective: task, steps: 3, lr: 1}]", "stage 'a': no field 'lr'"),
        ("stages: [{name: a, objective: task}]", "exactly one of steps, tokens, epochs, minutes; got none"),
        ("stages: [{name: a, objective: task, steps: 3, epochs: 1}]", "got ['steps', 'epochs']"),
        (f"stages: [{STAGE}, {STAGE}]", "two stages have the same name"),
        (f"stages: [{STAGE}]\nswap: [t2r]", "swap is made of the options"),
        (f"stages: [{STAGE}]\nswap: {{feature_sise: 3}}", "swap is made of the options"),
    ],
)
def test_recipes_that_are_refused(tmp_path, text, words):
    file = tmp_path / "own.yaml"
    file.write_text(text)
    with pytest.raises(T2RError) as error:
        load_recipe(file, ["a.steps=4"] if "stages: [a]" in text else [])
    assert words in str(error.value)


def test_where_recipes_are_found(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("stages: [{name: 5, objective: task, steps: 1e3, learning_rate: 1e-3}]")
    recipe = load_recipe(file)
    assert (recipe.name, recipe.stages[0].name, recipe.stages[0].steps) == ("own", "5", 1000)
    assert recipe.stages[0].learning_rate == 0.001
    with pytest.raises(T2RError, match=r"no recipe 'paper'.*distill-lm, paper-lm"):
        load_recipe("paper")
    with pytest.raises(T2RError, match="there is no recipe file"):
        load_recipe(tmp_path / "none.yaml")
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(T2RError, match="cannot be read"):
        load_recipe(file)


def test_a_stage_made_in_python_is_checked_too():
    with pytest.raises(T2RError, match="exactly one"):
        Stage("a", "task")
    with pytest.raises(T2RError, match="minutes must be positive"):
        Stage("a", "task", minutes=math.nan)


def test_a_recipe_survives_its_file(tmp_path):
    import yaml

    recipe = load_recipe("paper-lm", ["finetune.steps=7"])
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe.to_dict(), sort_keys=False))
    assert load_recipe(file) == recipe
