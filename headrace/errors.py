"""Named errors. Every message says what was got, what was expected and what to do."""


class HeadraceError(Exception):
    """Base of the errors a user is expected to read; the command line prints it as one line and exits 1."""


class ConfigError(HeadraceError, ValueError):
    """A setting is unknown, has the wrong type, or contradicts another setting or the run it resumes."""


class EnvironmentIdError(HeadraceError, ValueError):
    """No environment goes by that id, or the package it needs is not installed."""


class UnsupportedSpaceError(HeadraceError, ValueError):
    """An observation or action space (named by its path) that the system cannot carry."""


class EnvironmentFailure(HeadraceError, RuntimeError):
    """A user's environment raised, or broke its own contract; names env, slot and step."""


class WaitTimeoutError(HeadraceError, TimeoutError):
    """A wait ran past its timeout; names what was waited for."""


class NonFiniteError(HeadraceError, ArithmeticError):
    """A loss or gradient was not finite, several updates in a row."""


class RunDirectoryError(HeadraceError):
    """The directory is not a run, or its checkpoints cannot be read."""
