"""The one exception that stages raise for people: it is shown without a traceback."""


class StageError(Exception):
    """A mistake that the user can fix. Its message states what was given, what is allowed and what to do."""
