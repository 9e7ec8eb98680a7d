"""The documentation builds without a warning, and reaches every page."""

import html
import inspect
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
import retrieval

METHODS = {"metrics": 5, "aml": 13, "anml": 4, "oahu": 1, "daml": 3}
"""Pages with formulas, and how many there are at least."""


def test_every_page_is_in_the_contents(root):
    text = (root / "docs" / "index.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^[a-z]+$", text, re.M)) == {
        page.stem for page in (root / "docs").glob("*.md")
    } - {"index"}
    assert set(re.findall(r"^generated/([a-z]+)$", text, re.M)) == {"recipe", "plugins", "hooks"}


@pytest.fixture(scope="module")
def site(root, tmp_path_factory):
    """The built site; a warning is an error."""
    for module in ("sphinx", "myst_parser", "furo", "math_core"):
        pytest.importorskip(
            module, reason="the documentation needs pip install 'embedding-retrieval[docs]'"
        )
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-b", "html"]
    command += ["-d", str(folder / "trees"), str(root / "docs"), str(folder / "html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_sphinx_has_no_warning(root, site):
    page = html.unescape((site / "benchmarks.html").read_text(encoding="utf-8"))
    for result in (root / "benchmarks" / "results").glob("*.md"):
        title = re.search(r"^# (.+)$", result.read_text(encoding="utf-8"), re.M)
        assert title
        assert title[1].split("`")[0].strip() in page


class Loads(HTMLParser):
    """What a page makes a browser load: every `src`, and the `href` of what is not a link to
    follow.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        links = ("canonical", "search", "index", "next", "prev")
        passive = tag in ("a", "area") or given.get("rel") in links
        names = ("src", "srcset", "data", "poster", *(() if passive else ("href", "xlink:href")))
        self.found += [value for name in names if (value := given.get(name))]
        self.found += re.findall(r"url\(([^)]*)\)", given.get("style") or "")


def elsewhere(page: str) -> list[str]:
    parser = Loads()
    parser.feed(page)
    return [target for target in parser.found if re.match(r"\s*['\"]?(?:[a-z]+:)?//", target, re.I)]


def test_the_site_loads_nothing_from_another_host(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    assert {
        p.name: found for p in pages if (found := elsewhere(p.read_text(encoding="utf-8")))
    } == {}
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        assert not re.search(
            r"(?:@import\s+|url\()\s*(?:url\()?['\"]?(?:[a-z]+:)?//", text, re.I
        ), sheet.name


@pytest.mark.parametrize(("method", "least"), METHODS.items())
def test_formulas_are_typeset(root, site, method, least):
    built = (site / f"{method}.html").read_text(encoding="utf-8")
    assert built.count("<math") >= least and built.count("<math") == built.count("</math>")
    assert "$$" not in built
    source = (root / "docs" / f"{method}.md").read_text(encoding="utf-8")
    for block in re.findall(r"^```text\n(.*?)^```", source, re.M | re.S):
        assert not re.search("[Σ‖∇√≤≥]", block), f"{method}.md has a formula as text: {block}"


def test_every_name_of_the_face_has_an_entry(root, site):
    source = (root / "docs" / "api.md").read_text(encoding="utf-8")
    parts = re.split(r"^\.\. currentmodule:: (\S+)$", source, flags=re.M)
    named: dict[str, set[str]] = {}
    for module, text in zip(parts[1::2], parts[2::2], strict=True):
        entries = re.findall(r"^\.\. (?:auto\w+|py:data):: (?!retrieval\.)(\w+)$", text, re.M)
        named.setdefault(module, set()).update(entries)
    elsewhere = {"errors", "plot", "plugin", "results"}
    assert named["retrieval"] == set(dir(retrieval)) - elsewhere
    _, _, helpers = source.partition("## Helpers for plugins' authors")
    in_table = set(re.findall(r"`(\w+)`", helpers)) & set(retrieval.plugin.__all__)
    assert named["retrieval.plugin"] | in_table == set(retrieval.plugin.__all__)
    assert named["retrieval.results"] == set(retrieval.results.__all__) - {"Stats"}
    classes = {name: item for name, item in vars(retrieval.errors).items() if inspect.isclass(item)}
    raised = {name for name, item in classes.items() if issubclass(item, Exception)}
    assert named["retrieval.errors"] == raised
    functions = re.findall(r"^\.\. autofunction:: retrieval\.plot\.(\w+)$", source, re.M)
    assert sorted(functions) == retrieval.plot.__all__
    built = html.unescape((site / "api.html").read_text(encoding="utf-8"))
    for name in dir(retrieval):
        text = " ".join((inspect.getdoc(getattr(retrieval, name)) or "").split())
        shown = " ".join(re.sub("<[^>]*>", "", built).split())
        if inspect.isclass(getattr(retrieval, name)) or inspect.isfunction(
            getattr(retrieval, name)
        ):
            first = (
                text.partition(". ")[0].rstrip(".").replace("`", "").split(" (")[0].split(":")[0]
            )
            assert first and first.replace("'", "’") in shown.replace("'", "’"), f"{name}: {first}"


def test_each_page_has_a_markdown_twin_which_llms_txt_lists(root, site):
    text = (site / "llms.txt").read_text(encoding="utf-8")
    listed = re.findall(r"^- \[.+?\]\((\S+\.md)\)", text, re.M)
    pages = {page.name for page in (root / "docs").glob("*.md")} - {"index.md"}
    assert pages <= set(listed) and "generated/plugins/losses.md" in listed
    for target in listed:
        text = (site / target).read_text(encoding="utf-8")
        assert text.startswith("# ") and (site / target).with_suffix(".html").is_file(), target
        assert not re.search(r"^(```\{(eval-rst|toctree|include)|\.\. auto)", text, re.M), target
    twin = (site / "api.md").read_text(encoding="utf-8")
    assert "### retrieval.train(recipe: " in twin and "#### Index.search(" in twin
    assert "Train a recipe into a run's folder" in twin
    assert "MAP@R" in (site / "benchmarks.md").read_text(encoding="utf-8")  # files are included
    assert (site / "researcher.md").read_text(encoding="utf-8").count("`my_loss.py`:\n") == 1
