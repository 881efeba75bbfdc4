# SPDX-License-Identifier: Apache-2.0
"""What the site shows beyond the pages of this folder, and how it writes equations.

MkDocs calls the functions named ``on_...``. Files of the repository that are pages of the site are
listed in `pages`: the README and its like, notebooks (as committed, not run), experiments' sources.
Links to them work from any page; a link to another file of the repository becomes its text alone.
Equations become MathML while the site is built: no script, no other host, and one that is not
LaTeX fails the build.
"""

import ast
import html
import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

import latex2mathml.converter
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from nbconvert import MarkdownExporter

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs/"
TEXTS = {
    "README.md": "project/readme.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "CODE_OF_CONDUCT.md": "project/code_of_conduct.md",
    "examples/service/README.md": "project/service.md",
}
LINK = re.compile(r"(!?)\[([^]\[]*)]\(([^()\s#]+)(#[^()\s]*)?\)")
UNDONE = re.compile(r"\\|<mi>&</mi>")  # what the translator left of LaTeX that it does not know
CITED = re.compile(r"<code>docs/([\w/]+)\.md</code>")
EQUATION = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def pages() -> dict[str, str]:
    """Path in the repository to path in the site, of each page from outside this folder."""
    experiments = sorted(ROOT.glob("experiments/*.py"))
    notebooks = sorted(ROOT.glob("notebooks/*.ipynb"))
    return (
        TEXTS
        | {f"experiments/{path.name}": f"experiments/{path.stem}.md" for path in experiments}
        | {f"notebooks/{path.name}": f"notebooks/{path.stem}.md" for path in notebooks}
    )


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside, and the notebooks' pictures."""
    for origin, uri in pages().items():
        text, pictures = READ[Path(origin).suffix](ROOT / origin)
        files.append(File.generated(config, uri, content=text))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"{dirname(uri)}/{name}", content=picture))
    return files


def read_text(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a page that is one already."""
    return path.read_text(encoding="utf-8"), {}


def read_notebook(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook's text, code and outputs, and its pictures by name."""
    text, resources = MarkdownExporter().from_filename(str(path))
    pictures = {f"{path.stem}_{name}": data for name, data in resources["outputs"].items()}
    text = re.sub(r"!\[png]\(", f"![what the cell above draws]({path.stem}_", text)
    return text, pictures


def read_script(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a script's first line as title, the rest as it stands; not found by the search."""
    source = path.read_text(encoding="utf-8")
    title = (ast.get_docstring(ast.parse(source)) or path.stem).splitlines()[0].rstrip(".")
    place = path.relative_to(ROOT).as_posix()
    fence = "`" * 6
    text = f"# {title}\n\n`{place}`\n\n{fence}python\n{source}{fence}\n"
    return f"---\nsearch:\n  exclude: true\nhide: [toc]\n---\n{text}", {}


READ = {".md": read_text, ".ipynb": read_notebook, ".py": read_script}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links between pages of the repository to the site's pages."""
    origins = {uri: origin for origin, uri in pages().items()}
    uri = page.file.src_uri
    origin = origins.get(uri, DOCS + uri)
    return LINK.sub(lambda match: site_link(match, origin, uri), markdown)


def site_link(match: re.Match[str], origin: str, uri: str) -> str:
    """One link of the file ``origin`` as the page ``uri`` needs it."""
    picture, label, target, anchor = match.groups(default="")
    place = normpath(join(dirname(origin), target))
    if "://" in target or place.startswith("..") or not (ROOT / place).exists():
        return match[0]
    shown = place.startswith(DOCS) and (ROOT / place).is_file()
    inside = place.removeprefix(DOCS) if shown else pages().get(place)
    return f"{picture}[{label}]({relpath(inside, dirname(uri))}{anchor})" if inside else label


def on_page_content(html_text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write each equation as MathML; link pages that docstrings of the reference cite by file."""

    def linked(match: re.Match[str]) -> str:
        if not (ROOT / DOCS / f"{match[1]}.md").exists():
            raise ValueError(f"{page.url} cites {match[0]}, which does not exist")
        return f'<a href="{relpath(match[1], page.url)}/">{match[0]}</a>'

    html_text = EQUATION.sub(mathml, html_text)
    return CITED.sub(linked, html_text) if page.url.startswith("api/") else html_text


def mathml(match: re.Match[str]) -> str:
    """One equation; functions and relations get the space that LaTeX gives them."""
    latex = html.unescape(match[2]).strip()
    spaced = re.sub(r"\\(ln|log|exp)(?=\s*[\\\w])", r"\\\1\\,", latex).replace(r"\sim", "∼")
    display = "block" if match[1] == "div" else "inline"
    written = latex2mathml.converter.convert(spaced, display=display).replace(
        "<mi>∼</mi>", "<mo>∼</mo>"
    )
    if UNDONE.search(written):
        raise ValueError(f"LaTeX that is not understood: {latex}")
    return written
