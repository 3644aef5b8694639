"""One page of a folder or a file of results. What it shows is recognized by its contents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from t2r.errors import T2RError
from t2r.pages import sections
from t2r.pages.plans import plans
from t2r.pages.training import completions, training
from t2r.reporting.page import PAGE, Page
from t2r.storage import kind_of, read_json, understood

Section = Callable[[Page, Any, Path], None]


def report(
    source: str | Path | Sequence[str | Path], out: str | Path | None = None, *, prompts: Sequence[str] = ()
) -> Path:
    """Write a self-contained HTML page of results, and return its path.

    Args:
        source: a folder of `t2r convert`, `t2r pretrain` or `t2r reproduce`; or the JSON output of `t2r evaluate`,
            `t2r bench`, `t2r analyze` or `t2r plan`; or several of them, for one page.
        out: the HTML file. None: `report.html` in the folder, or a file with the name of the JSON file.
        prompts: prompts that the model in a folder completes, greedily, for samples on the page.

    Results may be a stranger's: other files are read only in the folder of a result. The page replaces only a page.

    Raises T2RError if there are no results, or if the page cannot be written.
    """
    sources = [Path(s) for s in ([source] if isinstance(source, str | Path) else source)]
    if not sources:
        raise T2RError("give a folder or a JSON file of results")
    if out is not None and not Path(out).name:
        raise T2RError(f"out must be the path of the HTML file, got {str(out)!r}")
    found = [(path, section, content) for path in sources for section, content in _read(path)]
    first = sources[0]
    place = first / "report.html" if kind_of(first) == "folder" else first.with_suffix(".html")
    place = place if out is None else Path(out)
    PAGE.check(place, inputs=sources)
    with understood(found[0][0]):
        page = Page(sections.title(found[0][0], found[0][2]) if len(found) == 1 else "Results")
    for path, section, content in found:
        with understood(path):
            if len(found) > 1:
                page.heading(sections.title(path, content))
            section(page, content, path)
        if prompts and kind_of(path) == "folder":
            completions(page, path, prompts)
    page.write(place, inputs=sources)
    return place


def _read(path: Path) -> list[tuple[Section, Any]]:
    """Return the sections for a path, with their contents. The folder of several experiments has a section for each."""
    kind = kind_of(path)
    if kind is None:
        raise T2RError(f"{path} does not exist: give a folder or a JSON file of results")
    if kind == "folder":
        for name, section in (("record.json", sections.experiment), ("results.json", training)):
            if kind_of(path / name) == "file":
                return [(section, read_json(path / name))]
        contents = [read_json(file) for file in sorted(path.glob("*.json"))]
        records = [content for content in contents if isinstance(content, dict) and "experiment" in content]
        if records:
            return [(sections.experiment, record) for record in records]
        raise T2RError(f"{path} contains neither results.json (of a conversion) nor the record of an experiment")
    content = read_json(path)
    recognized = _section(content)
    if recognized is None:
        raise T2RError(
            f"{path} is not a result of t2r evaluate, bench, analyze, plan, convert or reproduce (with --json)"
        )
    return [(recognized, content)]


def _section(content: Any) -> Section | None:
    first = content[0] if isinstance(content, list) and content else content
    if not isinstance(first, dict):
        return None
    if isinstance(content, list):
        return sections.benchmark if "points" in first else sections.evaluations if "model" in first else None
    known: dict[str, Section] = {
        "experiment": sections.experiment,
        "stages": training,
        "plans": plans,
        "by_distance": sections.analysis,
        "rows": sections.benchmark,
        "points": sections.benchmark,
    }
    return next((section for key, section in known.items() if key in first), None)
