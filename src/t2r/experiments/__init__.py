"""Every published number as a file that can be run again, and what was recorded when it was.

An experiment is a YAML file here: models, and the typed commands that measure them. `t2r reproduce` runs one and writes
a record; the records in `records/` are what the tables of docs/results.md are made from.
"""

from t2r.experiments.experiment import Experiment, Step, load_experiment, shipped_experiments
from t2r.experiments.run import reproduce

__all__ = ["Experiment", "Step", "load_experiment", "reproduce", "shipped_experiments"]
