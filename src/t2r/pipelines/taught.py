"""Conversions that read the teacher's distribution from the disk (`teacher_logits`): what they require."""

from __future__ import annotations

from transformers import PreTrainedModel

from t2r.data.fingerprint import digest, of_config
from t2r.data.teacher_logits import TeacherLogits
from t2r.errors import T2RError
from t2r.options import Conversion
from t2r.pipelines.common import Texts
from t2r.storage import refuse_deleting
from t2r.tasks.language_modeling import TEACHER
from t2r.training.recipes.recipe import Recipe
from t2r.training.sessions.run import run_folder


def find(given: Conversion, recipe: Recipe, texts: Texts, sources: list[str]) -> TeacherLogits | None:
    """Return the logits that were given. Raises T2RError if the recipe or the texts do not allow them."""
    if given.teacher_logits is None:
        return None
    distills = [stage for stage in recipe.stages if stage.objective == "distill"]
    noisy = [stage.name for stage in distills if stage.noise]
    for wrong, why in (
        (texts.translates, "teacher_logits are for language models: leave them out for parallel text"),
        (TEACHER in sources, "teacher_logits are those of a text that is there: do not train on text by the teacher"),
        (not distills, f"recipe {recipe.name} has no distillation, which could read teacher_logits: leave them out"),
        (noisy, f"teacher_logits are those of a text without token noise: set {' and '.join(noisy)}.noise=0"),
    ):
        if wrong:
            raise T2RError(why)
    refuse_deleting([given.teacher_logits], given.out, run_folder(given.out))
    return TeacherLogits(given.teacher_logits)


def check(
    logits: TeacherLogits, given: Conversion, plan: Recipe, teacher: PreTrainedModel, weights: str | None
) -> None:
    """Raise T2RError if logits do not belong to a teacher, whose weights have this fingerprint, or not to the stages of
    the plan."""
    header, folder = logits.header, logits.folder
    if weights != header.weights or header.config not in ("", of_config(teacher)):
        raise T2RError(f"{folder} has the logits of another model, {header.model}: make them anew by t2r teach")
    if header.documents != given.documents:
        raise T2RError(
            f"{folder} was made with{'' if header.documents else 'out'} --documents, and this conversion is "
            f"with{'' if given.documents else 'out'}: give it to both, or to none"
        )
    for stage in plan.stages:
        if stage.objective != "distill":
            continue
        for name, flag in (("block_size", "--block-size"), ("temperature", "--temperature")):
            if (own := getattr(stage, name)) != (theirs := getattr(header, name)):
                raise T2RError(
                    f"{folder} has {name} {theirs:g}, and stage {stage.name} {own:g}: give --set "
                    f"{stage.name}.{name}={theirs:g}, or make the logits anew by t2r teach {flag} {own:g}"
                )


def fact(logits: TeacherLogits) -> str:
    """Return what identifies the logits: a run that is resumed must have the same."""
    header = logits.header
    return digest([header.weights, header.text, header.top_k, header.temperature, header.bf16])
