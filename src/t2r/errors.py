"""The exception for user errors."""


class T2RError(ValueError):
    """Raised for invalid input. The message says what is wrong and what to do.

    The command line prints the message as one line without a traceback, so it must not be raised for bugs in t2r. It
    subclasses ValueError, so that library callers can catch it without importing t2r.
    """


TOLD_BY_ANY = "told_by_any"
"""The attribute of a record of the log that the command line prints in any of several processes, not in the first only:
one of them tells it, for all."""
