"""Make `python.ipynb`, the executed notebook of the page `python.md`.

Run `python docs/notebook.py` in a clone after a change of the page. It needs `nbclient` and
`ipykernel`.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

PAGE = Path(__file__).with_name("python.md")
NOTEBOOK = PAGE.with_suffix(".ipynb")
BLOCK = re.compile(r"(?:<!-- not run[^\n]*\n)?^```(\w+)\n(.*?)^```\n", re.M | re.S)
SAVED = re.compile(r"^(retrieval\.plot\..*)\.savefig\(.*\)$", re.M)


def cells(page: str) -> list[tuple[str, str]]:
    """Return the cells of a page's notebook as ("markdown" or "code", source).

    Shown output is left out, because the notebook has its own. A figure ends its cell instead of
    being saved, so that the notebook shows it.
    """
    parts: list[tuple[str, str]] = []
    end = 0
    for match in BLOCK.finditer(page):
        parts.append(("markdown", page[end : match.start()]))
        end = match.end()
        if match[1] == "python":
            pieces = re.split(r"(?<=\n)(?=%cut)", SAVED.sub(r"\1\n%cut", match[2]))
            parts += [("code", piece.removeprefix("%cut\n")) for piece in pieces]
        elif match[1] != "text":
            parts.append(("markdown", match[0]))
    parts.append(("markdown", page[end:]))
    return [(kind, source.strip()) for kind, source in parts if source.strip()]


def main() -> None:
    """Execute the page in an empty folder and write the notebook."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.v4.new_notebook()
    for number, (kind, source) in enumerate(cells(PAGE.read_text(encoding="utf-8"))):
        cell = getattr(nbformat.v4, f"new_{kind}_cell")(source, id=f"cell-{number}")
        notebook.cells.append(cell)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the times of the machine
        # a progress bar or a warning of the machine is nothing to show
        cell.outputs = [o for o in cell.get("outputs", []) if o.get("name") != "stderr"]
        if cell.cell_type == "markdown":
            del cell["outputs"]
    notebook.metadata = {"kernelspec": notebook.metadata.get("kernelspec", {})}
    nbformat.write(notebook, NOTEBOOK)


if __name__ == "__main__":
    main()
