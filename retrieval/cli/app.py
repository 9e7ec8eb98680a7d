"""The command `retrieval`: imports commands when they are called, and prints errors as sentences.

Exit codes: 0 success, 1 `data check` has findings, 2 an error (one sentence on stderr, without a
traceback), 130 interrupted.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from importlib import import_module

import click

from retrieval.cli.common import Group
from retrieval.errors import PluginError, RetrievalError, printable
from retrieval.host.lazy import how_to_have

COMMANDS = {
    "demo": "demo:demo",
    "plugins": "plugins:plugins",
    "init": "train:init",
    "data": "data:data",
    "check": "train:check",
    "train": "train:train",
    "evaluate": "evaluate:evaluate",
    "compare": "compare:compare",
    "sweep": "compare:sweep",
    "distill": "train:distill",
    "report": "evaluate:report",
    "export": "export:export_command",
    "embed": "index:embed_command",
    "index": "index:index",
    "search": "serving:search_command",
    "serve": "serving:serve_command",
    "keys": "serving:keys",
    "push": "serving:push_command",
    "doctor": "doctor:doctor",
}


class App(Group):
    """A group that imports each command when it is called, and plugins only if they are needed."""

    _loaded = False  # whether plugins have been asked for their commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the built-in commands as `COMMANDS` orders them, then those of plugins by name."""
        try:
            self._add_plugin_commands()
        except RetrievalError as error:  # a broken plugin must not break --help
            click.echo(printable(f"Note: {error}"), err=True)
        return [*COMMANDS, *sorted(self.commands)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command by name."""
        if cmd_name in COMMANDS:
            module, _, name = COMMANDS[cmd_name].partition(":")
            built_in: click.Command = getattr(import_module(f"retrieval.cli.{module}"), name)
            return built_in
        self._add_plugin_commands()
        return super().get_command(ctx, cmd_name)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a plugin's command.

        Raises:
            PluginError: a command of that name exists already.
        """
        name = name or cmd.name or ""
        module = getattr(cmd.callback, "__module__", "a plugin")
        if name in COMMANDS or name in self.commands:
            clash = "which is built in"
            if name in self.commands:
                clash = f"as {getattr(self.commands[name].callback, '__module__', 'another')} does"
            raise PluginError(
                f"{module} adds the command '{name}', {clash}. The plugin must give its command"
                " another name."
            )
        super().add_command(cmd, name)

    def _add_plugin_commands(self) -> None:
        from retrieval.host.plugins import load_plugins

        if self._loaded:
            return
        self._loaded = True
        load_plugins().notify("retrieval_commands", app=self)


def _print_version(ctx: click.Context, param: click.Parameter, is_set: bool) -> None:
    if is_set:
        from retrieval.host.version import installed_version

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
    from retrieval.serving.runtime import quiet_threads

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
        shown = io.StringIO()
        error.show(shown)
        # the message repeats what the user typed
        click.echo(printable(shown.getvalue()), err=True, nl=False)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _leave("Interrupted.", 130)
    except BrokenPipeError:
        # the reader (`head`, a pager) has quit; discard the buffered output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("retrieval"):
            raise
        _leave(f"Error: this command needs {error.name}, {how_to_have(error.name or '')}", 2)
    except OSError as error:
        if not error.strerror:
            raise
        what = (
            f"{error.filename} cannot be used" if error.filename else "a file or connection failed"
        )
        _leave(f"Error: {what}: {error.strerror}.", 2)


def _leave(sentence: str, exit_code: int) -> None:
    click.echo(printable(sentence), err=True)
    sys.exit(exit_code)
