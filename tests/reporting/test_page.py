"""HTML pages: well-formed for any content, with accessible figures."""

import sys
import xml.etree.ElementTree as ElementTree

import pytest

from t2r.errors import T2RError
from t2r.reporting.page import COLORS, INK, Page, bars, check_plots, lines

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
    heights = bars({"a & b": 12.5, "c": 2000.0}, "perplexity")
    for svg, words in (
        (speed, ["one", "two", "length", "time", "512", "8,192"]),
        (heights, ["a & b", "12.50", "2,000.00"]),
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


def texts(svg):
    return ["".join(element.itertext()).strip() for element in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_negative_values_are_drawn():
    """A logarithmic axis has no place for them, so it is linear then."""
    assert "\N{MINUS SIGN}2" in texts(lines({"rfa": ([1, 2, 3], [4.0, -2.0, 2.0])}, "distance", "weight", log_y=True))


def test_undefined_values_and_dollar_signs_are_drawn():
    drawn = lines({"a$\\frac$b": ([1, 2, 3], [4.0, None, 5.0]), "none": ([1], [None])}, "x", "y", log_y=True)
    assert "a$\\frac$b" in texts(drawn)


def test_logarithmic_axes_have_several_ticks():
    for low, high in ((0.0082, 0.0111), (12.0, 18.5), (3.0, 40.0), (1.0, 5000.0)):
        shown = texts(lines({"one": ([0.5, 1.5], [low, high])}, "x", "y", log_y=True))
        ticks = [float(text.replace(",", "")) for text in shown[: shown.index("y")] if text not in ("x", "one")]
        assert sum(0.9 * low <= tick <= 1.1 * high for tick in ticks) >= 2


def test_intervals_and_the_legend_of_a_single_line():
    plain = lines({"teacher": ([1, 2], [1, 2])}, "x", "y")
    assert "teacher" not in texts(plain)
    assert "teacher" in texts(lines({"teacher": ([1, 2], [1, 2])}, "x", "y", legend=True))
    ends = {"teacher": [(0.5, 1.5), (1.5, 2.5)]}
    assert lines({"teacher": ([1, 2], [1, 2])}, "x", "y", intervals=ends).count(COLORS[0]) > plain.count(COLORS[0])


def test_the_same_figure_is_the_same_every_time():
    def draw():
        return lines({"one": (range(9), range(1, 10))}, "step", "loss", log_y=True, markers=True)

    assert draw() == draw()


def test_page_errors(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(T2RError, match="cannot be written"):
        Page("x").write(tmp_path / "file" / "index.html")


def test_without_matplotlib(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = Page("x")
    page.figures({"a": bars({"a": 1.0}, "x"), "b": lines({"a": ([1, 2], [1, 2])}, "x", "y")})
    page.write(tmp_path / "index.html")
    assert "figure" not in (tmp_path / "index.html").read_text().partition("<body>")[2]
    assert "plots extra" in caplog.text
    with pytest.raises(T2RError, match="plots extra"):
        check_plots()
