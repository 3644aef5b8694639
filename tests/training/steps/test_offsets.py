"""Blocks whose positions start at random places."""

import copy
import logging
import re

import pytest
import torch

import t2r
from families import FAMILIES, POSITIONS, VOCABULARY, tiny
from t2r.errors import T2RError
from t2r.plans import MemoryPlan
from t2r.surgery.adapters import family_of
from t2r.tasks import LanguageModeling
from t2r.training.loop.trainer import StageTrainer
from t2r.training.recipes.recipe import Stage, load_recipe
from t2r.training.sessions import run_stage as running
from t2r.training.sessions.run import Run
from t2r.training.sessions.run_stage import run_stage
from t2r.training.steps.job import Job, Settings
from t2r.training.steps.offsets import Room, moved, obstacle_of
from t2r.training.steps.order import OFFSET, READING, Order, collate

LENGTH = 16
IDS = torch.randint(3, VOCABULARY, (8, LENGTH), generator=torch.Generator().manual_seed(1))


class Rows(LanguageModeling):
    """Language modeling on eight rows of random tokens."""

    def __init__(self, documents=False):
        super().__init__(None, [], documents=documents)

    def dataset(self, block_size):
        positions = {"position_ids": torch.arange(LENGTH) % 7} if self.documents else {}
        return [{"input_ids": row, "labels": row} | positions for row in IDS]


def stage(objective="distill", **fields):
    given = {"steps": 6, "block_size": LENGTH, "batch_tokens": 2 * LENGTH, "reach": 1000, "learning_rate": 1e-2}
    return Stage("only", objective, **({"train": "maps"} if objective == "transfer" else {}), **(given | fields))


def pair(model_type="llama", dtype=torch.float32, states=True, **changes):
    """A model with windows, and states of what has left them, and its teacher."""
    base = tiny(model_type, dtype)
    if changes:
        config = copy.deepcopy(base.config)
        for name, value in changes.items():
            setattr(config, name, value)
        base = type(base)(config).to(dtype).eval()
    heads = [family_of(base).shape(site.module).num_key_value_heads for site in family_of(base).sites(base)]
    plan = MemoryPlan(tuple((4,) * n for n in heads), 2, None if states else tuple((False,) * n for n in heads))
    options = load_recipe("memory-lm").swap | {"feature_size": 4} if states else {}
    return t2r.swap(copy.deepcopy(base), **options, plan=plan), base.requires_grad_(False)


def train(folder, student, teacher, what, documents=False, **settings):
    run = Run(folder / "run", {})
    job = Job(Rows(documents), teacher, Settings(progress=False, **settings))
    return run_stage(run, job, student, what), [entry["loss"] for entry in run.facts["only.log"]]


# --- Where blocks can be moved --------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", FAMILIES)
def test_the_teacher_is_indifferent_to_the_offset_where_blocks_are_moved(model_type):
    model = tiny(model_type, FAMILIES[model_type].dtype)
    what = stage()
    if obstacle_of(model) is not None:
        assert Room.of(model, what).largest == 0
        return
    assert Room.of(model, what) == Room(POSITIONS - LENGTH)
    call = {"input_ids": IDS, "use_cache": False}
    offsets = torch.arange(len(IDS)) * (POSITIONS - LENGTH) // (len(IDS) - 1)
    with torch.no_grad():
        one, other = model(**call).logits, model(**moved(call, offsets)).logits
    torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)  # angles are computed in float32


def test_most_families_with_rotary_positions_are_moved():
    free = {name for name in FAMILIES if obstacle_of(tiny(name, FAMILIES[name].dtype)) is None}
    assert {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt_neox", "phi"} <= free
    assert not free & {"gpt2", "opt", "bart", "t5", "marian", "adaptive_lm"}


@pytest.mark.parametrize(
    ("model_type", "change", "reason"),
    [
        ("gpt2", {}, "positions of gpt2 are learned, not rotary"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "depend on"),
        ("llama", {"max_position_embeddings": LENGTH}, "a block reaches 16"),
    ],
)
def test_a_stage_says_why_blocks_are_not_moved(tmp_path, caplog, model_type, change, reason):
    student, teacher = pair(model_type, **change)
    caplog.set_level(logging.INFO, "t2r")
    train(tmp_path, student, teacher, stage(steps=1))
    assert "its blocks all start at position 0: " in caplog.text
    found = Room.of(student, stage())
    assert found.largest == 0
    assert found.obstacle in caplog.text
    assert re.search(reason, found.obstacle)


def test_without_the_option_nothing_is_moved():
    assert Room.of(tiny("llama"), stage(reach=None)) == Room(0)
    for wrong in (0, 2.5, "far"):
        with pytest.raises(T2RError, match="reach must be a whole number, at least 1"):
            stage(reach=wrong)
    assert Room.of(tiny("llama"), stage(reach=LENGTH + 5)) == Room(5)


def test_the_recipe_for_budgets_moves_blocks():
    assert all(each.reach == 8192 for each in load_recipe("memory-lm").stages)
    assert not any(each.reach for each in load_recipe("distill-lm").stages)


# --- The offsets ----------------------------------------------------------------------------------------------


def test_offsets_depend_on_the_seed_and_the_place():
    def drawn(seed=0, room=100):
        order = Order(list("abcdef"), 500, seed, room)
        return [order[i][2] for i in reversed(range(500))][::-1]

    assert drawn() == drawn() == [Order(list("abcdef"), 500, 0, 100)[i][2] for i in range(500)]
    assert drawn() != drawn(seed=1)
    assert (min(drawn()), max(drawn())) == (0, 100)
    assert set(drawn(room=1)) == {0, 1}
    assert not any(drawn()[::2])  # every second block begins where texts begin
    assert Order(list("abcdef"), 500)[3] == Order(list("abcdef"), 500, 0, 100)[3][:2]


def test_rows_of_a_batch_have_the_offsets_of_their_items():
    batch = collate([("x", 1, 7), ("yz", 2, 9)], lambda items: {}, len)
    assert {name: x.tolist() for name, x in batch.items()} == {READING: [1, 2, 2], OFFSET: [7, 9, 9]}


# --- Training -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("objective", ["task", "transfer", "distill"])
def test_only_the_student_reads_moved_positions(tmp_path, objective, documents):
    student, teacher = pair()
    read = {"student": [], "teacher": []}
    for name, model in (("student", student), ("teacher", teacher)):
        model.base_model.register_forward_pre_hook(
            lambda m, a, o, name=name: read[name].append(o.get("position_ids")), with_kwargs=True
        )
    train(tmp_path, student, teacher, stage(objective), documents=documents)
    order = Order(Rows().dataset(LENGTH), 12, 0, POSITIONS - LENGTH)
    own = torch.arange(LENGTH) % 7 if documents else torch.arange(LENGTH)
    found = [x for x in read["student"] if x is not None and len(x) == 2]  # without the verification of the head
    assert [x.tolist() for x in found] == [
        [(own + order.offset(i)).tolist(), (own + order.offset(i + 1)).tolist()] for i in range(0, 12, 2)
    ]
    for x in read["teacher"]:
        assert x is None if not documents else len(x) == 1 or torch.equal(x, own.expand(2, -1))


def test_windows_alone_learn_the_same_wherever_blocks_are(tmp_path):
    """They are softmax attention: only what a state sees changes."""
    found = []
    for reach in (None, 1000):
        student, teacher = pair(dtype=torch.float64, states=False)
        found.append(train(tmp_path / str(reach), student, teacher, stage(reach=reach))[1])
    assert found[0] == pytest.approx(found[1], rel=1e-4)


class Dying(StageTrainer):
    """Raises after the first checkpoint."""

    def _save_checkpoint(self, *args, **options):
        super()._save_checkpoint(*args, **options)
        raise KeyError


@pytest.mark.parametrize("objective", ["transfer", "distill"])
def test_a_resumed_stage_draws_the_same_offsets(tmp_path, monkeypatch, objective):
    what = stage(objective, device_tokens=LENGTH)
    whole, losses = train(tmp_path / "whole", *pair(), what, save_steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(running, "StageTrainer", Dying)
        with pytest.raises(KeyError):
            train(tmp_path / "cut", *pair(), what, save_steps=2)
    torch.manual_seed(99)
    resumed, again = train(tmp_path / "cut", *pair(), what, save_steps=2)
    assert again == losses
    for (name, x), y in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(x, y), name
    _, others = train(tmp_path / "fixed", *pair(), stage(objective, device_tokens=LENGTH, reach=None))
    assert others != losses
