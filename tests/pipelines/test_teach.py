"""Distillation from a teacher's logits on disk, compared with that from the teacher itself."""

import json
import shutil
import subprocess
import sys
import threading
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers.trainer_callback import DefaultFlowCallback

from commands import is_one_line, runner
from converting import BLOCK, SHORT, assert_same, make_world, run, weights, words
from processes import same_threads
from t2r.data.teacher_logits import BLOCKS, HEADER, WRITTEN, TeacherLogits, shard_path
from t2r.errors import T2RError
from t2r.pipelines import teach as module
from t2r.pipelines.teach import summary, teach
from t2r.storage import take_lock
from t2r.training.steps.learner import Learner

VOCABULARY = 97
LOSS = ("distill.task_weight=1",)
"""Gradients of a KL divergence alone are nearly zero after a few steps, and Adam divides by their size."""
SPLIT = (*SHORT, *LOSS, f"device_tokens={2 * BLOCK}")
"""With two forward passes per step."""


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = make_world(tmp_path_factory.mktemp("world"))
    (folder / "more.txt").write_text(words(4000, seed=2))
    shutil.copytree(folder / "llama", folder / "turned")  # the same weights, and other positions
    config = json.loads((folder / "turned" / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500.0
    (folder / "turned" / "config.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("T2R_CACHE", str(folder / "cache"))
        made(folder, "logits", top_k=VOCABULARY)
        made(folder, "few", top_k=8)
    return folder


@pytest.fixture(autouse=True)
def _own_cache(world, monkeypatch):
    monkeypatch.setenv("T2R_CACHE", str(world / "cache"))


def made(world, name, model="llama", **how):
    given = {"train": str(world / "train.txt"), "block_size": BLOCK, "device": "cpu", "progress": False}
    return teach(str(world / model), str(world / name), **given | how)


def taught(world, out, logits="logits", **how):
    return run(world, out, "llama", teacher_logits=str(world / logits), **how)


def test_a_folder_of_format_1_does_not_know_the_configuration(world, tmp_path):
    shutil.copytree(world / "few", tmp_path / "old")
    header = json.loads((tmp_path / "old" / HEADER).read_text())
    del header["config"]
    (tmp_path / "old" / HEADER).write_text(json.dumps(header | {"format": 1}))
    assert TeacherLogits(tmp_path / "old").header.config == ""
    made(world, tmp_path / "old", top_k=8)
    with pytest.raises(T2RError, match="another model"):
        made(world, tmp_path / "old", "gpt2", top_k=8)


def losses(results, stage="distill"):
    return [entry["loss"] for entry in results["log"][stage]]


# --- Training -----------------------------------------------------------------------------------------------


def test_the_whole_vocabulary_trains_as_the_teacher_does(world, tmp_path, monkeypatch):
    live = run(world, tmp_path / "live", "llama", overrides=SPLIT)
    ran = []
    read = Learner.read
    monkeypatch.setattr(Learner, "read", lambda self, model, inputs: ran.append(model) or read(self, model, inputs))
    disk = taught(world, tmp_path / "disk", overrides=SPLIT)
    assert len({id(model) for model in ran}) == 1  # the student only
    assert losses(disk) == pytest.approx(losses(live), rel=1e-4)
    ours, theirs = ([x["kl"] for x in results["log"]["distill"]] for results in (disk, live))
    assert ours == pytest.approx(theirs, rel=0.01, abs=2e-6)  # of half precision
    before, after, found = weights(world / "llama"), weights(tmp_path / "live"), weights(tmp_path / "disk")
    moved, apart = (sum((x[name] - after[name]).norm() ** 2 for name in before) ** 0.5 for x in (before, found))
    assert apart < 0.05 * moved
    assert disk["teacher_logits"] == {"top_k": VOCABULARY, "temperature": 1.0, "bf16": False, "rest": 0.0}


class Interrupted(Exception):
    pass


def test_a_conversion_is_resumed_exactly_and_continued(world, tmp_path, monkeypatch):
    how = {"overrides": (*SPLIT, "distill.steps=6"), "teacher_logits": str(world / "few"), "save_steps": 2}

    def interrupt(*args, **options):
        if list((tmp_path / "cut.run" / "distill.checkpoints").glob("checkpoint-*/complete")):
            raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(DefaultFlowCallback, "on_step_begin", interrupt)
        with pytest.raises(Interrupted):
            run(world, tmp_path / "cut", "llama", **how)
    with pytest.raises(T2RError, match="teacher_logits"):
        run(world, tmp_path / "cut", "llama", **how | {"teacher_logits": str(world / "logits")})
    run(world, tmp_path / "cut", "llama", **how)
    run(world, tmp_path / "straight", "llama", **how)
    assert_same(tmp_path / "cut", tmp_path / "straight")
    more = run(world, tmp_path / "more", str(tmp_path / "cut"), **how)  # a finished conversion is continued
    assert list(more["stages"]) == ["distill"]


def test_blocks_are_found_in_any_mixture_and_with_text_held_out(world, tmp_path):
    both = [str(world / "train.txt"), str(world / "more.txt")]
    made(world, "both", train=both, top_k=4, documents=True)
    mixed = {both[1]: "60%", both[0]: "40%"}
    timed = (*SHORT, "distill.steps=50")  # enough steps to time them before training
    results = taught(world, tmp_path / "out", "both", train=mixed, documents=True, overrides=timed)
    assert results["teacher"] is not None  # measured on what is held out


CALLS = """
import ast, sys
from t2r import cli
from t2r.pipelines.convert import convert
from t2r.pipelines.teach import teach

(source, out, how), calls = ast.literal_eval(sys.argv[1])

def work(*args, **options):
    teach(source, out, **how)
    for source_, out_, how_ in calls:
        convert(source_, out_, **how_)
    return 0

cli.app = work
cli.main()
"""


@pytest.mark.slow
def test_two_processes_teach_and_train(world, tmp_path):
    """Both write shards; then they train as copies (DDP), and as parts of one model (FSDP)."""
    common = {"train": str(world / "train.txt"), "device": "cpu", "progress": False}
    how = common | {"overrides": (*SHORT, *LOSS), "teacher_logits": str(tmp_path / "logits")}
    lesson = (str(world / "llama"), str(tmp_path / "logits"), common | {"block_size": BLOCK, "top_k": 8})
    calls = [
        (str(world / "llama"), str(tmp_path / "copies"), how),
        (str(world / "llama"), str(tmp_path / "parts"), how | {"fsdp_size": 2}),
    ]
    (tmp_path / "calls.py").write_text(CALLS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    environment = same_threads(T2R_CACHE=str(world / "cache"), OMP_NUM_THREADS="1")
    given = [str(tmp_path / "calls.py"), repr((lesson, calls))]
    done = subprocess.run([*command, *given], env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    one = taught(world, tmp_path / "one", "few", overrides=(*SHORT, *LOSS))
    for name in ("copies", "parts"):
        results = json.loads((tmp_path / name / "results.json").read_text())
        assert losses(results) == pytest.approx(losses(one), rel=1e-3)
        theirs = weights(tmp_path / name)
        for key, x in weights(tmp_path / "one").items():
            torch.testing.assert_close(x, theirs[key], rtol=1e-3, atol=1e-4, msg=f"{name} {key}")


# --- The folder ---------------------------------------------------------------------------------------------


def test_processes_share_the_shards(world, monkeypatch):
    """A shard that another process writes is left to it, and taken over if that process ends."""
    monkeypatch.setattr(module, "SHARD", 20 * BLOCK)
    monkeypatch.setattr(module, "POLL", 0.01)
    folder = world / "shared"
    first = made(world, "shared", top_k=8)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    last = shard_path(folder, first["shards"] - 1)
    for path in (shard_path(folder, 0), last):
        path.unlink()
    left = folder / ".00000.safetensors.1-aa.tmp"
    left.write_bytes(b"of a process that was killed")
    other = take_lock(shard_path(folder, 0).with_suffix(".lock"))
    found = []
    work = threading.Thread(target=lambda: found.append(made(world, "shared", top_k=8)))
    work.start()
    while not last.exists():
        assert work.is_alive()
        time.sleep(0.01)
    assert left.exists()
    assert not shard_path(folder, 0).exists()
    other.close()
    work.join()
    assert found[0]["resumed"] == first["shards"] - 2 > 1
    assert found[0]["rest"] == first["rest"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_small_vocabularies_need_four_bytes_for_each_token_of_the_top(world):
    results = made(world, "few", top_k=8)  # it is there
    assert results["resumed"] == results["shards"]
    assert results["bytes_per_token"] == pytest.approx(8 * 4 + 4, rel=0.05)
    assert 0 < results["rest"] < 1
    assert f"{100 * results['rest']:.2g} % of the teacher's probability are outside of its top 8" in summary(results)[1]


def test_the_mean_mass_is_that_of_the_scored_positions(world):
    with safe_open(shard_path(world / "few", 0), "pt") as file:
        rest, about = file.get_tensor("rest"), file.metadata()
    mass, scored, _ = json.loads(about["t2r_teacher"])
    assert scored == rest[:, :-1].numel()  # the last position of a block predicts nothing
    assert mass == pytest.approx(float(rest[:, :-1].sum()), rel=1e-4)


def test_the_command_says_what_it_wrote(world, monkeypatch, capsys):
    command = runner(monkeypatch, capsys)
    options = ("--train", world / "train.txt", "--block-size", BLOCK, "--top-k", 8, "--device", "cpu")
    code, out, _ = command("teach", world / "llama", world / "few", *options)
    assert code == 0
    assert "of the teacher's probability are outside of its top 8 tokens" in out
    code, out, _ = command("teach", world / "llama", world / "few", *options, "--json")
    assert json.loads(out)["top_k"] == 8
    code, _, err = command("teach", world / "llama", world / "few", *options, "--temperature", "2")
    assert code == 2
    assert is_one_line(err)
    assert "was begun with temperature 1.0, not 2.0: give another folder, or the same option" in err


# --- What does not fit --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"train": "more.txt"}, "was begun with another text: give another folder"),
        ({"model": "gpt2"}, "was begun with another model"),
        ({"model": "turned"}, "was begun with another model"),
        ({"block_size": 32}, "was begun with block_size 16, not 32"),
        ({"top_k": 9}, "was begun with top_k 8, not 9"),
        ({"documents": True}, "was begun with documents False, not True"),
        ({"bf16": True}, "was begun with bf16 False, not True"),
        ({"top_k": 98}, "top_k is 98, and the model has 97 logits: give fewer"),
        ({"block_size": 65}, "block_size is 65 but the teacher has only 64 positions"),
        ({"train": "teacher"}, "reads texts that are there"),
        ({"train": "nothing.txt"}, "there is no file"),
        ({"top_k": 10**400}, r"top_k is 1[0,]+, and the model has 97 logits"),
        ({"temperature": 10**400}, "temperature must be a number, above 0; got 1000"),
        ({"name": "llama"}, "llama has other files"),
        ({"name": "train.txt"}, "train.txt is not a folder"),
    ],
)
def test_another_lesson_is_not_mixed_in(world, how, message):
    given = {"name": "few", "top_k": 8} | how
    if "train" in how and how["train"] != "teacher":
        given["train"] = str(world / how["train"])
    with pytest.raises(T2RError, match=message):
        made(world, **given)


def test_a_full_disk_is_told_before_the_work(world, tmp_path, monkeypatch):
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: module.shutil._ntuple_diskusage(10, 0, 10))
    with pytest.raises(T2RError, match=r"needs 0\.0 GB, and its disk has 0\.0: give less text, a smaller top_k"):
        teach(str(world / "llama"), str(tmp_path / "full"), train=str(world / "train.txt"), block_size=BLOCK)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"teacher_logits": "nowhere"}, "has no logits of a teacher: make them by t2r teach MODEL"),
        ({"train": "more.txt"}, r"lacks \d+ of the \d+ blocks of this text"),
        ({"model": "gpt2"}, "has the logits of another model"),
        ({"model": "turned"}, "has the logits of another model"),
        ({"documents": True}, "was made without --documents, and this conversion is with"),
        ({"overrides": (*SHORT, "block_size=32")}, "has block_size 16, and stage distill 32: give --set"),
        ({"overrides": (*SHORT, "distill.temperature=2")}, "has temperature 1, and stage distill 2"),
        ({"overrides": (*SHORT, "distill.noise=0.1")}, "without token noise: set distill.noise=0"),
        ({"recipe": "finetune-lm", "overrides": ()}, "recipe finetune-lm has no distillation"),
        ({"train": "teacher"}, "do not train on text by the teacher"),
        ({"train": None, "source": "train.txt", "target": "train.txt"}, "teacher_logits are for language models"),
    ],
)
def test_logits_that_do_not_fit_are_one_line(world, tmp_path, how, message):
    given = {"teacher_logits": "few"} | how
    for name in ("teacher_logits", "train", "source", "target"):
        if given.get(name) not in (None, "teacher"):
            given[name] = str(world / given[name])
    with pytest.raises(T2RError, match=message):
        run(world, tmp_path / "out", **{"model": "llama"} | given)
    assert not [path for path in tmp_path.iterdir() if path.name != "out.run"]


@pytest.mark.slow
def test_a_text_that_one_of_two_processes_cannot_read_is_one_line(world, tmp_path):
    """The main process reads it, while the other one waits."""
    (tmp_path / "text.txt").write_bytes(b"caf\xe9 " * 100)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "t2r"]
    command += ["teach", str(world / "llama"), str(tmp_path / "out"), "--train", str(tmp_path / "text.txt")]
    done = subprocess.run(
        [*command, "--device", "cpu"], env=same_threads(), capture_output=True, text=True, timeout=280
    )
    assert done.returncode != 0
    assert "[rank" not in done.stderr  # how torch marks the traceback of a process; torchrun always has its own
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("t2r: ")]
    assert "is not UTF-8" in line
    assert not (tmp_path / "out").exists()


def test_the_folder_has_a_name(world):
    with pytest.raises(T2RError, match="the output folder has no name: give its path"):
        teach(str(world / "llama"), " ", train=str(world / "train.txt"))


def damage(path):
    path.write_bytes(path.read_bytes()[:-1])


def other_place(path):
    """A shard of another folder, whose shape is right."""
    with safe_open(path, "pt") as file:
        tensors, about = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    rest, scored, _ = json.loads(about[WRITTEN])
    save_file(tensors, path, metadata={WRITTEN: json.dumps([rest, scored, "elsewhere"])})


def reversed_keys(path):
    save_file({"keys": load_file(path)["keys"].flip(0).contiguous()}, path)


def more_blocks(path):
    """A header with so many blocks that to look for the files of all of them would take hours."""
    path.write_text(json.dumps(json.loads(path.read_text()) | {"blocks": 10**12}))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("00000.safetensors", lambda path: path.unlink(), "has 0 of 1 shards: finish it by the same t2r teach command"),
        ("00000.safetensors", damage, "00000.safetensors is damaged: delete it, and repeat t2r teach"),
        ("00000.safetensors", other_place, "00000.safetensors belongs to another place or folder: delete it, and"),
        ("blocks.safetensors", damage, "blocks.safetensors cannot be read"),
        ("blocks.safetensors", reversed_keys, "blocks.safetensors does not belong to header.json: repeat t2r teach"),
        ("header.json", lambda path: path.write_text("{}"), "header.json is not that of a folder of t2r teach"),
        ("header.json", lambda path: path.write_text('{"format": 4}'), "has format 4; this version of t2r supports"),
        ("header.json", lambda path: path.write_text('{"format": 1, "top_k": 3}'), "header.json is damaged"),
        (
            "header.json",
            lambda path: path.write_text(path.read_text().replace('"top_k": 8', '"top_k": true')),
            "damaged",
        ),
        ("header.json", more_blocks, "blocks.safetensors does not belong to header.json"),
    ],
)
def test_a_damaged_folder_is_one_line(world, tmp_path, name, change, message):
    folder = tmp_path / "logits"
    shutil.copytree(world / "few", folder)
    change(folder / name)
    with pytest.raises(T2RError, match=message):
        run(world, tmp_path / "out", "llama", teacher_logits=str(folder))


@pytest.mark.parametrize("change", [damage, reversed_keys, lambda path: path.unlink()])
def test_damaged_keys_are_written_again(world, tmp_path, change):
    """The same command mends them: it has read the text, and the shards are right."""
    shutil.copytree(world / "few", tmp_path / "few")
    change(tmp_path / "few" / BLOCKS)
    made(world, tmp_path / "few", top_k=8)
    assert (tmp_path / "few" / BLOCKS).read_bytes() == (world / "few" / BLOCKS).read_bytes()


def test_a_shard_of_an_earlier_version_has_no_place(world, tmp_path):
    shutil.copytree(world / "few", tmp_path / "few")
    path = shard_path(tmp_path / "few", 0)
    with safe_open(path, "pt") as file:
        tensors, about = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(tensors, path, metadata={WRITTEN: json.dumps(json.loads(about[WRITTEN])[:2])})
    assert TeacherLogits(tmp_path / "few").rest == TeacherLogits(world / "few").rest


def test_a_teacher_whose_distributions_are_no_numbers_is_one_line(world, tmp_path):
    """Otherwise, it would be noticed after all shards are written, by the conversion."""
    with pytest.raises(
        T2RError, match=r"from block 0 on are not numbers: its logits overflow, or --temperature 1e-300"
    ):
        made(world, tmp_path / "out", top_k=8, temperature=1e-300)
    assert not shard_path(tmp_path / "out", 0).exists()


DAMAGED = {
    "log_p that is not a number": lambda x: x | {"log_p": torch.full_like(x["log_p"], torch.nan)},
    "rest that is not a number": lambda x: x | {"rest": torch.full_like(x["rest"], torch.nan)},
    "log_p that is too large": lambda x: x | {"log_p": x["log_p"] + 5},
    "log_p without a lower end": lambda x: x | {"log_p": x["log_p"] - torch.inf},
    "rest below 0": lambda x: x | {"rest": x["rest"] - 1},
    "log_p of whole numbers": lambda x: x | {"log_p": x["log_p"].int()},
    "ids beyond the vocabulary": lambda x: x | {"ids": x["ids"].int().add(60_000).to(x["ids"].dtype)},
    "no log_p": lambda x: {name: part for name, part in x.items() if name != "log_p"},
    "too few log_p": lambda x: x | {"log_p": x["log_p"][..., :2].contiguous()},
    "rest of one block": lambda x: x | {"rest": x["rest"][:1].contiguous()},
    "rest of another shape": lambda x: x | {"rest": x["rest"][:, None].contiguous()},
}


@pytest.mark.parametrize("name", DAMAGED)
def test_numbers_of_a_damaged_shard_do_not_train(world, tmp_path, name):
    shutil.copytree(world / "few", tmp_path / "few")
    path = shard_path(tmp_path / "few", 0)
    with safe_open(path, "pt") as file:
        tensors, about = {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(DAMAGED[name](tensors), path, metadata=about)
    logits = TeacherLogits(tmp_path / "few")
    with pytest.raises(T2RError, match=r"00000\.safetensors"):
        logits.block(1)
