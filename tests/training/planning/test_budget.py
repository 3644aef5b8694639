"""Time budgets: the schedule computed from measured speeds, and timing, which must not change the model."""

import copy
import dataclasses
import json
import math

import pytest
import torch

import t2r
from families import tiny
from t2r.errors import T2RError
from t2r.generation.teacher import WritingSpeed
from t2r.tasks import LanguageModeling
from t2r.training.planning import budget
from t2r.training.planning.budget import (
    FEWEST_STEPS,
    MEASURING,
    SCANNING,
    WANTED_STEPS,
    WRITING,
    Timetable,
    Work,
    arrange,
    decide,
    plan_stage,
    steps_of,
    with_batch,
)
from t2r.training.planning.plan import within
from t2r.training.planning.plan_log import plan_lines
from t2r.training.planning.timing import (
    Cost,
    Speeds,
    sizes_to_time,
    slices,
    through,
    time_again,
    time_all,
    time_optimizer,
    time_slices,
)
from t2r.training.recipes.recipe import Recipe, Stage
from t2r.training.sessions.run import Run
from t2r.training.steps.job import Job, Settings

PLAN = Recipe(
    "toy",
    (
        Stage("transfer", "transfer", "maps", steps=100, block_size=512, batch_tokens=8192),
        Stage("distill", "distill", steps=300, block_size=512, batch_tokens=16384),
    ),
)
LAPTOP = Speeds({"transfer": Cost(0.001, 0.1), "distill": Cost(0.003, 0.5)}, 0.001, WritingSpeed(0.02, 0.01, 64))
"""Speeds of a model of about 100M parameters on two cores."""


def work(minutes=None, **fields):
    asked = {"teacher_tokens": 10_000_000, "windows": 900, "window": 512, "reads": 7, "passes": 31}
    return Work(within(PLAN, minutes), **(asked | fields))


@pytest.mark.parametrize("minutes", [30, 60, 600])
def test_the_schedule_fits_into_the_budget(minutes):
    total = 60 * minutes
    found = decide(work(minutes), LAPTOP, total, 40.0)
    assert 0.8 * total < found.seconds <= total
    assert found.writing <= WRITING * total
    assert found.measuring <= MEASURING * total
    assert found.scanning <= SCANNING * total
    # As many steps as are wanted, or batches of one block.
    assert all(stage.steps >= WANTED_STEPS or stage.batch_tokens == 512 for stage in found.stages.values())
    first, second = (found.stages[name].seconds for name in ("transfer", "distill"))
    assert second / first == pytest.approx(3, rel=0.2)  # in proportion to their steps
    assert Timetable.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert Speeds.from_dict(json.loads(json.dumps(LAPTOP.to_dict()))) == LAPTOP


def test_reductions_are_reported():
    found = decide(work(30), LAPTOP, 1800, 40.0)
    words = "\n".join(found.shrunk)
    assert f"the teacher generates {found.teacher_tokens:,} tokens instead of 10,000,000" in words
    assert f"{found.windows} of 900 windows are evaluated" in words
    assert found.stages["distill"].batch_tokens < 16384
    assert f"a batch of distill has {found.stages['distill'].batch_tokens:,} tokens instead of 16,384" in words
    plenty = decide(work(10**5), LAPTOP, 60 * 10**5, 40.0)
    assert plenty.shrunk == []
    assert (plenty.teacher_tokens, plenty.windows, plenty.scanned) == (10_000_000, 900, 16)


def test_what_is_held_out_shrinks_with_what_the_teacher_generates():
    """The plan has the windows that there will be, and their time only."""
    asked = work(30, teacher_tokens=10**9, windows=400, windows_of=lambda tokens: 3)
    made = decide(asked, LAPTOP, 1800.0, 0.0)
    assert made.teacher_tokens < asked.teacher_tokens
    assert made.windows == 3
    assert "windows are evaluated" not in " ".join(made.shrunk)
    assert decide(dataclasses.replace(asked, teacher_tokens=0), LAPTOP, 1800.0, 0.0).windows > 3


@pytest.mark.parametrize("minutes", [0.001, 0.5, 3])
def test_too_small_a_budget_is_refused_with_a_sufficient_one(minutes):
    with pytest.raises(T2RError, match="is not enough on this machine") as error:
        decide(work(minutes), LAPTOP, 60 * minutes, 20.0)
    enough = float(str(error.value).split("give about ")[1].split(" ")[0])
    assert enough > minutes
    found = decide(work(enough), LAPTOP, 60 * enough, 20.0)
    assert min(stage.steps for stage in found.stages.values()) >= FEWEST_STEPS


def test_without_a_budget_nothing_is_reduced():
    found = decide(work(), LAPTOP, None, 40.0)
    assert found.shrunk == []
    assert [stage.steps for stage in found.stages.values()] == [100, 300]
    assert found.stages["distill"].seconds == pytest.approx(300 * (16384 * 0.003 + 0.5))
    assert found.windows == 900


def test_the_batch_size_follows_the_speed():
    stage = dataclasses.replace(PLAN.stages[1], steps=None, minutes=10)
    found = plan_stage(stage, LAPTOP, None, 0)
    assert found.batch_tokens == 512  # 2 seconds a step: 294 of them
    assert found.steps == int(600 / LAPTOP.stages["distill"].of(512))
    assert plan_stage(stage, LAPTOP, 3600.0, 0).batch_tokens == 2048  # 6.6 seconds: 541 of them, of 4,096 not 300
    slow = Speeds({"distill": Cost(1.0, 0.0)}, 0.0)
    least = plan_stage(stage, slow, None, 0)
    assert (least.batch_tokens, least.steps) == (512, 1)
    assert with_batch(stage, 512).batch_tokens == 512
    fast = plan_stage(stage, Speeds({"distill": Cost(1e-6, 0.0)}, 0.0), None, 0)
    assert fast.batch_tokens == 16384


def test_a_batch_is_not_halved_for_little(monkeypatch):
    """Where the optimizer, or launches on a GPU, take most of a step, smaller batches have hardly more steps."""
    stage = dataclasses.replace(PLAN.stages[1], steps=None, minutes=10)
    found = plan_stage(stage, Speeds({"distill": Cost(0.001, 4.0)}, 0.0), None, 0)
    assert found.batch_tokens == 4096  # 8.1 seconds; 6.0 with half as many tokens
    assert through(16384, 20.0, 512, 4.0).of(4096) == pytest.approx(4.0 + 16.0 * 3584 / 15872)
    assert through(16384, 4.0, 512, 4.1) == Cost(0.0, 4.1)


def test_blocks_of_pairs_are_divided():
    stage = Stage("distill", "distill", minutes=1, block_size=4096, batch_tokens=16384, learning_rate=4e-4)
    found = plan_stage(stage, Speeds({"distill": Cost(0.001, 0.0)}, 0.0), None, 0, smallest=512)
    assert (found.batch_tokens, found.steps) == (512, 117)
    made = with_batch(stage, 512)
    assert (made.batch_tokens, made.block_size) == (512, 512)
    assert made.learning_rate == pytest.approx(4e-4 / 32**0.25)
    assert plan_stage(stage, Speeds({"distill": Cost(0.001, 0.0)}, 0.0), None, 0).batch_tokens == 4096


def test_learning_rates_follow_the_fourth_root_of_the_batch():
    """Measured in docs/log/2026-11.md. Those of the maps do not, if the recipe has any."""
    stage = Stage(
        "distill", "distill", "all", steps=9, batch_tokens=16384, learning_rate=2.5e-4, map_learning_rate=2e-3
    )
    made = with_batch(stage, 1024)
    assert made.learning_rate == pytest.approx(2.5e-4 / 2)
    assert made.map_learning_rate == 2e-3
    assert "with learning rate 0.00013" in budget.smaller_batch(stage, 1024)
    maps = Stage("transfer", "transfer", "maps", steps=9, batch_tokens=8192, learning_rate=2.5e-2)
    assert with_batch(maps, 512).learning_rate == 2.5e-2
    assert "rate" not in budget.smaller_batch(maps, 512)


def test_several_processes_share_a_smaller_batch(monkeypatch):
    monkeypatch.setattr(budget.processes, "count", lambda: 3)
    assert [budget.halved(8 * blocks, 8, 8) // 8 for blocks in (12, 9, 6, 3)] == [6, 3, 3, 0]
    assert [budget.halved(tokens, 8, 2) for tokens in (24, 12, 6)] == [12, 6, 0]  # blocks of 4, and of 2
    assert with_batch(Stage("a", "task", steps=1, block_size=8, batch_tokens=24), 6).block_size == 2


@pytest.mark.parametrize(
    ("fields", "steps"), [({"steps": 7}, 7), ({"tokens": 8192 * 3 + 1}, 3), ({"epochs": 2.0}, 24), ({"tokens": 1}, 1)]
)
def test_steps_of_a_stage(fields, steps):
    made = Stage("a", "task", batch_tokens=8192, **fields)
    assert steps_of(made, 100_000) == steps


def test_the_time_of_generation():
    speed = WritingSpeed(0.02, 0.01, 64)
    batch = 512 * (0.02 + 0.64)
    assert speed.seconds(64 * 512, 512) == pytest.approx(batch)
    assert speed.seconds(64 * 512 + 1, 512) == pytest.approx(2 * batch)
    assert speed.seconds(512, 512) == pytest.approx(512 * 0.03)
    assert speed.tokens(2.5 * batch, 512) == 2 * 64 * 512
    few = speed.tokens(0.5 * batch, 512)
    assert 0 < few < 64 * 512
    assert speed.seconds(few, 512) <= 0.5 * batch
    assert speed.tokens(0.0, 512) == 0


def test_the_teacher_always_generates_a_minimum():
    """However short the time is, the teacher generates some text; then training has too little time."""
    found = arrange(work(1), LAPTOP, 60, 0.0)
    assert found.teacher_tokens == 16 * 512
    assert not found.enough


# --- Timing ---------------------------------------------------------------------------------------------------


class Clock:
    """A clock that advances only with work."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Counted:
    """A task with batches of any requested size."""

    def example(self, rows, length):
        return {"labels": torch.zeros(rows, length, dtype=torch.long)}

    def labels(self, batch):
        return batch["labels"]


@pytest.mark.parametrize(
    ("token", "sizes"),
    [
        (1.0, [(1, 128)]),  # too slow to be repeated
        (0.01, [(1, 128)] * 2),
        (1e-3, [(1, 128), (1, 128), (1, 512)]),
        (1e-9, [(1, 128), (1, 128), (1, 512), (4, 512), (16, 512)]),
    ],
)
def test_slices_grow_until_they_take_long_enough(monkeypatch, token, sizes):
    clock, seen = Clock(), []
    monkeypatch.setattr("t2r.training.planning.timing.time.perf_counter", clock)

    def step(batch):
        seen.append(tuple(batch["labels"].shape))
        clock.now += batch["labels"].numel() * token

    assert time_slices(step, Counted(), torch.device("cpu"), slices(16, 512)) == pytest.approx(token)
    assert seen == sizes


def test_on_a_gpu_the_whole_batch_is_timed_after_a_warm_up(monkeypatch):
    clock, seen = Clock(), []
    monkeypatch.setattr("t2r.training.planning.timing.time.perf_counter", clock)

    def step(batch):
        seen.append(tuple(batch["labels"].shape))
        clock.now += 0.025 if len(seen) > 3 else 5.0  # kernels are loaded; then launches take the time

    gpu = torch.device("meta")  # any device that is not a CPU
    what = Stage("distill", "distill", steps=9, block_size=512, batch_tokens=2048)
    sizes = sizes_to_time(what, gpu)
    assert time_slices(step, Counted(), gpu, sizes) == pytest.approx(0.025 / 2048)
    assert seen == [(4, 512)] * 4


def test_slices_end_with_the_batch():
    assert list(slices(6, 64)) == [(1, 64), (4, 64), (6, 64)]
    assert list(slices(1, 512)) == [(1, 128), (1, 512)]


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "muon", "nag"])
def test_timing_the_optimizer_changes_no_weight(optimizer):
    model = tiny("gpt2", torch.float32)
    stage = Stage("a", "task", steps=1, optimizer=optimizer, weight_decay=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = [p.detach().clone() for p in model.parameters()]
    assert time_optimizer(model, stage) > 0
    assert all(torch.equal(x, y) for x, y in zip(before, model.parameters(), strict=True))
    next(model.parameters()).grad.fill_(math.inf)
    time_optimizer(model, stage)
    assert all(torch.equal(x, y) for x, y in zip(before, model.parameters(), strict=True))


def test_a_run_records_its_working_time(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("t2r.training.sessions.run.time.monotonic", clock)
    run = Run(tmp_path / "run", {}, began=-10.0)
    clock.now = 5.0
    assert run.seconds == 15.0
    run.remember("a", lambda: 1)
    clock.now = 100.0
    again = Run(tmp_path / "run", {}, began=98.0)
    assert again.seconds == 17.0
    assert again.facts == {"plan": {}, "a": 1}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("objective", "train"), [("transfer", "maps"), ("distill", "all"), ("distill", "lora")])
def test_timing_does_not_change_the_model(objective, train, compiled):
    base = tiny("llama", torch.float32)
    teacher = copy.deepcopy(base).requires_grad_(False)
    student = t2r.swap(base, feature_map="t2r", decay=True)
    task = LanguageModeling(None, [])
    task.vocabulary = base.config.vocab_size
    stage = Stage("only", objective, train, steps=1, block_size=16, batch_tokens=64)
    next(student.parameters()).requires_grad_(False)
    before = {name: (x.clone(), x.requires_grad) for name, x in student.named_parameters()}
    names = [name for name, _ in student.named_modules()]
    random = torch.get_rng_state()
    torch.compiler.set_stance("force_eager")  # tests the code path without compiling
    try:
        settings = Settings(progress=False, compiled=compiled)
        speeds = time_all(Job(task, teacher, settings), student, Recipe("toy", (stage,)), None)
    finally:
        torch.compiler.set_stance("default")
    assert speeds.stages["only"].token > 0
    assert speeds.reading > 0
    assert torch.equal(torch.get_rng_state(), random)
    assert [name for name, _ in student.named_modules()] == names
    assert all(module._compiled_call_impl is None for module in student.modules())
    for name, parameter in student.named_parameters():
        assert torch.equal(parameter, before[name][0]), name
        assert parameter.requires_grad == before[name][1], name
        assert parameter.grad is None


def test_the_plan_says_what_the_teacher_generates():
    asked = work()
    timetable = decide(asked, LAPTOP, None, 0.0)
    lines = list(plan_lines(Job(LanguageModeling(None, [])), tiny("gpt2"), asked, timetable, torch.device("cpu"), None))
    assert lines[1].startswith("plan: the teacher generates 10,000,000 tokens: about ")


def test_smaller_batches_are_timed_again_where_only_whole_ones_were(monkeypatch):
    stages = PLAN.stages
    smaller = [stages[0], with_batch(stages[1], 512)]
    monkeypatch.setattr("t2r.training.planning.timing.time_stage", lambda job, model, stage: Cost(0.0, 3.0))
    found = time_again(Job(LanguageModeling(None, [])), tiny("gpt2"), stages, smaller, LAPTOP)
    assert found.stages["transfer"] == LAPTOP.stages["transfer"]
    assert found.stages["distill"].of(512) == pytest.approx(3.0)
    assert found.stages["distill"].of(16384) == pytest.approx(LAPTOP.stages["distill"].of(16384))


def test_the_plan_of_one_step_is_singular():
    stage = Stage("only", "task", "all", steps=1, block_size=16, batch_tokens=64)
    asked = Work(Recipe("toy", (stage,)), windows=1, window=16)
    lines = list(plan_lines(Job(LanguageModeling(None, [])), tiny("gpt2"), asked, None, torch.device("cpu"), None))
    assert ": 1 step of 64 tokens, 64 in total" in lines[1]
    assert lines[2] == "plan: 2 evaluations on 1 window of 16 tokens"
    assert Recipe("toy", (stage,)).told()[1].startswith("only: task, trains all, 1 step in batches of 64 tokens")
