"""The session is independent of the task: it runs a translation task defined in this file."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div, log_softmax

import t2r
from families import EOS, PAD, VOCABULARY, tiny
from t2r.model.logits import Readout
from t2r.tasks import TASKS, Task
from t2r.tasks.base import exchanged
from t2r.training.loop.trainer import StageTrainer
from t2r.training.recipes.recipe import Recipe, Stage
from t2r.training.sessions.sensitivity import most_sensitive
from t2r.training.sessions.session import Session, table_of
from t2r.training.steps.job import Job, Settings

BLOCK = 12


class Copying(Task):
    """Pairs of different lengths. The target is the reversed source. Items are padded in `collate`."""

    name = "copying"

    def __init__(self, count=8):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(3, BLOCK, (count,), generator=generator).tolist()
        self.pairs = [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in lengths]

    def describe(self):
        return {"pairs": len(self.pairs)}

    def check(self, model, block_sizes):
        assert model.config.is_encoder_decoder

    def prepare(self, teacher, longest):
        assert all(len(source) < longest for source in self.pairs)
        return ["pairs"]

    def dataset(self, block_size):
        return self.pairs

    def collate(self, items):
        ends = torch.tensor([EOS])
        sources = [torch.cat([x, ends]) for x in items]
        targets = [torch.cat([x.flip(0), ends]) for x in items]
        starts = [torch.cat([ends, x[:-1]]) for x in targets]

        def padded(rows, value=PAD):
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

        return {
            "input_ids": padded(sources),
            "attention_mask": padded([torch.ones_like(x) for x in sources]),
            "decoder_input_ids": padded(starts),
            "labels": padded(targets, -100),
        }

    def labels(self, batch):
        return batch["labels"]  # the decoder's inputs are already shifted

    def disturbed(self, batch, share):
        return batch | {"decoder_input_ids": exchanged(batch["decoder_input_ids"], share)}

    def measure(self, model, teacher=None):
        batch = self.collate(self.pairs)
        with torch.no_grad():
            logits = model.eval()(**self.inputs(batch), use_cache=False).logits
        return {"loss": cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).item()}

    def told(self, measured):
        return f"loss {measured['loss']:.3f}"

    @staticmethod
    def table(measured, *, compared):
        return ("model", "loss"), [(name, f"{values['loss']:.2f}") for name, values in measured]


STAGES = (
    Stage("transfer", "transfer", "maps", steps=8, block_size=BLOCK, batch_tokens=4 * BLOCK, learning_rate=2e-2),
    Stage("distill", "distill", steps=8, block_size=BLOCK, batch_tokens=8 * BLOCK, device_tokens=4 * BLOCK),
)


@pytest.fixture
def marian():
    teacher = tiny("marian", torch.float32)
    teacher.final_logits_bias.normal_()  # an operation after the head
    return t2r.swap(
        copy.deepcopy(teacher), feature_map="t2r", feature_size=4, recurrent="both"
    ), teacher.requires_grad_(False)


def test_an_encoder_decoder_is_transferred_and_distilled(tmp_path, marian, monkeypatch):
    student, teacher = marian
    monkeypatch.setitem(TASKS, Copying.name, Copying)
    task, plan = Copying(), Recipe("toy", STAGES)
    results = {"task": task.name, "stages": {}}
    with Session(str(tmp_path / "out"), plan, task, Settings(progress=False), torch.device("cpu"), {}) as session:
        session.prepare(student, teacher)
        results["teacher"] = session.measure("teacher", teacher)
        results["swapped"] = session.measure("swapped", student, teacher)
        for stage in plan.stages:
            student = session.train(student, stage)
            results["stages"][stage.name] = session.measure(stage, student, teacher)
        scan = session.most_sensitive(student, BLOCK)
    assert sorted(layer for layer, _ in scan) == [0, 1, 2]
    for log in session.logs().values():
        assert log[-1]["loss"] < log[0]["loss"]
    gaps = [abs(values["loss"] - results["teacher"]["loss"]) for values in results["stages"].values()]
    assert gaps[-1] < abs(results["swapped"]["loss"] - results["teacher"]["loss"]), (gaps, results)
    header, rows = table_of(results, compared=True)
    assert header == ("model", "loss")
    assert [name for name, _ in rows] == ["teacher", "swapped, not trained", "after transfer", "after distill"]


def test_a_stage_named_teacher_has_a_score_of_its_own(tmp_path, marian):
    student, teacher = marian
    stage = Stage("teacher", "distill", steps=1)
    plan, scores = Recipe("toy", (stage,)), []
    for _ in range(2):  # the second session resumes the first
        with Session(str(tmp_path / "out"), plan, Copying(), Settings(), torch.device("cpu"), {}) as session:
            scores.append([session.measure("teacher", teacher), session.measure(stage, student)])
    assert scores[0][0] != scores[0][1]
    assert scores[0] == scores[1]


def test_the_loss_is_plain_kl_over_the_targets(tmp_path, marian):
    student, teacher = marian
    task = Copying()
    trainer = StageTrainer(Job(task, teacher, Settings(progress=False)), student, STAGES[1], 1, tmp_path)
    batch = task.collate(task.pairs[:4])
    loss = trainer.compute_loss(trainer.learner, batch)
    inputs, keep = task.inputs(batch), batch["labels"].flatten() >= 0
    ours, theirs = (m(**inputs, use_cache=False).logits.flatten(0, 1)[keep] for m in (student, teacher))
    expected = kl_div(log_softmax(ours, -1), log_softmax(theirs, -1), reduction="batchmean", log_target=True)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    learning = [p for p in student.parameters() if p.requires_grad]
    own = torch.autograd.grad(loss, learning, allow_unused=True)
    plain = torch.autograd.grad(expected, learning, allow_unused=True)
    for x, y in zip(own, plain, strict=True):
        if y is not None:
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-5)


def test_an_interrupted_scan_is_resumed(marian):
    student, _ = marian
    task, known = Copying(), {}

    class Stopped(Exception):
        pass

    def remember(name, measure, most=2):
        if name not in known:
            if len(known) == most:
                raise Stopped
            known[name] = measure()
        return known[name]

    with pytest.raises(Stopped):
        most_sensitive(student, task, BLOCK, remember=remember)
    assert list(known) == ["exact", "0"]
    again = most_sensitive(student, task, BLOCK, remember=lambda name, measure: remember(name, measure, 9))
    assert list(known) == ["exact", "0", "1", "2"]
    assert again == most_sensitive(student, task, BLOCK)


def test_a_scan_computes_logits_in_slices(marian, monkeypatch):
    student, _ = marian
    whole = most_sensitive(student, Copying(), BLOCK)
    monkeypatch.setattr("t2r.training.sessions.sensitivity.logits_at_once", lambda device: 5 * VOCABULARY)
    sizes = []
    real = Readout.__call__

    def call(self, states):
        sizes.append(len(states))
        return real(self, states)

    monkeypatch.setattr(Readout, "__call__", call)
    sliced = most_sensitive(student, Copying(), BLOCK)
    assert max(sizes) == 5
    assert [layer for layer, _ in sliced] == [layer for layer, _ in whole]
    # Sums in another order.
    assert [cost for _, cost in sliced] == pytest.approx([cost for _, cost in whole], abs=1e-5)
