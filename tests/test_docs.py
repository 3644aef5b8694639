"""Links of README.md and docs lead to files and headings that exist, as do commands and options."""

import itertools
import re
import shlex

import pytest
from typer.main import get_command

from repository import ROOT
from t2r.cli import app

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(path):
    """Return the anchors of the headings of a page, as GitHub makes them."""
    lines = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE).splitlines()
    heads = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", line.lstrip("#").strip()) for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"https?:", link):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_every_page_can_be_reached_from_the_readme():
    seen, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen:
            continue
        seen.add(page)
        places = {link.partition("#")[0] for link in LINK.findall(page.read_text(encoding="utf-8"))}
        waiting += [(page.parent / place).resolve() for place in places if place.endswith(".md") and ":" not in place]
    assert set(PAGES) <= seen


# --- Commands -----------------------------------------------------------------------------------------------

COMMAND = get_command(app)


def commands(text):
    """Return the `t2r` commands of code blocks and of inline code, without comments and redirections."""
    blocks = re.sub(r"\\\n\s+", "", "\n".join(re.findall(r"^    +(t2r (?:.*\\\n)*.*)", text, re.MULTILINE)))
    inline = [" ".join(found.split()) for found in re.findall(r"`(t2r [^`]+)`", text)]
    for line in (*blocks.splitlines(), *inline):
        words = shlex.split(line, comments=True)
        if "|" not in words:
            yield line, list(itertools.takewhile(lambda word: word not in ("<", ">"), words))[1:]


def unknown(words):
    """Return what is wrong with the words after `t2r`: a command or an option that does not exist."""
    command = COMMAND
    while words and hasattr(command, "commands"):
        if words[0] in ("--help", "--version", "--list"):
            return None
        command = command.commands.get(words[0])
        if command is None:
            return f"no command {words[0]}"
        words = words[1:]
    context = command.context_class(command)
    try:
        _, rest, _ = command.make_parser(context).parse_args([word for word in words if word != "…"])
    except Exception as error:  # typer has a click of its own, whose errors have no public name
        told = error.format_message()
        return None if "requires an argument" in told else told
    return f"too many arguments: {rest}" if rest else None


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_and_their_options_exist(page):
    if page.parent.name == "log":
        pytest.skip("a log keeps what was true on its day")
    wrong = {line: told for line, words in commands(page.read_text(encoding="utf-8")) if (told := unknown(words))}
    assert not wrong


def test_a_wrong_command_is_found():
    ((_, words),) = commands("    t2r convert a b --no-such-option 1    # a comment\n")
    assert "No such option: --no-such-option" in unknown(words)
    assert unknown(["converts", "a"]) == "no command converts"
    assert unknown(["bench", "decode", "m", "--batch", "1"]) is None


def test_every_command_is_listed():
    listed = re.findall(r"^\| `t2r (\w+)`", (ROOT / "docs/commands.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(COMMAND.commands)
    bench = re.search(r"^\| `t2r bench` .*$", (ROOT / "docs/commands.md").read_text(encoding="utf-8"), re.MULTILINE)[0]
    assert set(COMMAND.commands["bench"].commands) <= set(re.findall(r"`(\w+)`", bench))


# --- The log ------------------------------------------------------------------------------------------------


def test_entries_of_the_log_are_in_the_files_of_their_months():
    index = (ROOT / "docs/log.md").read_text(encoding="utf-8")
    assert not re.search(r"^#+ 20", index, re.MULTILINE), "an entry belongs at the top of docs/log/YYYY-MM.md"
    files = sorted((ROOT / "docs/log").glob("*.md"), reverse=True)
    assert re.findall(r"\(log/([\d-]+)\.md\)", index) == [path.stem for path in files]
    for path in files:
        heads = re.findall(r"^#+ (20.{8})", path.read_text(encoding="utf-8"), re.MULTILINE)
        assert heads == sorted(heads, reverse=True), "the newest entry is the first"
        assert {head[:7] for head in heads} == {path.stem}
        assert not re.search(r"^# 20", path.read_text(encoding="utf-8"), re.MULTILINE), "an entry has two marks, ##"
