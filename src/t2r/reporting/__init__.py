"""Reports: inspections of models, a description of the machine, tables of options, and pages of results.

`reporting.Page` is a page of tables and figures (`bars`, `lines`, `heatmap`). `reporting.environment`
describes the machine. `reporting.terminal.show` prints a table that fits the terminal.
"""

from t2r import terminal
from t2r.reporting import environment
from t2r.reporting.page import COLORS, Page, bars, heatmap, lines

__all__ = ["COLORS", "Page", "bars", "environment", "heatmap", "lines", "terminal"]
