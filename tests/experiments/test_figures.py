"""The figure of the README, from its record."""

from t2r.experiments import figures


def test_the_figure_shows_every_row_of_its_record(tmp_path):
    path = tmp_path / "decoding.svg"
    figures.draw(str(path))
    text = path.read_text(encoding="utf-8")
    assert all(label in text for label in figures.ROWS.values())
    points = figures.decoding_report()["points"]
    assert set(figures.ROWS) <= {point["model"] for point in points}
