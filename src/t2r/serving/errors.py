"""Errors that a client is told, in the form of OpenAI's API."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An error in a request, or a refusal. `status` is that of HTTP."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message, self.status, self.param, self.code = " ".join(message.split()), status, param, code
        self.headers = headers

    @property
    def body(self) -> dict[str, Any]:
        types = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
        kind = types.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def unknown_state(id: str, param: str | None = None) -> ApiError:
    shown = id if len(id) <= 100 else f"{id[:100]}..."
    return ApiError(f"there is no state {shown!r}: it was deleted, or never here", 404, param=param, code="not_found")


def too_long(given: str, most: str) -> ApiError:
    return ApiError(f"{given} are more than the {most} of this model and server", code="context_length_exceeded")


def internal() -> ApiError:
    return ApiError("the server has failed; its log has the reason", 500, code="internal_error")


def closing() -> ApiError:
    return ApiError("the server is shutting down", 503, code="shutting_down", headers={"retry-after": "10"})
