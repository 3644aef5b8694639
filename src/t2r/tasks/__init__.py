"""Training tasks, one file for each."""

from t2r.tasks.base import Task
from t2r.tasks.language_modeling import LanguageModeling
from t2r.tasks.translation import Translation

TASKS: dict[str, type[Task]] = {LanguageModeling.name: LanguageModeling, Translation.name: Translation}
"""Tasks by their name in results.json."""

__all__ = ["TASKS", "LanguageModeling", "Task", "Translation"]
