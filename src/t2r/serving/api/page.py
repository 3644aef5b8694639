"""The page at /: static files, which are in memory and have no parts of other sites."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import Response

from t2r.serving.errors import ApiError

router = APIRouter()

FOLDER = Path(__file__).parent.parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # A browser asks each time whether a file has changed: after an update, the page is never of two versions.
    "cache-control": "no-cache",
}


class File(NamedTuple):
    content: bytes
    type: str
    tag: str


@functools.cache
def files() -> dict[str, File]:
    """Return the files of the page by name. Nothing else can be asked for."""
    found = {}
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in TYPES:
            content = path.read_bytes()
            tag = hashlib.blake2b(content, digest_size=12).hexdigest()
            found[path.name] = File(content, f"{TYPES[path.suffix]}; charset=utf-8", f'"{tag}"')
    return found


def answer(name: str, http: Request) -> Response:
    file = files().get(name)
    if file is None:
        raise ApiError(f"there is nothing at {http.url.path[:200]}", 404)
    headers = HEADERS | {"etag": file.tag}
    if file.tag in http.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.type)


@router.get("/")
async def page(http: Request) -> Response:
    return answer("index.html", http)


@router.get("/page/{name}")
async def part(name: str, http: Request) -> Response:
    return answer(name, http)


@router.get("/favicon.ico")
async def icon(http: Request) -> Response:
    return answer("icon.svg", http)
