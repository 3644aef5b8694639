"""The exception for user errors."""


class T2RError(ValueError):
    """Raised for invalid input. The message says what is wrong and what to do.

    The command line prints the message as one line without a traceback, so it must not be raised for bugs in t2r. It
    subclasses ValueError, so that library callers can catch it without importing t2r.
    """
