"""How tests call a command in this process."""

from click.testing import Result
from typer.testing import CliRunner

from federation.errors import ParleyError
from parley.command_line import app

__all__ = ["refused", "run"]


def run(*arguments: object, typed: str = "") -> Result:
    """A command that succeeds."""
    result = CliRunner().invoke(app, [str(each) for each in arguments], input=typed)
    assert result.exit_code == 0, (result.output, result.exception)
    return result


def refused(*arguments: object, typed: str = "") -> ParleyError:
    """The error with which a command is refused."""
    result = CliRunner().invoke(app, [str(each) for each in arguments], input=typed)
    assert isinstance(result.exception, ParleyError), (result.output, result.exception)
    return result.exception
