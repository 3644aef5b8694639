"""Progress bars are shown in terminals only."""

import io

import pytest

from t2r.data.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal, True), (io.StringIO, False)])
def test_a_pipe_gets_no_bar(stream, shown, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.stderr", written := stream())
    with progress_bar("reading", 10, "tokens") as report:
        report(10)
    assert ("reading" in written.getvalue()) == shown
