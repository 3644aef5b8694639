"""What a model is trained to do, one file for each task."""

from t2r.tasks.base import Task
from t2r.tasks.language_modeling import LanguageModeling
from t2r.tasks.translation import Translation

TASKS: dict[str, type[Task]] = {LanguageModeling.name: LanguageModeling, Translation.name: Translation}
"""By the name that stands in results.json."""

__all__ = ["TASKS", "LanguageModeling", "Task", "Translation"]
