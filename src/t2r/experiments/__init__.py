"""Experiments behind the published numbers.

An experiment is a YAML file in this folder: models, and the commands that measure them. `t2r reproduce` runs one and
writes a record. The tables and figures of the paper are experiments with scales (`scales/`) and grids. The folder
`experiments` of the repository has the published records, the claims of the paper, and the generation of our pages.
"""

from t2r.experiments.experiment import Experiment, Step, load_experiment, scales_of, shipped_experiments
from t2r.experiments.run import reproduce

__all__ = ["Experiment", "Step", "load_experiment", "reproduce", "scales_of", "shipped_experiments"]
