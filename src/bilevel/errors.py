"""Every exception of the library. Each is also a builtin exception."""

# The most characters of a message: the names and values in it can come from a file and have any length.
LONGEST = 2000


class BilevelError(Exception):
    """The base of all errors raised here."""

    # Whether another rank has reported it to the user.
    reported = False

    def __init__(self, message: object = "") -> None:
        text = str(message)
        super().__init__(text if len(text) <= LONGEST else f"{text[:LONGEST]} ...")


class OptionError(BilevelError, ValueError):
    """An option or argument is out of range, unknown, or not used by the mode in force."""


class ProblemError(BilevelError, ValueError):
    """The problem as stated cannot be solved: a shape, a missing gradient, a value that is not finite."""


class VariableError(BilevelError, TypeError):
    """u or v is not something that can be optimised."""


class DataError(BilevelError, ValueError):
    """A data source is empty, cannot be read twice, or is not a pair."""


class CheckpointError(BilevelError, RuntimeError):
    """A checkpoint cannot be read, or belongs to another run."""


class RankError(BilevelError, ConnectionError):
    """A rank of a data-parallel run is lost, or was started with other arguments than the first."""


class WriteError(BilevelError, OSError):
    """A file cannot be written: the disk is full, or the folder is read-only."""


class RunError(BilevelError, RuntimeError):
    """Some of many independent runs failed for good."""


def reason(error: Exception) -> str:
    """Return the message of another library's error on one line, for use in a sentence."""
    return " ".join(str(error).split()).rstrip(".")[:200] or type(error).__name__


class MissingPackageError(BilevelError, ImportError):
    """An optional package is needed and is not installed."""


class BilevelWarning(UserWarning):
    """Something that the user should know and that does not stop the run."""
