"""The folder of a run: its plan, the results of finished stages, and checkpoints."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from t2r import compat
from t2r.errors import T2RError
from t2r.sharding import fill, gathered, is_sharded, state_of
from t2r.storage import take_lock, whole_file, write_text, writing
from t2r.training.loop import processes
from t2r.training.loop.checkpoints import checksum

logger = logging.getLogger(__name__)

FACTS, BACKUP, LOCK = "run.json", "run.json.old", "lock"
CHECKSUM = "checksum"
"""The fact that tells whether the others are as they were written."""
FORGOTTEN = ("checksum", "log", "read", "done", "began", "took", "measured")
"""Facts of a stage that is trained again."""


def run_folder(out: str | Path) -> Path:
    """Return the folder of the unfinished run of `out`: `out.run`."""
    final = Path(os.path.abspath(out))
    return final.with_name(f"{final.name}.run")


class Run:
    """The facts of a run, saved in `run.json`, and its saved weights.

    Every file is written under a temporary name and renamed, so the folder is consistent whenever the process dies.
    Only the main process writes, and not before the first fact is known: refused input leaves no folder behind.

    As a context manager it holds a lock on the folder. The operating system releases the lock when the process ends.
    Another process that uses the same folder gets a T2RError.

    Args:
        folder: the folder.
        plan: identifies the run. A run can be resumed only with the same plan.
        restart: ignore an existing run. It is removed before the first fact is written, when the input was checked.
        began: when the work began, by `time.monotonic`.
    """

    def __init__(
        self, folder: Path, plan: dict[str, Any], *, restart: bool = False, began: float | None = None
    ) -> None:
        self.folder = folder
        self.plan = plan
        self.facts: dict[str, Any] = {"plan": plan}
        self.lock: IO[bytes] | None = None
        self.version: int | None = None
        self.restart = restart
        self.began = time.monotonic() if began is None else began
        self.before = 0.0
        if not restart:
            self.read()

    @property
    def begun(self) -> bool:
        """Whether there is a run that the same command would resume."""
        return not self.restart and (self.folder / FACTS).exists()

    @property
    def seconds(self) -> float:
        """Total working time, including that before the run was resumed. Time not yet recorded when a process was
        killed is not included."""
        return self.before + time.monotonic() - self.began

    # --- The lock -------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        error = None
        if processes.is_main():
            try:
                self.take_lock()
            except T2RError as refused:
                error = str(refused)
        error = processes.agreed(error)
        if error is not None:
            raise T2RError(error)
        try:
            # Another process may have written before the lock was taken.
            if not self.restart and self.version != version(self.folder / FACTS):
                self.read()
        except BaseException:
            self.release_lock()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release_lock()

    def take_lock(self) -> None:
        while self.lock is None:
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                found = {path.name for path in self.folder.iterdir()}
            if found and not found & {FACTS, BACKUP, LOCK}:  # it is removed when the run is finished
                raise T2RError(f"{self.folder} is not a run of t2r, which keeps unfinished work there: move it away")
            try:
                self.lock = take_lock(self.folder / LOCK)
            except FileNotFoundError:  # the previous owner removed the folder when it finished
                continue
            except OSError as error:
                raise T2RError(f"{self.folder} cannot be written: {error}") from error
            if self.lock is None:
                raise T2RError(
                    f"another process is working in {self.folder}: wait for it to end, or choose another folder"
                )

    def clear(self) -> None:
        """Remove all contents of the folder except the lock."""
        if processes.is_main():
            with writing(self.folder):
                for path in self.folder.iterdir():
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path)
                    elif path.name != LOCK:
                        path.unlink()
        processes.wait()

    def release_lock(self) -> None:
        if self.lock is None:
            return
        if not (self.folder / FACTS).exists():  # the run was not started
            (self.folder / LOCK).unlink(missing_ok=True)
            if self.folder.is_dir() and not any(self.folder.iterdir()):
                self.folder.rmdir()
        self.lock.close()
        self.lock = None

    # --- Facts ----------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read the facts of an existing run, from the backup if the file is damaged."""
        self.version = version(self.folder / FACTS)
        for name in (FACTS, BACKUP):
            path = self.folder / name
            try:
                facts = json.loads(path.read_text(encoding="utf-8"))
                check_facts(facts)
            except FileNotFoundError:
                continue
            except (OSError, ValueError, RecursionError) as error:
                logger.warning("%s is damaged (%s); its backup is used if there is one", path, error)
                continue
            self.facts = facts
            self.before = float(facts.pop("seconds", 0.0))
            self.check("plan", known_then(self.plan, facts["plan"]))
            return
        found = self.contents()
        left = [name for name in found if name not in (FACTS, BACKUP, LOCK)]
        if left and LOCK in found:  # without a lock it is no run: `take_lock` says so
            raise T2RError(
                f"{self.folder} has unfinished work ({left[0]}), but no {FACTS} that says of which run: "
                "use --restart to start again"
            )

    def contents(self) -> list[str]:
        """Return the names in the folder, without temporary files."""
        try:
            return sorted(path.name for path in self.folder.iterdir() if not path.name.startswith("."))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise T2RError(f"{self.folder} cannot be read: {error.strerror}") from error

    def check(self, key: str, now: Any) -> None:
        """Raise T2RError if a fact differs from its value when the run began."""
        old, new = {key: self.facts[key]}, {key: json.loads(json.dumps(now))}
        if old != new:
            raise T2RError(
                f"{self.folder} contains an unfinished run with other options ({difference(old, new)}): "
                "repeat its command to resume it, or use --restart to start again"
            )

    def write(self) -> None:
        if self.restart:
            self.restart = False
            self.clear()
        if processes.is_main():
            with writing(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                facts = self.facts | {"seconds": round(self.seconds, 1)}
                text = json.dumps(facts | {CHECKSUM: checksum_of(facts)}, indent=1)
                write_text(self.folder / FACTS, text)
                write_text(self.folder / BACKUP, text)

    def remember(self, key: str, make: Callable[[], Any]) -> Any:
        """Return a saved fact, or compute and save it. All processes compute it; the main one's value is used."""
        if key not in self.facts:
            self.add({key: make()})
        return self.facts[key]

    def add(self, facts: dict[str, Any]) -> None:
        """Save facts that belong together: after a crash, either all are there or none. The main process's are used."""
        self.facts |= processes.agreed(facts)
        self.write()

    def forget(self, *keys: str) -> None:
        for key in keys:
            self.facts.pop(key, None)
        self.write()

    # --- Stages ---------------------------------------------------------------------------------------------

    @property
    def logs(self) -> Path:
        """The folder for log files, beside the result. It is kept when the run is removed."""
        return self.folder.with_suffix(".logs")

    def weights(self, stage: str) -> Path:
        return self.folder / f"{stage}.safetensors"

    def checkpoints(self, stage: str) -> Path:
        return self.folder / f"{stage}.checkpoints"

    def finish(self, stage: str, model: PreTrainedModel) -> None:
        """Save the weights of a finished stage, and remove its checkpoints."""
        path = self.weights(stage)
        if processes.is_main() or is_sharded(model):
            save_weights(model, path)
        processes.wait()
        self.facts.pop(f"{stage}.checksum", None)
        self.remember(f"{stage}.checksum", lambda: checksum(path) if processes.is_main() else None)
        if processes.is_main():
            shutil.rmtree(self.checkpoints(stage), ignore_errors=True)
        processes.wait()

    def restore(self, stage: str, model: PreTrainedModel) -> bool:
        """Load the weights of a finished stage. Returns False if it is not finished or its file is damaged."""
        path = self.weights(stage)
        if not processes.agreed(path.exists()):
            return False
        known = self.facts.get(f"{stage}.checksum")
        damaged = None
        if processes.agreed(known is not None and checksum(path) != known):
            damaged = "wrong checksum"
        else:
            try:
                load_weights(model, path)
            except (SafetensorError, OSError) as error:
                damaged = str(error)
        if damaged is None:
            return True
        logger.warning("%s is damaged (%s); stage %s is trained again", path, damaged, stage)
        processes.wait()
        self.forget(*(f"{stage}.{name}" for name in FORGOTTEN))
        if processes.is_main():
            path.unlink(missing_ok=True)
        return False

    def remove(self) -> None:
        """Remove the folder, after the result was saved elsewhere."""
        if processes.is_main():
            shutil.rmtree(self.folder, ignore_errors=True)


def version(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def checksum_of(facts: dict[str, Any]) -> int:
    """Return a checksum of facts as they are read from a file."""
    return zlib.crc32(json.dumps(json.loads(json.dumps(facts)), sort_keys=True).encode())


def check_facts(facts: Any) -> None:
    """Raise ValueError unless these are the facts of a run: a plan with named stages, and the time that it took."""
    if isinstance(facts, dict) and CHECKSUM in facts and facts.pop(CHECKSUM) != checksum_of(facts):  # older runs: none
        raise ValueError("it was changed after it was written")
    plan = facts.get("plan") if isinstance(facts, dict) else None
    if not isinstance(plan, dict):
        raise ValueError("there is no plan in it")
    recipe = plan.get("recipe", {})
    stages = recipe.get("stages", []) if isinstance(recipe, dict) else None
    if not isinstance(stages, list) or not all(isinstance(s, dict) and isinstance(s.get("name"), str) for s in stages):
        raise ValueError("its plan has no stages")
    seconds = facts.get("seconds", 0.0)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise ValueError("its seconds are not a number")


def known_then(plan: dict[str, Any], saved: dict[str, Any]) -> dict[str, Any]:
    """Return a plan without the options of stages that a saved plan lacks, because they did not exist when it was
    saved."""
    plan = {name: x for name, x in plan.items() if name in saved or name != "valid_text"}
    recipe = plan.get("recipe")
    if recipe is None:
        return plan
    stages, old = recipe["stages"], saved_stages(saved)
    stages = [{name: x for name, x in s.items() if name in old.get(s["name"], s)} for s in stages]
    return plan | {"recipe": recipe | {"stages": stages}}


def saved_stages(saved: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the stages of a saved plan by name."""
    return {stage["name"]: stage for stage in saved.get("recipe", {}).get("stages", ())}


def difference(old: dict[Any, Any], new: dict[Any, Any]) -> str:
    """Describe the first difference between two plans."""
    for key in sorted({*old, *new}):
        if old.get(key) != new.get(key):
            was, now = (dict(enumerate(x)) if isinstance(x, list) else x for x in (old.get(key), new.get(key)))
            if isinstance(was, dict) and isinstance(now, dict):
                return f"{key}.{difference(was, now)}"
            return f"{key}: was {str(old.get(key))[:60]}, now {str(new.get(key))[:60]}"
    return "order"


def save_weights(model: PreTrainedModel, path: Path) -> None:
    """Write all weights, tied ones once. All processes call this for a sharded model, of which the main one writes."""
    tensors: dict[str, Any] = {}
    if is_sharded(model):
        for name, tensor in gathered(model):
            if processes.is_main():
                tensors[name] = tensor.contiguous()
        if not processes.is_main():
            return
    else:
        seen: set[int] = set()
        for name, tensor in model.state_dict().items():
            if tensor.data_ptr() not in seen or tensor.numel() == 0:  # tied weights are saved once
                seen.add(tensor.data_ptr())
                tensors[name] = tensor.detach().cpu().contiguous()
    with writing(path), whole_file(path) as temporary:
        save_file(tensors, temporary)


def load_weights(model: PreTrainedModel, path: Path) -> None:
    if is_sharded(model):
        missing, unexpected = load_parts(model, path)
    else:
        missing, unexpected = model.load_state_dict(load_file(path), strict=False)
    if unexpected or set(missing) - compat.tied_weights(model):
        raise T2RError(f"{path} has the weights of another model: remove its folder to start again")
    if not is_sharded(model):
        model.tie_weights()


def load_parts(model: PreTrainedModel, path: Path) -> tuple[list[str], list[str]]:
    """Load the parts of this process. Returns the names that are missing and those that are not in the model."""
    known = state_of(model)
    with safe_open(path, "pt") as file:
        there = set(file.keys())
        for name in known.keys() & there:
            fill(known[name], file.get_tensor(name))
    return sorted(known.keys() - there), sorted(there - model.state_dict().keys())
