"""The documentation builds without a warning, and contains every page and public name."""

import html
import inspect
import re
import subprocess
import sys

import pytest
import retrieval
import retrieval.helpers


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
        pytest.importorskip(module, reason="needs pip install 'embedding-retrieval[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-b", "html"]
    command += ["-d", str(folder / "trees"), str(root / "docs"), str(folder / "html")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_the_site_builds_and_includes_every_result(root, site):
    page = html.unescape((site / "benchmarks.html").read_text(encoding="utf-8"))
    for result in (root / "benchmarks" / "results").glob("*.md"):
        title = result.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        assert title.split("`")[0].strip() in page


def elsewhere(page: str) -> list[str]:
    """Return the addresses that a page makes a browser load from another host.

    These are every `src`, every `href` that is not a link to follow, and addresses in styles.
    """
    from bs4 import BeautifulSoup  # Furo needs it too

    links, targets = {"canonical", "search", "index", "next", "prev"}, []
    for tag in BeautifulSoup(page, "html.parser").find_all(True):
        passive = tag.name in ("a", "area") or links & set(tag.get("rel", []))
        names = ("src", "srcset", "data", "poster", *(() if passive else ("href", "xlink:href")))
        targets += [tag[name] for name in names if name in tag.attrs]
        targets += re.findall(r"url\(['\"]?([^)]*)", tag.get("style", ""))
    return [target for target in targets if re.match(r"\s*(?:[a-z]+:)?//", target, re.I)]


def test_the_site_loads_nothing_from_another_host(site):
    assert elsewhere('<img src="https://x/y">') and elsewhere('<p style="b:url(//x/y)">')
    pages = [page.read_text(encoding="utf-8") for page in site.rglob("*.html")]
    assert len(pages) > 20
    assert [target for page in pages for target in elsewhere(page)] == []
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        distant = r"(?:@import\s+|url\()\s*(?:url\()?['\"]?(?:[a-z]+:)?//"
        assert not re.search(distant, text, re.I), sheet.name


@pytest.mark.parametrize(
    ("method", "least"), [("metrics", 5), ("aml", 13), ("anml", 4), ("oahu", 1), ("daml", 3)]
)
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
    assert named["retrieval"] == set(dir(retrieval)) - {"errors", "plot", "plugin", "results"}
    _, _, below = source.partition("## Helpers for plugins' authors")
    for_authors, _, bundled = below.partition("## Helpers of the bundled plugins")
    in_table = set(re.findall(r"`(\w+)`", for_authors)) & set(retrieval.plugin.__all__)
    assert named["retrieval.plugin"] | in_table == set(retrieval.plugin.__all__)
    helpers = set(retrieval.helpers.__all__)
    assert set(re.findall(r"`(\w+)`", bundled)) & helpers == helpers
    assert named["retrieval.results"] == set(retrieval.results.__all__) - {"Stats"}
    errors = vars(retrieval.errors).items()
    raised = {n for n, item in errors if inspect.isclass(item) and issubclass(item, Exception)}
    assert named["retrieval.errors"] == raised
    functions = re.findall(r"^\.\. autofunction:: retrieval\.plot\.(\w+)$", source, re.M)
    assert sorted(functions) == retrieval.plot.__all__
    built = re.sub("<[^>]*>", "", (site / "api.html").read_text(encoding="utf-8"))
    built = plain(html.unescape(built))
    for name in dir(retrieval):
        item = getattr(retrieval, name)
        if inspect.isclass(item) or inspect.isfunction(item):
            sentence = plain(inspect.getdoc(item) or "").partition(". ")[0].rstrip(".")
            first = re.split(r" \(|:", sentence)[0]
            assert first and first in built, f"{name}: {first}"


def plain(text: str) -> str:
    """Return a text on one line, with the quotes that Sphinx writes."""
    return " ".join(text.split()).replace("`", "").replace("'", "’")


def test_each_page_has_a_markdown_twin(root, site):
    text = (site / "llms.txt").read_text(encoding="utf-8")
    skill = re.search(r"^From photos .*: (\S+)$", text, re.M)[1]
    assert (site / skill).read_text("utf-8") == (root / "docs" / skill).read_text("utf-8")
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
