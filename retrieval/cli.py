"""The command line: finds commands when they are called, and turns errors into sentences and exit codes.

Exit codes: 0 done; 2 the user's mistake (one sentence on stderr, no traceback); 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import sys

import click

from retrieval import __version__
from retrieval.errors import PluginError, RetrievalError, did_you_mean

COMMANDS = {
    "demo": "demo:demo",
    "plugins": "plugins:plugins",
    "check": "train:check",
    "train": "train:train",
    "evaluate": "evaluate:evaluate",
    "export": "export:export_command",
    "index": "serving:index_command",
    "search": "serving:search_command",
    "serve": "serving:serve_command",
}


class App(click.Group):
    """A group whose commands are imported when they are called; plugins are loaded only for commands of theirs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Built-in commands in the order of use, then those of plugins."""
        self._add_plugin_commands(required=False)
        return [*COMMANDS, *sorted(set(self.commands) - set(COMMANDS))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command by name."""
        if cmd_name in COMMANDS:
            module, _, name = COMMANDS[cmd_name].partition(":")
            command: click.Command = getattr(importlib.import_module(f"retrieval.commands.{module}"), name)
            return command
        self._add_plugin_commands(required=True)
        if cmd_name not in self.commands:
            raise click.UsageError(
                f"There is no command '{cmd_name}'.{did_you_mean(cmd_name, [*COMMANDS, *self.commands])}", ctx
            )
        return self.commands[cmd_name]

    def _add_plugin_commands(self, *, required: bool) -> None:
        from retrieval.plugins import load_plugins

        try:
            load_plugins().hook.retrieval_commands(app=self)
        except PluginError as error:
            if required:
                raise
            click.echo(f"Note: {error}", err=True)
        clash = [name for name in self.commands if name in COMMANDS]
        if clash:
            raise PluginError(
                f"A plugin adds the command '{clash[0]}', which is built in. It must take another name."
            )


@click.group(cls=App, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="retrieval")
def app() -> None:
    """Find the same thing in other pictures: train an embedding, export it, index it, serve image search.

    Start with:  retrieval demo
    """


def main() -> None:
    """Run the command line and exit."""
    try:
        # Click gives the command's own return value, or an exit code for --help and --version.
        app(standalone_mode=False)
    except RetrievalError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(130 if type(error).__name__ == "Interrupted" else 2)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted.", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(0)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("retrieval"):
            raise
        click.echo(
            f"Error: this command needs {error.name}, which is not installed. Install it: {_extra_for(error.name or '')}",
            err=True,
        )
        sys.exit(2)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        click.echo(f"Error: {error.filename or 'a file'} cannot be written: {error.strerror}.", err=True)
        sys.exit(2)


def _extra_for(module: str) -> str:
    root = module.partition(".")[0]
    extras = {
        "faiss": "cpu",
        "onnxruntime": "cpu",
        "starlette": "serve",
        "uvicorn": "serve",
        "multipart": "serve",
        "timm": "timm",
    }
    return f"pip install 'retrieval[{extras.get(root, 'train')}]'."


if __name__ == "__main__":
    main()
