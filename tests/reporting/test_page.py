"""HTML pages: well-formed for any content, with accessible figures."""

import sys
import xml.etree.ElementTree as ElementTree

import pytest

from t2r.errors import T2RError
from t2r.reporting.page import COLORS, INK, Page, bars, lines

SVG = "{http://www.w3.org/2000/svg}"


def test_text_is_escaped(tmp_path):
    page = Page("a < b & c")
    page.heading("<script>")
    page.paragraph("1 < 2 & 3")
    page.table(("<i>", "b"), [("x & y", '"')], "a <caption>")
    page.quotes({"<teacher>": "new\npage\x0c and a null\x00 and 文字 🙂"})
    page.write(tmp_path / "deep" / "index.html")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["index.html"]
    tree = ElementTree.fromstring((tmp_path / "deep" / "index.html").read_bytes())
    text = "".join(tree.itertext())
    for words in ("a < b & c", "<script>", "1 < 2 & 3", "<i>", "x & y", "a <caption>", "<teacher>"):
        assert words in text
    assert "new\npage\N{REPLACEMENT CHARACTER} and a null\N{REPLACEMENT CHARACTER} and 文字 🙂" in text


def test_figures_are_svg_with_names_and_numbers():
    speed = lines({"one": ([512, 8192], [1, 2]), "two": ([512, 8192], [3, 0.5])}, "length", "time", log_x=True)
    heights = bars({"a & b": 12.5, "c": 2000.0}, "perplexity", log=True)
    for svg, words in (
        (speed, ["one", "two", "length", "time", "512", "8,192"]),
        (heights, ["a & b", "12.50", "1,000"]),
    ):
        tree = ElementTree.fromstring(svg)
        assert tree.tag == f"{SVG}svg"
        written = ["".join(element.itertext()).strip() for element in tree.iter(f"{SVG}text")]
        for word in words:
            assert word in written
        assert COLORS[0] in svg
        assert COLORS[1] in svg
        assert "currentColor" in svg  # axes and labels have the text color of the page
        assert INK not in svg


def test_the_same_figure_is_the_same_every_time():
    def draw():
        return lines({"one": (range(9), range(1, 10))}, "step", "loss", log_y=True, markers=True)

    assert draw() == draw()


def test_page_errors(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(T2RError, match="cannot be written"):
        Page("x").write(tmp_path / "file" / "index.html")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(T2RError, match="plots extra"):
        bars({"a": 1.0}, "x")
