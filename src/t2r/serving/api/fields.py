"""The fields that several kinds of requests have. A field that is not listed is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from t2r.serving.choosing import Choosing
from t2r.serving.errors import ApiError

Text = Annotated[str, Field(max_length=1 << 24)]
Name = Annotated[str, Field(min_length=1, max_length=500)]
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
MOST_CHOICES = 64
MOST_STOPS = 16
MOST_LOGPROBS = 20


class Strict(BaseModel):
    """A part of a request: no other fields, no conversion of types, no numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class ResponseFormat(Strict):
    type: Literal["text"]


class Sampling(Strict):
    """How tokens are chosen, in all kinds of requests. `top_k`, `min_p` and `repetition_penalty` are not OpenAI's."""

    model: Name | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=1 << 31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stream: bool | None = None

    def choosing(self, limit: int, given: int | None, default: int, field: str) -> Choosing:
        """Return how tokens are chosen. `given` is the number of tokens that the client asks for, in this field."""
        if given is not None and given > limit:
            raise ApiError(f"{field} must be at most {limit} on this server; got {given}", param=field)
        names = {name for name in Choosing._fields if name in type(self).model_fields}
        more: dict[str, Any] = {name: getattr(self, name) for name in names - {"max_tokens"}}
        return Choosing(given or min(default, limit), **more)


class Completing(Sampling):
    """What completions of texts and of chats have in common."""

    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stop: Name | Annotated[list[Name], Field(max_length=MOST_STOPS)] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = None
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the number of tokens."""
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options is for streams: set stream too", param="stream_options")
        return bool(self.stream_options is not None and self.stream_options.include_usage)
