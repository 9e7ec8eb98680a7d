"""`retrieval doctor`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from retrieval.cli import say

if TYPE_CHECKING:
    from retrieval.cli.examine import Examination


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def doctor(as_json: bool) -> None:
    """Say what is installed, what each library sees, what will run where, and what to mend.

    Leaves with exit code 2 if something is wrong.

    Example:  retrieval doctor --json
    """
    from retrieval.cli.examine import examine

    found = examine()
    say(found.as_json() if as_json else _text(found))
    if found.faults:
        sys.exit(2)


def _text(found: Examination) -> str:
    wide = max(len(library.name) for library in found.libraries)
    lines = [found.system, "", "Libraries"]
    for library in found.libraries:
        extras = f"  ({', '.join(library.extras)})" if library.extras else ""
        have = library.installed or "not installed"
        lines.append(f"  {library.name:{wide}}  {have:14}  needs {library.needed}{extras}")
    lines += ["", "Devices", *(f"  {name}" for name in found.driver or ["no CUDA device"])]
    lines += [
        "",
        "What runs where",
        *(f"  {what:8}  {where}" for what, where in found.runs.items()),
    ]
    if not found.runs:
        lines.append("  nothing yet: install the extras cpu (or gpu), and train or serve")
    for title, sentences in (("To mend", found.faults), ("Notes", found.notes)):
        if sentences:
            lines += ["", title, *(f"  - {sentence}" for sentence in sentences)]
    if not found.faults:
        lines += ["", "All is well."]
    return "\n".join(lines)
