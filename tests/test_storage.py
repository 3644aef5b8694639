"""Atomic and resumable writing of files and folders, by one or several processes."""

import errno
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time

import pytest
from tokenizers import Tokenizer, models

from t2r.errors import T2RError
from t2r.storage import json_text, kind_of, resumable_file, take_lock, whole_file, whole_folder, write_text, writing


def files(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_json_has_no_nan():
    assert json_text({"a": [float("nan"), 1.5, (float("inf"),)], "ü": None}) == '{"a": [null, 1.5, [null]], "ü": null}'


def test_kinds_of_paths(tmp_path):
    (tmp_path / "file").touch()
    found = [
        kind_of(path) for path in (tmp_path, tmp_path / "file", os.devnull, tmp_path / "none", tmp_path / "file/x")
    ]
    assert found == ["folder", "file", "other", None, None]
    with pytest.raises(T2RError, match="is not a path"):
        kind_of("a\0b")
    with pytest.raises(T2RError, match=r"x\.\.\.x+ cannot be opened"):
        kind_of("x" * 5000)


def test_a_file_is_replaced_only_as_a_whole(tmp_path):
    path = tmp_path / "file"
    write_text(path, "old")

    def stop(temporary):
        temporary.write_text("ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), whole_file(path) as temporary:
        stop(temporary)
    assert files(tmp_path) == {"file": "old"}
    write_text(path, "new")
    assert files(tmp_path) == {"file": "new"}


# Files that are written in parts


def append(path, *words, lines=1, stop_after=None):
    """Write what is missing of the words, one per line. Returns the number of parts that were there, or None."""
    with resumable_file(path, lines) as resumed:
        if resumed is None:
            return None
        for i, word in enumerate(words[resumed.done * lines :]):
            if i == stop_after:
                raise KeyboardInterrupt
            resumed.file.write(f"{word}\n")
        return resumed.done


@pytest.mark.parametrize(("lines", "damage", "done"), [(1, 0, 3), (1, 1, 2), (2, 0, 1), (2, 1, 1), (2, 3, 0)])
def test_a_file_is_resumed_after_its_last_complete_part(tmp_path, lines, damage, done):
    path = tmp_path / "new" / "text.txt"
    with pytest.raises(KeyboardInterrupt):
        append(path, "a", "b", "c", "d", lines=lines, stop_after=3)
    (partial,) = path.parent.iterdir()
    assert partial.name == "text.partial"
    partial.write_bytes(partial.read_bytes()[: 6 - damage])
    assert append(path, "a", "b", "c", "d", lines=lines) == done
    assert files(path.parent) == {"text.txt": "a\nb\nc\nd\n"}
    assert append(path, "e") is None
    assert files(path.parent) == {"text.txt": "a\nb\nc\nd\n"}


def write_slowly(path, results):
    with resumable_file(path) as resumed:
        if resumed is None:
            results.put("there")
            return
        for i in range(resumed.done, 6):
            time.sleep(0.02)
            resumed.file.write(f"{i}\n")
            resumed.file.flush()
    results.put("written")


def test_of_several_processes_one_writes(tmp_path):
    forked = multiprocessing.get_context("fork")  # without importing torch again
    results = forked.SimpleQueue()
    writers = [forked.Process(target=write_slowly, args=(tmp_path / "text.txt", results)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert sorted(results.get() for _ in writers) == ["there", "there", "written"]
    assert files(tmp_path) == {"text.txt": "0\n1\n2\n3\n4\n5\n"}


def test_a_waiting_writer_resumes_what_another_left(tmp_path, caplog):
    path, found = tmp_path / "text.txt", []

    def wait():
        found.append(append(path, "a", "b", "c"))

    other = threading.Thread(target=wait)

    def leave():
        with resumable_file(path) as resumed:
            resumed.file.write("a\nb\n")
            other.start()
            deadline = time.monotonic() + 30
            while "waiting for another process" not in caplog.text and time.monotonic() < deadline:
                time.sleep(0.01)
            raise KeyboardInterrupt

    with caplog.at_level(logging.WARNING), pytest.raises(KeyboardInterrupt):
        leave()
    other.join()
    assert "waiting for another process" in caplog.text
    assert found == [2]
    assert files(tmp_path) == {"text.txt": "a\nb\nc\n"}


def test_a_lock_whose_file_was_removed_is_taken_anew(tmp_path):
    lock = take_lock(tmp_path / "lock")
    assert take_lock(tmp_path / "lock") is None
    (tmp_path / "lock").unlink()
    with lock, take_lock(tmp_path / "lock") as second:
        assert os.path.samestat(os.fstat(second.fileno()), (tmp_path / "lock").stat())


# Folders


def test_a_folder_that_another_process_made_meanwhile_is_kept(tmp_path):
    def make_both():
        with whole_folder(str(tmp_path / "out")) as folder:
            (folder / "second").write_text("2")
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "first").write_text("1")

    with pytest.raises(T2RError, match="out already exists: choose another folder"):
        make_both()
    assert files(tmp_path) == {"out/first": "1"}
    assert os.listdir(tmp_path) == ["out"]


def test_of_two_writers_of_a_folder_the_first_wins(tmp_path):
    """Both are in one process, so the process number does not distinguish their temporary folders."""
    out = str(tmp_path / "out")

    def make_both():
        with whole_folder(out) as second:
            with whole_folder(out) as first:
                (first / "first").write_text("1")
            (second / "second").write_text("2")

    with pytest.raises(T2RError, match="out already exists"):
        make_both()
    assert files(tmp_path) == {"out/first": "1"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_empty_folder_is_replaced(tmp_path, overwrite):
    (tmp_path / "out").mkdir()
    with whole_folder(str(tmp_path / "out"), overwrite=overwrite) as folder:
        (folder / "file").write_text("1")
    assert files(tmp_path) == {"out/file": "1"}


def test_only_a_saved_model_is_overwritten(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for name, text in {"config.json": '{"model_type": "gpt2"}', "old": "{}"}.items():
        (out / name).write_text(text)
    with whole_folder(str(out), overwrite=True) as folder:
        (folder / "new").write_text("1")
        assert (out / "old").exists()
    assert files(tmp_path) == {"out/new": "1"}
    with pytest.raises(T2RError, match="is not a saved model"), whole_folder(str(out), overwrite=True):
        pass
    assert files(tmp_path) == {"out/new": "1"}
    (out / "config.json").write_text('{"theme": "dark"}')  # another program's
    with pytest.raises(T2RError, match="is not a saved model"), whole_folder(str(out), overwrite=True):
        pass
    assert set(files(tmp_path)) == {"out/new", "out/config.json"}
    with pytest.raises(T2RError, match="has no name"), whole_folder(""):
        pass


def test_a_failed_block_leaves_no_folder(tmp_path):
    def fail():
        with whole_folder(str(tmp_path / "new" / "out")) as folder:
            (folder / "file").write_text("1")
            raise OSError("the disk is full")

    with pytest.raises(T2RError, match="out cannot be written: the disk is full"):
        fail()
    assert files(tmp_path) == {}
    assert os.listdir(tmp_path / "new") == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="requires /dev/full")
def test_a_tokenizer_on_a_full_disk(tmp_path):
    with (
        pytest.raises(T2RError, match="out cannot be written: No space left on device"),
        whole_folder(str(tmp_path / "out")),
    ):
        Tokenizer(models.BPE()).save("/dev/full")
    assert os.listdir(tmp_path) == []


def test_other_errors_are_not_errors_of_the_disk(tmp_path):
    with pytest.raises(ZeroDivisionError), whole_folder(str(tmp_path / "out")):
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "free some disk space and repeat the command to resume"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "free some disk space and repeat the command to resume"),
        (RuntimeError("file write failed"), "free some disk space and repeat the command to resume"),
        (PermissionError(errno.EACCES, "Permission denied", "x"), "cannot be written: Permission denied"),
        (OSError("odd"), "cannot be written: odd"),
    ],
)
def test_only_a_full_disk_needs_space(tmp_path, error, says):
    with pytest.raises(T2RError) as raised, writing(tmp_path):
        raise error
    assert str(raised.value).endswith(says)


WRITER = """
import sys, time
from t2r.storage import whole_folder

with whole_folder(sys.argv[1]) as folder:
    (folder / "weights").write_text("some")
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.skipif(os.name != "posix", reason="there are no locks of folders here")
def test_partial_folders_of_killed_processes_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("t2r.storage.folders.YOUNG", 0.0)
    script = tmp_path / "scripts" / "t2r"  # a name by which the package knows the command line, and imports no torch
    script.parent.mkdir()
    script.write_text(WRITER)
    folder = tmp_path / "models"
    command = [sys.executable, str(script), str(folder / "out")]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    (left,) = folder.iterdir()
    for other in ("out", "out.2"):  # the writer lives, and another folder has a similar name
        with pytest.raises(ZeroDivisionError), whole_folder(str(folder / other)):
            raise ZeroDivisionError
        assert list(folder.iterdir()) == [left]
    writer.kill()
    writer.wait()
    writer.stdout.close()
    with pytest.raises(ZeroDivisionError), whole_folder(str(folder / "out.2")):
        raise ZeroDivisionError
    assert list(folder.iterdir()) == [left]
    with whole_folder(str(folder / "out")) as made:
        assert not left.exists()
        (made / "weights").write_text("all")
    assert files(folder) == {"out/weights": "all"}
