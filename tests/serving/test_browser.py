"""The page in a real browser: people talk to models, stop them, fork, ask documents and translate."""

import json
import os
import re
import threading
import time
from pathlib import Path

import pytest

from browser import PROGRAM
from devtools import opened
from serving_models import listening, model, served, teacher, tokenizer
from t2r.serving.served import ServedModel

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium or Chrome is installed")

PICTURES = os.environ.get("T2R_PICTURES")
"""A folder in which tests leave what they have seen, to be looked at."""
IDLE = "document.querySelector('#send')?.checkVisibility()"
ANSWERS = "[...document.querySelectorAll('.turn:last-child .answer')]"


@pytest.fixture(scope="module")
def page():
    with opened() as found:
        yield found


@pytest.fixture(scope="module")
def both():
    with listening(served(), ServedModel("llama", teacher(), tokenizer()), max_tokens=2000) as found:
        yield found


def start(page, address, width=1280, height=800, dark=False):
    """Open the page as somebody who comes for the first time."""
    page.problems.clear()
    page.requests.clear()
    page.show(width, height, dark)
    page.open(address)
    page.run("sessionStorage.clear()")
    page.open(address)


def limit(page, tokens):
    page.run(f"document.querySelector('[name=max_output_tokens]').value = {tokens}")


def say(page, text):
    page.click("#message")
    page.type(text)
    page.press("Enter")


def ended(page):
    page.wait(IDLE)
    return json.loads(page.run(f"JSON.stringify({ANSWERS}.map(e => e.innerText))"))


def look(page, name):
    if PICTURES is not None:
        page.picture(Path(PICTURES) / f"{name}.png")


def check(page, address, width):
    """Nothing is wider than the window, nothing came from elsewhere, and the browser has not complained."""
    wide = page.run(
        "[...document.querySelectorAll('body *')].filter(e => e.checkVisibility() && !e.closest('nav, .hidden, .skip')"
        "&& e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + '.' + e.className)"
    )
    assert wide == []
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("document.documentElement.scrollHeight <= innerHeight")
    assert page.requests
    assert all(request.startswith((address, f"blob:{address}")) for request in page.requests)
    assert page.problems == []


@pytest.mark.parametrize(("width", "height", "dark"), [(1280, 800, False), (390, 844, True)])
def test_both_models_answer_side_by_side(page, both, width, height, dark):
    address, _ = both
    start(page, address, width, height, dark)
    page.wait("document.querySelector('.welcome')")
    limit(page, 40)
    look(page, f"welcome-{width}")
    for text in ("<b>Hello</b> there", "What now?"):
        say(page, text)
        page.wait(IDLE)
    one, other = ended(page)
    for name, text in (("rnn", one), ("llama", other)):
        assert text.startswith(name)
        assert "40 tokens" in text
        assert "tokens/s" in text
        assert "first token" in text
        assert "from the state" in text
    look(page, f"answers-{width}")
    assert page.run("document.querySelector('.said .text').textContent") == "<b>Hello</b> there"
    assert page.run("document.querySelectorAll('.said b').length") == 0
    # What the RNN keeps is what it kept at first; the teacher keeps every token.
    values = page.run("[...document.querySelectorAll('#memory .value')].map(e => e.textContent)")
    tokens = sum(len(text) for text in ("u~<b>Hello</b> there|a~", "|u~What now?|a~")) + 2 * 40
    assert values == ["3.46 kB", f"{768 * tokens / 1000:.1f} kB"]
    colors = page.run("getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, colors[4:-1].split(","))) < 60) == dark
    check(page, address, width)
    # A page that is loaded again still has the conversation, and goes on.
    page.open(address)
    page.wait("document.querySelectorAll('.turn').length === 2")
    limit(page, 3)
    say(page, "And then?")
    page.wait("document.querySelectorAll('.turn').length === 3")
    assert all("from the state" in text for text in ended(page))


def test_a_conversation_is_forked_at_an_earlier_answer(page, both):
    address, _ = both
    start(page, address)
    page.wait("document.querySelector('.welcome')")
    limit(page, 5)
    for text in ("one", "two"):
        say(page, text)
        page.wait(IDLE)
    page.click(".turn:first-child > .actions button")
    page.wait("document.querySelectorAll('.turn').length === 1")
    say(page, "three")
    page.wait("document.querySelectorAll('.turn').length === 2")
    for text in ended(page):
        assert f"{1 + len('|u~three|a~')} read, {len('u~one|a~') + 4} from the state" in text
    # An edit asks something else in the place of a question.
    page.click(".turn:last-child .said button")
    page.wait("document.querySelectorAll('.turn').length === 1")
    assert page.run("document.querySelector('#message').value") == "three"
    page.press("Enter")
    page.wait("document.querySelectorAll('.turn').length === 2")
    ended(page)
    titles = "[...document.querySelectorAll('#conversations [title]')].map(e => e.textContent)"
    assert page.run(titles) == ["↳ three", "↳ three", "one"]
    look(page, "fork")
    # What a model remembers is a file that one can keep.
    page.ask("Page.setDownloadBehavior", behavior="deny")
    page.click("[title^='Download what rnn']")
    page.wait(
        "performance.getEntriesByType('resource').some("
        "e => e.name.endsWith('/content') && e.responseStatus === 200 && e.transferSize > 3456)"
    )
    check(page, address, 1280)


def test_an_answer_is_stopped_and_the_conversation_goes_on(page, both):
    address, service = both
    start(page, address)
    page.wait("document.querySelector('.welcome')")
    say(page, "Hello")
    page.wait(f"{ANSWERS}.every(e => e.querySelector('.text').textContent.length > 5)")
    page.press("Escape")
    for text in ended(page):
        assert "Stopped." in text
    until = time.monotonic() + 30
    while service.running:
        assert time.monotonic() < until
        time.sleep(0.02)
    said = page.run(f"{ANSWERS}.map(e => e.querySelector('.text').textContent.length)")
    limit(page, 4)
    say(page, "again")
    page.wait("document.querySelectorAll('.turn').length === 2")
    # Without a state of the stopped answer, its text is sent again.
    for text, length in zip(ended(page), said, strict=True):
        found = re.search(r"(\d+) read(?:, (\d+) from)?", text)
        assert sum(int(part or 0) for part in found.groups()) == len("u~Hello|a~") + length + len("|u~again|a~")
    check(page, address, 1280)


@pytest.mark.parametrize(("width", "height", "dark"), [(1280, 800, True), (390, 844, False)])
def test_a_document_is_read_once(page, both, width, height, dark):
    address, _ = both
    text = "The library opens at nine. " * 30
    start(page, address, width, height, dark)
    page.wait("document.querySelector('.welcome')")
    limit(page, 5)
    page.click("#add-document")
    page.type(text)
    look(page, f"document-{width}")
    page.click("#document .main")
    page.wait("document.querySelector('.turn.document > .actions button')")
    tokens = len("u~" + text.rstrip() + "\n\n")
    for answer in ended(page):
        assert f"{tokens:,} tokens read in" in answer
    page.click("#alone")
    for number, question in enumerate(("When?", "Where is it?"), 2):
        say(page, question)
        page.wait(f"document.querySelectorAll('.turn').length === {number}")
        for answer in ended(page):
            assert f"{len(question + '|a~')} read, {tokens:,} from the state" in answer
    page.click("#alone")
    say(page, "Why?")
    page.wait("document.querySelectorAll('.turn').length === 4")
    for answer in ended(page):
        assert f"{1 + len('|u~Why?|a~')} read, {tokens + len('Where is it?|a~') + 4:,} from the state" in answer
    look(page, f"asked-{width}")
    check(page, address, width)


def test_what_the_server_has_forgotten_is_read_again(page, both):
    address, service = both
    start(page, address)
    page.wait("document.querySelector('.welcome')")
    limit(page, 5)
    say(page, "Hello")
    ended(page)
    forget = threading.Event()

    def all_states():
        for stored in list(service.states.by_id.values()):
            service.states.forget(stored)
        forget.set()

    service.worker.loop.call_soon_threadsafe(all_states)
    assert forget.wait(30)
    say(page, "again")
    page.wait("document.querySelectorAll('.turn').length === 2")
    for text in ended(page):
        assert "had forgotten this conversation" in text
        assert f"{len('u~Hello|a~') + 5 + len('|u~again|a~')} read" in text


def test_a_model_without_a_template_continues_a_text(page):
    plain = tokenizer()
    plain.chat_template = None
    with listening(ServedModel("rnn", model(), plain)) as (address, _):
        start(page, address, 390, 844)
        page.wait("document.querySelector('.welcome')")
        limit(page, 5)
        say(page, "Once upon")
        ended(page)
        say(page, "a time")
        page.wait("document.querySelectorAll('.turn').length === 2")
        (text,) = ended(page)
        assert f"{1 + len(' a time')} read, {len('Once upon') + 4} from the state" in text
        check(page, address, 390)


def test_a_key_is_asked_for(page):
    with listening(served(), key="secret") as (address, _):
        start(page, address)
        for key in ("wrong", "secret"):
            page.wait("document.querySelector('#key').open")
            page.click("#key-text")
            page.type(key)
            page.press("Enter")
            page.wait("!document.querySelector('#key').open || document.querySelector('#key-text').value === ''")
        page.wait("document.querySelector('.welcome')")
        limit(page, 3)
        say(page, "Hello")
        assert len(ended(page)) == 1


def test_lines_are_translated(page):
    with listening(served("marian", name="mt")) as (address, _):
        for width, height, dark in ((1280, 800, False), (390, 844, True)):
            start(page, address, width, height, dark)
            page.wait("document.querySelector('#source')")
            limit(page, 6)
            page.click("#source")
            page.type("abc\n\ndef ghi")
            page.click("#translation .main")
            page.wait("document.querySelector('#translation .stats').textContent.includes('12 tokens')")
            lines = page.run("[...document.querySelectorAll('.lines p')].map(e => e.textContent)")
            assert [bool(line) for line in lines] == [True, False, True]
            look(page, f"translation-{width}")
            check(page, address, width)
