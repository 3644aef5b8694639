"""The options of `t2r serve`."""

from __future__ import annotations

from dataclasses import dataclass

from t2r.options.definition import option

MIB = 1 << 20


@dataclass(kw_only=True)
class ServeOptions:
    """Options of the server: where it listens, its limits, and where states are kept."""

    host: str = option("127.0.0.1", help="Address to listen on; 0.0.0.0 for all of this machine (use --api-key).")
    port: int = option(8000, help="Port to listen on; 0 for a free one.", minimum=0, maximum=65535)
    api_key: str | None = option(
        None, help="Key that clients must send, also from T2R_API_KEY.", unset="none: everyone who reaches the server"
    )
    cors: list[str] | None = option(
        None,
        help="An origin whose pages may use the server, such as http://localhost:3000; * for all. Repeatable.",
        unset="none but the server's own page",
        repeated=True,
    )
    rows: int | None = option(
        None, help="Number of sequences that run at the same time.", minimum=1, unset="as many as run, up to 256"
    )
    max_tokens: int = option(4096, help="Maximum number of tokens that a request may generate.", minimum=1)
    max_length: int = option(
        32768, help="Maximum number of tokens of a sequence, with its state and prompt.", minimum=2
    )
    max_queue: int = option(256, help="Number of sequences that may wait for a row; others are refused.", minimum=0)
    max_body: int = option(16, help="Maximum size of a request, in MiB.", minimum=1)
    timeout: float = option(600.0, help="Seconds after which a request is ended.", above=0)
    states: str | None = option(
        None, help="Folder in which states are kept, also when the server restarts.", unset="in memory only"
    )
    state_memory: int = option(1024, help="Memory for states that are not running, in MiB.", minimum=0)
    state_disk: int = option(10240, help="Size of the folder of states, in MiB.", minimum=0)
    state_hours: float = option(168.0, help="Hours after its last use after which a state is deleted.", above=0)
