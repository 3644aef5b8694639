"""The run folder: its path, its lock, and recovery from damaged files."""

import json
import multiprocessing
import signal
from pathlib import Path

import pytest

from families import tiny
from t2r.errors import T2RError
from t2r.training.loop.checkpoints import COMPLETE, is_whole, last_checkpoint, remove_incomplete, seal
from t2r.training.sessions.run import Run, run_folder

DAMAGED = [
    b"[" * 10_000,
    b'{"plan": null}',
    b'{"plan": 3}',
    b'{"plan": {"recipe": null}}',
    b'{"plan": {"recipe": {"stages": [3]}}}',
    b'{"plan": {"seed": 1}, "seconds": "long"}',
]


def hold(folder, held):
    """Work in a run folder until this process is killed."""
    with Run(folder, {}) as run:
        run.remember("begun", lambda: True)
        held.set()
        signal.pause()


@pytest.mark.parametrize("written", ["out", "out/", "out//", "./out", "sub/../out/"])
def test_the_run_folder_is_beside_its_destination(tmp_path, monkeypatch, written):
    monkeypatch.chdir(tmp_path)
    assert run_folder(written) == tmp_path / "out.run"
    (tmp_path / "out").mkdir()
    assert run_folder(written) == tmp_path / "out.run"
    assert run_folder(Path("v1.0")) == tmp_path / "v1.0.run"
    assert Run(run_folder("v1.0"), {}).logs == tmp_path / "v1.0.logs"


def test_a_second_process_is_refused_until_the_first_dies(tmp_path):
    folder = tmp_path / "out.run"
    forked = multiprocessing.get_context("fork")  # without importing torch again
    held = forked.Event()
    first = forked.Process(target=hold, args=(folder, held), daemon=True)
    first.start()
    assert held.wait(60)
    run = Run(folder, {})
    with pytest.raises(T2RError, match="another process is working in"), run:
        pytest.fail("it was let in")
    first.kill()
    first.join()
    with run:
        assert run.facts["begun"] is True


def test_the_lock_of_a_run_that_did_not_start_leaves_no_files(tmp_path):
    with Run(tmp_path / "out.run", {}) as run:
        assert run.folder.is_dir()
    assert not run.folder.exists()
    with pytest.raises(ValueError, match="refused"), Run(tmp_path / "out.run", {}):
        raise ValueError("refused")
    assert not run.folder.exists()
    with Run(tmp_path / "out.run", {}) as run:
        run.remember("fact", lambda: 1)
    assert (run.folder / "run.json").exists()
    with Run(tmp_path / "out.run", {}) as run:
        run.remove()
    assert not run.folder.exists()


@pytest.mark.parametrize("damage", [b"", b'{"plan": {', b"\xff\xfe\x00", b"[]", b"{}", *DAMAGED])
def test_a_damaged_run_file_has_a_backup(tmp_path, caplog, damage):
    run = Run(tmp_path / "run", {"seed": 1})
    run.remember("a", lambda: 1)
    run.remember("b", lambda: 2)
    (run.folder / "run.json").write_bytes(damage)
    again = Run(tmp_path / "run", {"seed": 1})
    assert again.facts == {"plan": {"seed": 1}, "a": 1, "b": 2}
    assert "run.json is damaged" in caplog.text
    with pytest.raises(T2RError, match="other options"):
        Run(tmp_path / "run", {"seed": 2})
    (run.folder / "run.json.old").write_bytes(damage)
    assert Run(tmp_path / "run", {"seed": 1}).facts == {"plan": {"seed": 1}}


@pytest.mark.parametrize(
    "wrong", [{"only.steps": "many"}, {"schedule": {"steps": None}}, {"only.log": 3}, {"seconds": 1}]
)
def test_facts_that_were_changed_are_not_used(tmp_path, caplog, wrong):
    run = Run(tmp_path / "run", {"seed": 1})
    run.remember("only.steps", lambda: 7)
    run.remember("measured.teacher", lambda: {1: float("nan"), "é": 0.1})
    facts = json.loads((run.folder / "run.json").read_text())
    (run.folder / "run.json").write_text(json.dumps(facts | wrong))
    again = Run(tmp_path / "run", {"seed": 1})
    assert again.facts["only.steps"] == 7
    assert again.facts["measured.teacher"]["é"] == 0.1
    assert "it was changed after it was written" in caplog.text


@pytest.mark.parametrize("damage", [None, b"", *DAMAGED])
def test_work_of_an_unknown_run_is_not_resumed(tmp_path, damage):
    model = tiny("gpt2")
    with Run(tmp_path / "out.run", {"seed": 1}) as run:
        run.remember("only.log", lambda: [])
        run.finish("only", model)
    for name in ("run.json", "run.json.old"):
        (run.folder / name).write_bytes(damage or b"")
        if damage is None:
            (run.folder / name).unlink()
    with pytest.raises(T2RError, match=r"has unfinished work \(only.safetensors\), but no run.json .* --restart"):
        Run(run.folder, {"seed": 1})
    with Run(run.folder, {"seed": 1}, restart=True) as run:
        run.remember("begun", lambda: True)
    assert Run(run.folder, {"seed": 1}).facts == {"plan": {"seed": 1}, "begun": True}
    assert not run.weights("only").exists()


def test_a_checkpoint_of_another_name_is_not_used(tmp_path, caplog):
    for name in ("checkpoint-2", "checkpoint-best", "checkpoint-", "checkpoint-3-copy", "checkpoint-" + "9" * 200):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")
        seal(tmp_path / name)
    assert last_checkpoint(tmp_path).name == "checkpoint-2"
    assert caplog.text.count("is not used: the name of a checkpoint ends with its step") == 4


@pytest.mark.parametrize("how", ["cut", "flipped", "gone", "unsealed", "list"])
def test_a_damaged_checkpoint_is_skipped(tmp_path, caplog, how):
    for step in (2, 4):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "weights").write_bytes(bytes(range(100)))
        (folder / "state.json").write_text("{}")
        seal(folder)
    assert last_checkpoint(tmp_path).name == "checkpoint-4"
    newest = tmp_path / "checkpoint-4"
    weights = newest / "weights"
    if how == "cut":
        weights.write_bytes(weights.read_bytes()[:50])
    elif how == "flipped":
        weights.write_bytes(b"\x01" + weights.read_bytes()[1:])
    elif how == "gone":
        weights.unlink()
    elif how == "unsealed":
        (newest / COMPLETE).unlink()
    else:
        (newest / COMPLETE).write_text("")
    assert last_checkpoint(tmp_path).name == "checkpoint-2"
    assert ("is damaged" in caplog.text) is (how != "unsealed")
    assert is_whole(tmp_path / "checkpoint-2")


def test_a_sealed_checkpoint_lists_its_files(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a").write_bytes(b"1")
    seal(tmp_path)
    assert json.loads((tmp_path / COMPLETE).read_text()) == {"sub/a": [1, 0x83DCEFB7]}


@pytest.mark.parametrize("how", ["cut", "flipped", "rubbish"])
def test_a_damaged_stage_is_trained_again(tmp_path, caplog, how):
    model = tiny("gpt2")
    run = Run(tmp_path / "run", {})
    run.remember("only.log", lambda: [])
    run.finish("only", model)
    assert run.restore("only", model)
    path = run.weights("only")
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[:-9], "flipped": whole[:-1] + bytes([whole[-1] ^ 1]), "rubbish": b"\x00"}[how])
    run = Run(tmp_path / "run", {})
    assert not run.restore("only", model)
    assert "stage only is trained again" in caplog.text
    assert not path.exists()
    assert "only.log" not in Run(tmp_path / "run", {}).facts


def test_incomplete_checkpoints_are_removed(tmp_path):
    """Otherwise Trainer counts them, and removes the last complete one."""
    for step in (8, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "weights").write_bytes(b"12")
    seal(tmp_path / "checkpoint-8")
    remove_incomplete(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-8"]
    remove_incomplete(tmp_path / "none")
