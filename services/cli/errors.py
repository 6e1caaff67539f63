"""What the command says and exits with code 1 for. Every message is one line and names the way out."""


class CliError(Exception):
    """Base of all errors that the command explains in one line, without a traceback."""


class PortInUse(CliError):
    """Another process listens where a server of the stack would."""


class TooLittle(CliError):
    """Not enough disk or memory for what was asked."""


class StackRunning(CliError):
    """A stack with this state directory is up already."""


class StackNotRunning(CliError):
    """There is no stack to talk to."""


class StartFailed(CliError):
    """A part of the stack did not come up."""


class DrainFailed(CliError):
    """An instance did not end as it should when it was asked to stop."""


class NoDeadLetter(CliError):
    """No dead letter has this number."""


class RetryFailed(CliError):
    """No gateway took the work of a dead letter up again."""


class UnknownTarget(CliError):
    """No stage, server or instance has this name."""


class SupervisorGone(CliError):
    """The supervisor does not answer, or refused a call."""


class ChatFailed(CliError):
    """The gateway refused a chat request or could not be reached."""
