"""Conversions of models that are divided among processes (`fsdp_size`).

The main process has the whole model in the memory of its CPU while it is swapped and when it is saved. The swapped
model is saved in the run folder, from where each process loads its part, and removed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch
from transformers import PreTrainedModel

from t2r import compat
from t2r.config import OPTIONS, T2RConfig
from t2r.errors import T2RError
from t2r.hub import load_model
from t2r.model.merge import mergeable_sites
from t2r.model.modeling import T2RModel
from t2r.model.swap import swap
from t2r.options import Conversion
from t2r.pipelines.common import load_whole
from t2r.sharding import gathered
from t2r.storage import whole_folder
from t2r.tasks.language_modeling import TEACHER
from t2r.training.loop import processes
from t2r.training.recipes.recipe import Recipe
from t2r.training.sessions.session import Session

T = TypeVar("T")

START = "start"
"""The folder in a run folder with the swapped model."""


def check(given: Conversion, plan: Recipe, names: list[str]) -> None:
    """Raise T2RError if a conversion cannot be done by processes that share a model. `names` are those of its texts."""
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true"):
        raise T2RError("accelerate's FSDP is not supported: start with torchrun and give fsdp_size (--fsdp-size)")
    if (size := given.fsdp_size) is None:
        return
    compat.distributed_config(size)
    if (world := processes.count()) != size:
        raise T2RError(
            f"fsdp_size is {size}, but the number of processes is {world}: start {size} of them, by torchrun "
            f"--nproc_per_node {size} -m t2r convert … --fsdp-size {size}"
        )
    lora = [stage.name for stage in plan.stages if stage.train == "lora"]
    average = [stage.name for stage in plan.stages if stage.average > 1]
    muon = [stage.name for stage in plan.stages if stage.optimizer == "muon"]
    for wrong, what in (
        (not isinstance(given.model, str | Path), "a model that is given as an object: give its folder"),
        (isinstance(given.teacher, PreTrainedModel), "a teacher that is given as an object: give its folder"),
        (given.compiled, "compile: leave it out"),
        (given.source is not None or given.target is not None, "translation"),
        (TEACHER in names, "text by the teacher: generate it first, in one process"),
        (lora, f"LoRA, which {' and '.join(lora)} trains"),
        (average, f"an average of weights, which {' and '.join(average)} has"),
        (muon, f"the optimizer muon of {' and '.join(muon)}, which needs whole matrices: set optimizer=adamw"),
    ):
        if wrong:
            raise T2RError(f"fsdp_size cannot be combined with {what}")


def check_place(place: torch.device) -> None:
    """Raise T2RError if transformers would divide the model on another kind of device."""
    found = torch.accelerator.current_accelerator()
    kind = "cpu" if found is None else found.type
    if place.type != kind:
        raise T2RError(f"fsdp_size divides models on {kind}, not on {place.type}: leave out the device")


@contextmanager
def on_device(whole: Any, place: torch.device) -> Iterator[None]:
    """Move a whole model to a device, where it must fit, and back to the CPU."""
    try:
        whole.to(place)
        yield
    finally:
        whole.to("cpu")


def by_main(compute: Callable[[], T], divided: bool = True) -> T:
    """Compute something that needs the values of weights: in the main process, if others do not have them. All
    processes get the result."""
    return cast(T, processes.agreed(compute() if processes.is_main() else None)) if divided else compute()


@dataclass(frozen=True)
class Shards:
    """The models of a conversion, in parts.

    Args:
        size: the number of processes.
        folder: the run folder.
        source: the model that is converted, or the conversion that is continued.
        teacher: the name of the teacher.
        place: the device.
        bf16: whether the teacher is in bfloat16.
        merged: whether the result will be merged.
        hub: options of loading.
    """

    size: int
    folder: Path
    source: str
    teacher: str
    place: torch.device
    bf16: bool
    merged: bool
    hub: dict[str, Any]

    @classmethod
    def of(cls, given: Conversion, session: Session, teacher: PreTrainedModel) -> Self | None:
        """Return the models of a conversion, or None if they are not divided."""
        if given.fsdp_size is None:
            return None
        hub = {"revision": given.revision, "trust_remote_code": given.trust_remote_code}
        names = str(given.model), str(teacher.config.name_or_path)
        return cls(given.fsdp_size, session.run.folder, *names, session.place, session.settings.bf16, given.merged, hub)

    def models(
        self, base: PreTrainedModel, config: T2RConfig, *, continued: bool
    ) -> tuple[PreTrainedModel, PreTrainedModel, PreTrainedModel | None]:
        """Return the student, its frozen teacher and, if a conversion is continued, the teacher in float32."""
        if continued:
            self.check_merge(base)
            student = self.load(self.source, "float32", **self.hub)
        else:
            student = self.swap(base, config)
        student.config.use_cache = True
        hub = {} if continued else self.hub
        teacher = self.load(self.teacher, "bfloat16" if self.bf16 else "float32", **hub).requires_grad_(False)
        if not continued:
            return student, teacher, None
        return student, teacher, self.load(self.teacher, "float32") if self.bf16 else teacher

    def load(self, source: str, dtype: str, **hub: Any) -> PreTrainedModel:
        return load_model(source, dtype=dtype, device=str(self.place), fsdp_size=self.size, **hub)

    def swap(self, base: PreTrainedModel, config: T2RConfig, trained: dict[str, Any] | None = None) -> PreTrainedModel:
        """Swap the whole model in the main process, and return it in parts. `trained` are weights of its maps."""
        folder = self.folder / START
        try:
            if processes.is_main():
                whole = swap(base, config)
                self.check_merge(whole)
                if trained is not None:
                    fill_all(whole, {name: x for name, x in trained.items() if name in whole.state_dict()})
                with whole_folder(str(folder), overwrite=True) as made:
                    whole.save_pretrained(made)
            processes.wait()
            student = self.load(str(folder), "float32")
            processes.wait()
        finally:
            if processes.is_main():
                shutil.rmtree(folder, ignore_errors=True)
        return student

    def check_merge(self, whole: PreTrainedModel) -> None:
        """Raise T2RError, before training, if the result cannot be merged."""
        if self.merged and processes.is_main():
            mergeable_sites(whole)

    def swap_again(self, student: PreTrainedModel, config: T2RConfig, kept: list[int]) -> PreTrainedModel:
        """Return the student after a transfer, with softmax attention in the `kept` layers."""
        trained = self.values(student)
        chosen = T2RConfig(**{name: getattr(config, name) for name in OPTIONS})
        chosen.softmax_layers = kept
        return self.swap(load_whole(self.source, **self.hub), chosen, trained)

    def values(self, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Return the values of a model by name, in the main process; in the others nothing."""
        found = {}
        for name, x in gathered(model):
            if processes.is_main():
                found[name] = x
        return found

    def whole(self, student: PreTrainedModel) -> PreTrainedModel:
        """Return the student as one model on the CPU, in the main process. In the others its weights have no values."""
        found = load_whole(self.source, **self.hub)
        if not isinstance(found, T2RModel):
            found = swap(found, cast(Any, student).t2r_config)
        values = self.values(student)
        if processes.is_main():
            fill_all(found, values)
        found.config.use_cache = True
        return found.eval()


def fill_all(model: PreTrainedModel, values: dict[str, torch.Tensor]) -> None:
    """Load all weights of a model, tied ones once."""
    missing, unexpected = model.load_state_dict(values, strict=False)
    if unexpected or set(missing) - compat.tied_weights(model):
        raise RuntimeError(f"the weights do not fit the model: {[*missing, *unexpected][:3]}")
    model.tie_weights()
