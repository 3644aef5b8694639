"""Averages of weights at the end of a stage: where the points are, the mean, resuming, and time budgets."""

import copy

import pytest
import torch

from t2r.errors import T2RError
from t2r.tasks import Translation
from t2r.training.loop.averaging import averaging_points
from t2r.training.loop.trainer import StageTrainer
from t2r.training.recipes.recipe import Stage
from t2r.training.sessions.run import Run
from t2r.training.sessions.run_stage import run_stage
from t2r.training.steps.job import Job, Settings
from translating import make_model, make_tokenizer, write_pairs


@pytest.mark.parametrize(
    ("steps", "count", "epoch", "points"),
    [
        (20_000, 5, 300, [18_800, 19_100, 19_400, 19_700, 20_000]),  # the last five epochs
        (1_000, 5, 300, [800, 850, 900, 950, 1_000]),  # epochs are long: the last quarter
        (100, 1, 10, [100]),
        (3, 5, 0.5, [1, 2, 3]),  # a stage of three steps has three points
        (1, 5, 100, [1]),
        (40, 4, 2.5, [32, 35, 38, 40]),
    ],
)
def test_points(steps, count, epoch, points):
    found = averaging_points(steps, count, epoch)
    assert found[-1] == steps
    assert len(found) == len(points)
    assert all(abs(a - b) <= 1 for a, b in zip(found, points, strict=True))


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    source, target = write_pairs(folder, "train", 24)
    task = Translation(make_tokenizer(), source, target, progress=False)
    task.check(make_model(), [64])
    task.read()
    return task


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("T2R_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))


def stage(**options):
    given = {"block_size": 64, "batch_tokens": 64, "learning_rate": 1e-2, "average": 3, **options}
    return Stage("a", "task", **({"steps": 8} | given if "minutes" not in given else given))


def train(task, folder, plan, **settings):
    run = Run(folder, {})
    run.remember("begun", lambda: True)
    return run_stage(run, Job(task, settings=Settings(progress=False, **settings)), make_model(), plan)


@pytest.fixture
def seen(monkeypatch):
    """The weights after every step."""
    real, found = StageTrainer.training_step, {}

    def watched(self, model, *args, **kwargs):
        found[self.state.global_step] = copy.deepcopy(self.learner.student.state_dict())
        return real(self, model, *args, **kwargs)

    monkeypatch.setattr(StageTrainer, "training_step", watched)
    return found


def test_the_result_is_the_mean_of_the_last_weights(task, tmp_path, seen):
    plan = stage()
    last = copy.deepcopy(train(task, tmp_path / "last", stage(average=1)).state_dict())
    seen.clear()
    mean = train(task, tmp_path / "mean", plan).state_dict()
    seen[8] = last  # training itself is the same
    points = averaging_points(8, 3, 1e9)
    assert points == [6, 7, 8]
    for name, x in mean.items():
        assert torch.allclose(x, torch.stack([seen[step][name] for step in points]).mean(0), atol=1e-7), name
    assert any(not torch.equal(mean[name], last[name]) for name in mean)


def test_resumed_is_as_if_it_had_not_been_stopped(task, tmp_path, monkeypatch):
    plan = stage(steps=12, average=6)
    whole = train(task, tmp_path / "whole", plan, save_steps=2).state_dict()

    class Stopped(Exception):
        pass

    real = StageTrainer.training_step

    def stops(self, *args, **kwargs):
        if self.state.global_step == 11:
            raise Stopped
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(StageTrainer, "training_step", stops)
        with pytest.raises(Stopped):
            train(task, tmp_path / "parts", plan, save_steps=2)
    resumed = train(task, tmp_path / "parts", plan, save_steps=2).state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_with_a_time_budget_the_last_weights_are_part_of_it(task, tmp_path, seen):
    model = train(task, tmp_path / "run", stage(minutes=0.02, average=2))
    assert all(x.isfinite().all() for x in model.state_dict().values())
    final = seen[max(seen)]
    assert any(not torch.equal(x, final[name]) for name, x in model.state_dict().items())


def test_adapters_are_not_averaged():
    with pytest.raises(T2RError, match="not possible with train: lora"):
        stage(train="lora")
