"""A hook of MkDocs: links that leave docs/ lead to pages of the site that show the file.

    [examples/what_if.py](../examples/what_if.py)       on GitHub: the file
                                                        in the site: repository/examples/what_if.py.md, made here

A file that a page links to becomes a page of its own, outside of the navigation: Markdown is shown as it reads, any
other text as a code block. Pages so made may link on. The links in docs/ stay as they are, so that they work on GitHub,
and the site needs no address of a repository.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
SHOWN = "repository/"  # where in the site the files of the repository are
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)#\s]+)")  # the path of a Markdown link, without its anchor
FENCE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file outside of docs/ that a page links to, whether directly or through such a page."""
    waiting = [file.src_uri for file in files.documentation_pages()]
    while waiting:
        origin = _repository_path(waiting.pop())
        for target in _targets((ROOT / origin).read_text(encoding="utf-8"), origin):
            uri = _site_uri(target)
            if uri.startswith(SHOWN) and files.get_file_from_path(uri) is None and (ROOT / target).is_file():
                content = _shown(target)
                files.append(
                    File.generated(config, uri, content=content, inclusion=InclusionLevel.NOT_IN_NAV)
                )
                waiting.append(uri)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The text of a page, with every link that crosses the border of docs/ as one inside of the site."""
    origin = _repository_path(page.file.src_uri)
    if not origin.endswith(".md"):
        return markdown

    def inside(match: re.Match[str]) -> str:
        uri = _site_uri(_target(match[1], origin))
        if not uri.startswith(SHOWN) and not page.file.src_uri.startswith(SHOWN):
            return match[1]
        return posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".")

    pieces, end = [], 0
    for fence in FENCE.finditer(markdown):
        pieces += [LINK.sub(inside, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*pieces, LINK.sub(inside, markdown[end:])])


def _targets(text: str, origin: str) -> Iterator[str]:
    """The paths in the repository that a Markdown file links to; other files link to nothing."""
    if origin.endswith(".md"):
        for match in LINK.finditer(FENCE.sub("", text)):
            yield _target(match[1], origin)


def _target(link: str, origin: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(origin), link))


def _site_uri(path: str) -> str:
    """Where in the site a file of the repository is; `_repository_path` is its inverse."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return SHOWN + (path if path.endswith(".md") else f"{path}.md")


def _repository_path(uri: str) -> str:
    if not uri.startswith(SHOWN):
        return f"docs/{uri}"
    path = uri.removeprefix(SHOWN)
    return path if (ROOT / path).is_file() else path.removesuffix(".md")


def _shown(path: str) -> str:
    """The Markdown of the page that shows a file."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return text
    language = {".py": "python", ".toml": "toml"}.get(PurePosixPath(path).suffix, "text")
    return f"# {path}\n\n````{language}\n{text}````\n"
