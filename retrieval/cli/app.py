"""The command `retrieval`: imports commands when they are called, and prints errors as sentences.

Exit codes: 0 success, 1 `data check` has findings or a metric is below its target, 2 an error (one
sentence on stderr, without a traceback), 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from pkgutil import resolve_name
from typing import Any

import click

from retrieval.base.lazy import how_to_have
from retrieval.cli.common import Group
from retrieval.errors import PluginError, RetrievalError, printable

COMMANDS = {
    "demo": "demo:demo",
    "plugins": "plugins:plugins",
    "check": "train:check",
    "train": "train:train",
    "evaluate": "evaluate:evaluate_command",
    "compare": "compare:compare",
    "sweep": "compare:sweep",
    "export": "export:export_command",
    "embed": "embed:embed_command",
    "index": "index:index",
    "search": "search:search_command",
    "calibrate": "identify:calibrate_command",
    "identify": "identify:identify_command",
    "doctor": "doctor:doctor",
}


class App(Group):
    """A group that imports each command when it is called, and plugins only if they are needed."""

    _loaded = False  # whether plugins have been asked for their commands

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.locations: dict[str, str] = {}
        """Commands of plugins that are imported when they are called, as `MODULE:NAME`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the built-in commands as `COMMANDS` orders them, then those of plugins by name."""
        try:
            self._add_plugin_commands()
        except RetrievalError as error:  # a broken plugin must not break --help
            click.echo(printable(f"Note: {error}"), err=True)
        return [*COMMANDS, *self.locations, *sorted(self.commands)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command by name."""
        if cmd_name in COMMANDS:
            return _imported(f"retrieval.cli.{COMMANDS[cmd_name]}")
        try:
            self._add_plugin_commands()
        except RetrievalError:
            # `serve` must start beside a broken plugin that it does not need.
            if cmd_name not in self.locations:
                raise
        if cmd_name in self.locations:
            return _imported(self.locations[cmd_name])
        return super().get_command(ctx, cmd_name)

    def add_location(self, name: str, location: str) -> None:
        """Add a plugin's command by its location `MODULE:NAME`; a call of it imports the module.

        Raises:
            PluginError: a command of that name exists already.
        """
        self._refuse_clash(name, location.partition(":")[0])
        self.locations[name] = location

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a plugin's command.

        Raises:
            PluginError: a command of that name exists already.
        """
        name = name or cmd.name or ""
        self._refuse_clash(name, getattr(cmd.callback, "__module__", "a plugin"))
        super().add_command(cmd, name)

    def _refuse_clash(self, name: str, module: str) -> None:
        """Raise a PluginError if another command has the name of a module's command."""
        if name in COMMANDS:
            clash = "which is built in"
        elif name in self.locations:
            clash = f"as {self.locations[name].partition(':')[0]} does"
        elif name in self.commands:
            clash = f"as {getattr(self.commands[name].callback, '__module__', 'another')} does"
        else:
            return
        raise PluginError(
            f"{module} adds the command '{name}', {clash}. The plugin must give its command another"
            " name."
        )

    def _add_plugin_commands(self) -> None:
        from retrieval.host.plugins import load_plugins

        if self._loaded:
            return
        # set first, so that a broken plugin is reported once, not at every look-up of a command
        self._loaded = True
        # Ours first: their commands are there whatever another distribution's plugin does.
        for bundled in (True, False):
            load_plugins(bundled=bundled).notify("retrieval_commands", app=self)


def _imported(location: str) -> click.Command:
    command: click.Command = resolve_name(location)
    return command


def _print_version(ctx: click.Context, param: click.Parameter, is_set: bool) -> None:
    if is_set:
        from retrieval.base.runtime import installed_version

        click.echo(f"retrieval, version {installed_version()}")
        ctx.exit()


@click.group(
    cls=App,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
        "show_default": True,
    },
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
@click.option("--debug", is_flag=True, help="Show the traceback of errors.")
@click.pass_context
def app(ctx: click.Context, debug: bool) -> None:
    """Image search from training to serving: train an embedding, export it, index images, and serve
    the search.

    Start with:  retrieval demo
    """
    from retrieval.base.runtime import quiet_threads

    quiet_threads()  # before a command imports FAISS or torch
    if ctx.obj is not None:
        ctx.obj["debug"] = debug


def main() -> None:
    """Run the command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        # print "?" instead of failing for characters that the terminal cannot show
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    settings: dict[str, bool] = {}
    try:
        app(prog_name="retrieval", standalone_mode=False, obj=settings)
        sys.stdout.flush()
    except RetrievalError as error:
        if settings.get("debug"):
            click.echo(printable("".join(traceback.format_exception(error))), err=True)
        _leave(f"Error: {error}", error.exit_code)
    except click.ClickException as error:
        message = io.StringIO()
        error.show(message)
        # the message repeats what the user typed
        click.echo(printable(message.getvalue()), err=True, nl=False)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _leave("Interrupted.", 130)
    except BrokenPipeError:  # an OSError, so it comes before these
        # the reader (`head`, a pager) has quit; discard the buffered output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except ModuleNotFoundError as error:
        # a missing module of our own is our mistake, which needs its traceback
        if (error.name or "").startswith("retrieval"):
            raise
        _leave(f"Error: this command needs {error.name}, {how_to_have(error.name or '')}", 2)
    except OSError as error:
        if not error.strerror:
            raise
        subject = "a file or connection failed"
        if error.filename:
            subject = f"{error.filename} cannot be used"
        _leave(f"Error: {subject}: {error.strerror}.", 2)


def _leave(sentence: str, exit_code: int) -> None:
    click.echo(printable(sentence), err=True)
    sys.exit(exit_code)
