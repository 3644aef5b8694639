"""What the commands of an experiment may do. An experiment file is a program, and may be a stranger's.

Its commands write only in the working folder, and run code of others only if the user says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from t2r.errors import T2RError

WRITING = ("--outputs", "--page", "--plots", "--report-to", "--save-state")
"""Options with which a command writes elsewhere than in its output folder."""
TRUST = "--trust-remote-code"
TASKS = "--task-folder"
"""Tasks of lm-eval can contain code."""
FOLDER = re.compile(r"\w[\w.-]{0,99}")
"""Names of folders that an experiment may make in the folder of the user."""
ADDRESSES = ("http://", "https://")
"""Beginnings of addresses of servers, to which `t2r generate` would send prompts, or the lines of a file."""
URL = "--url"
"""The address to which `t2r bench serve` would send requests, with the user's key."""
RESERVED = ("data", "steps")
"""Folders in the working folder that are not outputs of steps."""
MOST_STEPS = 10_000
"""Steps of an experiment, with all cells and seeds."""
MOST_SEEDS = 1000
LONGEST = 100_000
"""Characters of a command."""


def check_folder(name: str, what: str) -> None:
    """Raise T2RError if a name from a file would be another place than a folder of this name."""
    if not FOLDER.fullmatch(name):
        raise T2RError(f"{what} must be a name of letters, digits, -, _ and ., and begin with a letter; got {name!r}")


def check_command(words: Sequence[str], where: str) -> None:
    """Raise T2RError if a command would write outside of the working folder. The placeholders of models are replaced.

    Click takes the first words that are no options as arguments, and an option may take any word as its value: in
    front of the output folder there must be exactly one word, the model."""
    if words[0] == "generate" and any(word.startswith(ADDRESSES) for word in words):
        raise T2RError(f"{where}: an experiment generates on this machine only: give a model, not an address")
    for word in words:
        option = word.partition("=")[0]
        if option == URL:
            raise T2RError(f"{where}: an experiment measures its own servers only: leave out {option}")
        if option in WRITING:
            raise T2RError(f"{where}: an experiment writes in its working folder only: leave out {option}")
        if re.search(r"\{examples:[^}]*\.\.", word):
            raise T2RError(f"{where}: {word} is outside of the examples")


def check_output(words: Sequence[str], name: str, where: str) -> None:
    """Raise T2RError unless the arguments of a command that makes a model are a source and the step's own folder."""
    if name in RESERVED:
        raise T2RError(f"{where}: its output folder cannot be called {name}, which has the results of all steps")
    if words[1:2] and words[1].startswith("-"):
        raise T2RError(f"{where}: give the model and the output folder first, then the options")
    if list(words[2:3]) != [f"{{out:{name}}}"]:
        raise T2RError(f"{where}: its output folder must be {{out:{name}}}")


def runs_code(words: Sequence[str]) -> str | None:
    """Return the option with which a command runs code of others, or None."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option == TRUST:
            return option
        if option == TASKS and not (value if equals else following).startswith("{examples:"):
            return option
    return None
