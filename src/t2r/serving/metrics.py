"""Numbers for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

TIMES = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.gauges: dict[str, Gauge] = {}
        how: Any = {"registry": self.registry}
        self.requests = Counter("t2r_requests", "Requests by path and status.", ["path", "status"], **how)
        self.tokens = Counter(
            "t2r_tokens", "Tokens: read, cached (known from a state) and generated.", ["model", "kind"], **how
        )
        self.ended = Counter("t2r_sequences", "Sequences by how they ended.", ["model", "reason"], **how)
        self.first = Histogram("t2r_first_token_seconds", "Time to first token.", ["model"], buckets=TIMES, **how)
        self.later = Histogram(
            "t2r_later_token_seconds", "Mean time between the tokens of a sequence.", ["model"], buckets=TIMES, **how
        )

    def gauge(self, name: str, help: str, value: Callable[[], float], **labels: str) -> None:
        """Add a gauge that is read when somebody asks."""
        if name not in self.gauges:
            self.gauges[name] = Gauge(name, help, list(labels), registry=self.registry)
        gauge = self.gauges[name]
        (gauge.labels(**labels) if labels else gauge).set_function(value)

    def text(self) -> bytes:
        return generate_latest(self.registry)
