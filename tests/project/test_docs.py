"""The documentation tells the truth: its links lead somewhere, its lists are complete, its words are plain."""

from __future__ import annotations

import importlib
import inspect
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

import pytest
from torch.utils.data import DataLoader as TorchLoader

import minato
from tests.project.pages import FENCE, PAGES, ROOT, name_of, slug
from tests.project.test_layering import dotted
from tests.project.test_sourcecode import exported, parse

PACKAGE = ROOT / "minato"
MAP = (PACKAGE / "README.md").read_text(encoding="utf-8")
INTERNAL_SOURCES = {"connections", "sql"}
"""Modules of ``minato.sources`` of whose names users need some at most."""


def outside_of_blocks(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the built documentation name them."""
    return set(map(slug, re.findall(r"^#+ (.*)$", outside_of_blocks(page), re.MULTILINE)))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", outside_of_blocks(page)):
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tables_begin_after_an_empty_line(page: Path) -> None:
    """A table that follows a line of a paragraph or a list belongs to it: it is shown as text."""
    text = outside_of_blocks(page)
    assert re.findall(r"^(?!\|).+\n\|.*\n\| ?-.*$", text, re.MULTILINE) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_named_tests_exist(page: Path) -> None:
    file, text = "", page.read_text(encoding="utf-8")
    for found, name in re.findall(r"`(?=t|::)(tests/[\w/]+\.py)?(?:::(\w+))?`", text):
        file = found or file
        assert (ROOT / file).exists(), file
        assert not name or f"def {name}(" in (ROOT / file).read_text("utf-8"), f"{file}::{name}"


def test_map_of_the_package_names_every_file_once() -> None:
    tree = MAP.partition("## The tree")[2].partition("\n## ")[0]
    # The package of each stage says itself what it is for; those of the core pick one of two forms.
    unnamed = {"X.py", "_X_c.pyx", "_X_py.py", "__init__.py"}
    kinds = {".py", ".pyx", ".pxd", ".h"}
    files = [path.name for path in PACKAGE.rglob("*") if path.suffix in kinds]
    unnamed |= {name for name in files if re.fullmatch(r"_\w+_(c|py)\.(pyx|py)", name)}
    named = Counter(re.findall(r"[\w]+\.(?:pyx|pxd|py|h)\b", tree))
    there = Counter(files)
    assert {name: n for name, n in (named - there).items() if name not in unnamed} == {}
    assert {name: n for name, n in (there - named).items() if name not in unnamed} == {}


def test_map_of_the_package_points_at_what_is_there() -> None:
    _, _, table = MAP.partition("## I want to change")
    paths = set(re.findall(r"`([\w/-]+(?:\.py|\.md|/))`", table))
    assert len(paths) > 20
    assert [path for path in paths if not any((at / path).exists() for at in (ROOT, PACKAGE))] == []


def reference(name: str) -> str:
    return (ROOT / f"docs/reference/{name}.md").read_text(encoding="utf-8")


def test_every_option_is_documented() -> None:
    ours = inspect.signature(minato.DataLoader).parameters
    theirs = inspect.signature(TorchLoader).parameters
    listed, _, _ = reference("options").partition("<!-- end -->")
    assert re.findall(r"^`(\w+)`: .*\n: ", listed, re.MULTILINE) == [
        name for name in ours if name not in theirs
    ]


def test_every_public_name_is_in_the_reference_once() -> None:
    public = {f"minato.{name}" for name in minato.__all__ if name != "__version__"}
    errors = importlib.import_module("minato.errors").__all__
    public -= {f"minato.{name}" for name in errors}  # one directive has them all
    files = [*(PACKAGE / "sources").glob("[a-z]*.py"), PACKAGE / "caching.py"]
    files += [PACKAGE / f"integrations/{name}.py" for name in ("transformers", "lightning")]
    for path in files:
        # Not by an import: these packages are large.
        if path.stem not in INTERNAL_SOURCES:
            public |= {f"{dotted(path)}.{name}" for name in exported(parse(path)) or ()}
    text = "\n".join(reference(path.stem) for path in (ROOT / "docs/reference").glob("*.md"))
    directive = r"^\.\. auto(?:class|function|data|exception):: ([\w.]+)$"
    shown = re.findall(directive, text, re.MULTILINE)
    assert len(shown) == len(set(shown)), Counter(shown).most_common(3)
    assert sorted(public - set(shown)) == []
    assert text.count(".. automodule:: minato.errors") == 1


def test_every_environment_variable_is_documented() -> None:
    sources = [ROOT / "setup.py", *PACKAGE.rglob("*.py")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    used = set(re.findall(r"\bMINATO_[A-Z_]+[A-Z]\b", text))
    assert set(re.findall(r"^\| `(\w+)` \|", reference("environment"), re.MULTILINE)) == used


OLD_WORDS = {
    r"anew": "again, new",
    r"burials?": "recovery",
    r"dearer|dearest": "more expensive, most expensive",
    r"(?:was|were|is|are) foretold|foretel\w*|foretold|foresight": "predict, prediction",
    r"for ever": "forever, without limit",
    r"in line": "in the main process",
    r"lenien\w*": "retry",
    r"main memory": "host memory",
    r"of late": "recently",
    r"page-locked": "pinned",
    r"parcels?": "batch descriptor",
    r"put(?:s|ting)? by|sets? aside|setting aside": "defer",
    r"roster\w*": "active workers",
    r"shall": "must, will, or the present tense",
    r"so many": "that number of",
    r"(?:is|are|was|were|been|be) told": "get, receive",
    r"the least and the greatest": "minimum and maximum, range",
    r"truth values?": "bool",
    r"(?-i:[Tt]wins?)": "compiled and pure backend",
    r"under way": "in flight, running",
    r"whoever": "the process that, the worker that",
}
"""Words and phrases that must not return, and what to write instead."""
PLAIN = [
    *(page for page in PAGES if page.name != "glossary.md"),
    *(
        path
        for folder in ("bench", "demo", "docs", "minato")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".pyx", ".pxd", ".pyi", ".h")
    ),
]
"""Files whose prose follows the glossary."""
PROSE = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", None)}


def prose(path: Path) -> list[tuple[int, str]]:
    """``(line, text)`` of a page, or of the comments and strings of a source file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".md", ".h"):
        return [(1, text)]
    parts: list[tuple[int, str]] = []
    end, kind = 0, None
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in PROSE:
            continue
        if kind == token.type == tokenize.COMMENT and token.start[0] == end + 1:
            line, before = parts[-1]  # a comment of several lines
            parts[-1] = (line, f"{before}\n{token.string.lstrip('# ')}")
        else:
            parts.append((token.start[0], token.string))
        end, kind = token.end[0], token.type
    return parts


def old_words(parts: list[tuple[int, str]]) -> list[str]:
    words = {
        re.compile(r"\b(?:" + old.replace(" ", r"\s+") + r")\b", re.IGNORECASE): instead
        for old, instead in OLD_WORDS.items()
    }
    any_of_them = re.compile("|".join(word.pattern for word in words), re.IGNORECASE)
    found = []
    for line, text in parts:
        flat = re.sub(r"\s", " ", text)
        for word, instead in words.items() if any_of_them.search(flat) else ():
            for match in word.finditer(flat):
                at = line + text.count("\n", 0, match.start())
                found.append(f"line {at}: {match[0]!r}; write {instead}")
    return found


def test_old_words_do_not_return() -> None:
    assert {name_of(path): old for path in PLAIN if (old := old_words(prose(path)))} == {}


def test_old_words_are_found_across_lines(tmp_path: Path) -> None:
    page, source = tmp_path / "page.md", tmp_path / "source.py"
    page.write_text("\nIt is\ntold anew.")
    source.write_text("anew = [1 for x in line]\n# a comment that is\n# told\nx = 'shall'\n")
    assert sorted(each.partition(":")[0] for each in old_words(prose(page))) == ["line 2", "line 3"]
    assert sorted(old_words(prose(source))) == [
        "line 2: 'is told'; write get, receive",
        "line 4: 'shall'; write must, will, or the present tense",
    ]


def test_glossary_defines_each_word_once() -> None:
    entries = re.findall(r"^(\S.*)\n: (.+(?:\n  .+)*)$", reference("glossary"), re.MULTILINE)
    words = [word for word, _ in entries]
    assert 40 <= len(words) == len(set(words))
    assert [word for word, meaning in entries if not re.search(r"\]\(\S+\)$", meaning)] == []


LONG_WORDS = 25
LISTS = r"\s*(?:[*:>-]|\d+\.|#+) "
"""How an item, a definition, a quotation or a heading begins."""


def sentences(text: str) -> list[str]:
    """The sentences of a page. What is code, a table or markup is none; an item and a definition end one."""
    text = FENCE.sub("\n\n", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL))
    text = re.sub(r"^(?: {4}|\||<).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"`+[^`]*`+", "`code`", text)
    found = []
    for part in re.split(rf"\n\s*\n|\n(?={LISTS})", text):
        flat = " ".join(part.split())
        found += re.split(r"(?<=[.!?])[\"*)\]]* (?=[\"*(\[`]*(?:[A-Z0-9]|code|minato|torch))", flat)
    return found


def test_no_sentence_is_long() -> None:
    pages = [page for page in PAGES if "docs" in page.parts or page == ROOT / "README.md"]
    assert [
        f"{name_of(page)}: {sentence}"
        for page in pages
        for sentence in sentences(page.read_text(encoding="utf-8"))
        if sum(bool(re.search(r"\w", word)) for word in sentence.split()) > LONG_WORDS
    ] == []


def test_sentences_are_told_apart() -> None:
    text = "# Title\n\nOne. `two`\nthree; (four.) [Five](six seven)\n\n* eight\n* nine\n\n| ten | eleven |\n"
    assert [len(each.split()) for each in sentences(text) if each] == [2, 1, 3, 1, 2, 2]
