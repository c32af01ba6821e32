"""What a check yields: something is as a training needs it, or what to do where it is not.

Only of the standard library, so that the doctor can report that a package is missing.
"""

from collections.abc import Generator
from typing import Literal, NamedTuple, TypeVar

from stages.base.errors import StageError, as_stage_error, one_line

T = TypeVar("T")


class Finding(NamedTuple):
    """One line of the doctor's report."""

    level: Literal["ok", "warning", "error"]
    """error: a stage would fail, or a result be lost | warning: slow, fragile, or an error in other circumstances."""
    what: str
    remedy: str = ""
    """Empty where everything is as it should be, and where `what` is the message of a stage, which has it."""

    def __str__(self) -> str:
        return f"{self.level:<8} {self.what}" + (f": {self.remedy}" if self.remedy else "")


Found = Generator[Finding, None, T]
"""What a check is: it yields its findings, and may return what other checks need."""


def ok(what: str) -> Finding:
    """Everything is as it should be."""
    return Finding("ok", what)


def warning(what: str, remedy: str) -> Finding:
    """Slow, fragile, or an error in other circumstances."""
    return Finding("warning", what, remedy)


def error(what: str, remedy: str) -> Finding:
    """A stage would fail."""
    return Finding("error", what, remedy)


def collect(check: Found[T]) -> Found[T | None]:
    """The findings of a check, and what it returns; None after an error, which never ends the other checks."""
    try:
        return (yield from check)
    except (StageError, OSError) as problem:
        yield from (Finding("error", line) for line in str(as_stage_error(problem)).splitlines())
    except ImportError as problem:
        what = f"{problem.name or 'a package'} cannot be imported ({problem})"
        yield error(what, "install the lock with `make setup`")
    except Exception as problem:  # of a file that is damaged in a way that nobody has thought of
        what = f"a check failed with {type(problem).__name__} ({one_line(problem)})"
        yield error(what, "the lines above may have the cause; compare the file that it reads with `git diff`")
    return None
