"""The page: its files are served with a strict policy, and nothing in them comes from elsewhere."""

import asyncio
import re

from serving_models import running, served
from t2r.serving.api.page import FOLDER, files

NAMES = sorted(path.name for path in FOLDER.iterdir())
TEXTS = {name: (FOLDER / name).read_text(encoding="utf-8") for name in NAMES}


def asked(*paths, key=None, **headers):
    """Return the answers of a server to these paths."""

    async def main():
        async with running(served(), key=key) as (client, _):
            return [await client.get(path, headers=headers) for path in paths]

    return asyncio.run(main())


def test_all_files_are_served_and_all_that_they_name_exist():
    answers = asked("/", *(f"/page/{name}" for name in NAMES))
    assert [answer.status_code for answer in answers] == [200] * len(answers)
    assert answers[0].content == (FOLDER / "index.html").read_bytes()
    for name, answer in zip(NAMES, answers[1:], strict=True):
        assert answer.content == (FOLDER / name).read_bytes()
        kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
        assert answer.headers["content-type"] == f"{kinds[name.split('.')[-1]]}; charset=utf-8"
        assert answer.headers["x-content-type-options"] == "nosniff"
    named = re.findall(r'(?:href|src)="page/([^"]+)"', TEXTS["index.html"])
    named += [name for text in TEXTS.values() for name in re.findall(r'from "\./([^"]+)"', text)]
    assert {"app.js", "style.css", "dom.js"} <= set(named) <= set(NAMES)
    assert set(named) | {"index.html"} == set(NAMES)


def test_the_policy_allows_only_what_the_server_serves():
    page, *_ = asked("/")
    policy = page.headers["content-security-policy"]
    parts = dict(part.split(" ", 1) for part in policy.split("; "))
    assert parts["default-src"] == parts["base-uri"] == parts["frame-ancestors"] == "'none'"
    assert parts["script-src"] == parts["style-src"] == parts["connect-src"] == "'self'"
    assert "unsafe" not in policy


def test_nothing_is_from_another_host_and_nothing_is_read_as_html():
    for name, text in TEXTS.items():
        assert set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[\w./]*", text)) <= {"http://www.w3.org/2000/svg"}, name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), name
    # The policy would not run them: they would be dead.
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script>|javascript:", TEXTS["index.html"])


def test_a_browser_asks_again_only_whether_a_file_has_changed():
    (first,) = asked("/page/app.js")
    assert first.headers["cache-control"] == "no-cache"
    again, other = asked("/page/app.js", "/page/style.css", **{"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert again.headers["content-security-policy"]
    assert other.status_code == 200


def test_only_files_of_the_page_can_be_asked_for():
    paths = (
        "/page/",
        "/page/../app.py",
        "/page/..%2fapp.py",
        "/page/%2e%2e/app.py",
        "/page/%2e%2e%2fapi%2fpage.py",
        "/page//etc/passwd",
        "/page/%2fetc%2fpasswd",
        "/page/app.js%00.html",
        "/page/..\\app.py",
        "/page/APP.JS",
    )
    for path, answer in zip(paths, asked(*paths), strict=True):
        assert answer.status_code == 404, path
        assert answer.json()["error"]["message"].startswith("there is nothing at")


def test_the_page_needs_no_key_but_what_it_asks_does():
    page, script, models = asked("/", "/page/app.js", "/v1/models", key="secret")
    assert (page.status_code, script.status_code, models.status_code) == (200, 200, 401)
    assert len(files()) == len(NAMES)


def test_a_stream_says_at_its_beginning_what_is_read():
    """The page shows the memory of a conversation before the first token."""

    async def main():
        async with running(served()) as (client, _):
            body = {"input": "Hello", "max_output_tokens": 2}
            first = (await client.post("/v1/responses", json=body)).json()
            body |= {"previous_response_id": first["id"], "stream": True}
            return first, (await client.post("/v1/responses", json=body)).text

    first, text = asyncio.run(main())
    usage = re.search(r'"type":"response.in_progress".*?"usage":({.*?}.*?})', text)[1]
    known = first["usage"]["total_tokens"] - 1
    assert f'"input_tokens":{known + 1 + len("|u~Hello|a~")},' in usage
    assert f'"cached_tokens":{known},' in usage
