"""The one exception for mistakes of the caller."""


class T2RError(ValueError):
    """What was asked for cannot be done, and the message says why and what to do instead.

    Raise it for input that is wrong, never for a bug of ours: the command line prints the message as one
    line without a traceback. It is a ValueError, so that library callers need not know of it.
    """
