"""The documentation agrees with the code, and its two languages with each other."""

import re
from functools import cache
from pathlib import Path

import pytest

from slime.utils.arguments.parser import Grammar
from slime.utils.arguments.upstream import load_tables

ROOT = Path(__file__).resolve().parents[3]
DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS / "en").as_posix() for path in (DOCS / "en").rglob("*.md"))
TEXTS = sorted([*DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md"), ROOT / "CONTRIBUTING.md"])
ROOMS = ("slime", "slime_plugins", "scripts", "tools", "tests", "docs", "examples")
REFERENCE = "arguments.md"  # lists every flag, and marks those that are not supported yet
# Of train.py before parsing, and of ray start, hf, docker, torchrun and pip.
OTHER_PROGRAMS = set("--help --head --local-dir --repo-type --gpus --ipc --network --ulimit --no-deps".split())
OTHER_PROGRAMS |= set("--nproc-per-node --nnodes --node-rank --master-addr --master-port".split())


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def code_blocks(text: str) -> list[str]:
    """Fenced blocks with their language, in order."""
    return re.findall(r"^```\w*\n.*?^```$", text, flags=re.DOTALL | re.MULTILINE)


def headings(text: str) -> list[int]:
    """Levels of the headings outside code, in order."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [len(marks) for marks in re.findall(r"^(#+) ", prose, flags=re.MULTILINE)]


def inline_code(text: str) -> list[str]:
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", prose)


def test_both_languages_have_the_same_pages():
    chinese = sorted(path.relative_to(DOCS / "zh").as_posix() for path in (DOCS / "zh").rglob("*.md"))
    assert chinese == PAGES and len(PAGES) >= 5


@pytest.mark.parametrize("page", PAGES)
def test_both_languages_say_the_same(page):
    """Same headings, same code, same number of table rows, and every flag of one page is on the other."""
    english, chinese = (text_of(DOCS / language / page) for language in ("en", "zh"))
    assert headings(chinese) == headings(english)
    assert code_blocks(chinese) == code_blocks(english)
    rows = [len(re.findall(r"^\|", text, flags=re.MULTILINE)) for text in (chinese, english)]
    assert rows[0] == rows[1]
    assert flags_in(chinese) == flags_in(english)
    assert len(re.findall(r"[一-鿿]", chinese)) > 5 * len(headings(chinese)), "not in Chinese"


def anchors(text: str) -> set[str]:
    """The names that a page's headings have in links: small letters, no punctuation, hyphens for spaces."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", prose, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", [*TEXTS, ROOT / "README.md"], ids=name_of)
def test_links_resolve(path):
    """Files are there, and so are the headings that a link points at."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(path)):
        file, _, anchor = link.partition("#")
        target = path.parent / file if file else path
        if re.match(r"[a-z]+:", link):
            continue
        if not target.exists() or (anchor and anchor not in anchors(text_of(target))):
            broken.append(link)
    assert not broken


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))


@cache
def grammar() -> Grammar:
    return Grammar(load_tables())


@cache
def flags_of_tools() -> set[str]:
    sources = [path.read_text() for folder in ("tools", "tests/benchmarks") for path in (ROOT / folder).glob("*.py")]
    own = set(re.findall(r'"(--[a-z0-9-]+)"', "\n".join(sources)))
    pages = "\n".join(block for path in TEXTS for block in code_blocks(text_of(path)))
    return own | set(re.findall(r'add_argument\("(--[a-z0-9-]+)"', pages))  # examples may define flags of their own


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_flags_exist_and_are_supported(path):
    """A family such as --sglang-... is named by its beginning."""
    known, wrong = grammar().options, []
    for flag in sorted(
        flags_in(text_of(path)) - OTHER_PROGRAMS - flags_of_tools() - set(grammar().tables.owned_options)
    ):
        if flag.endswith("-"):
            found = any(option.startswith(flag) for option in known)
        else:
            found = flag in known and (known[flag].supported or path.name == REFERENCE)
        if not found:
            wrong.append(flag)
    assert not wrong


def test_every_hook_that_works_is_described():
    """Hooks are the flags whose value is an import path; each has a row in the table, and the table has no other."""
    page = text_of(DOCS / "en" / "get_started" / "customization.md")
    rows = [flag for group in grammar().groups for flag in group.flags if re.search(r"-(path|hook-path)$", flag.name)]
    hooks = {flag.name for flag in rows if flag.supported} - {"--custom-config-path", "--megatron-config-path"}
    described = set(re.findall(r"^\| `(--[\w-]+)`", page, flags=re.MULTILINE))
    assert len(hooks) > 20 and hooks == described


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_commands_and_paths_exist(path):
    text = text_of(path)
    commands = re.findall(r"(?:python|bash) ((?:[\w.-]+/)*[\w-]+\.(?:py|sh))", text)
    mentioned = [code for code in inline_code(text) if code.split("/")[0] in ROOMS and re.fullmatch(r"[\w./-]+", code)]
    files = [code.split("::")[0] for code in inline_code(text) if "::" in code]
    missing = [file for file in {*commands, *mentioned, *files} if "/" in file or file in commands]
    missing = [file for file in missing if not (ROOT / file).exists()]
    assert not missing


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_names_in_the_code_exist(path):
    """slime.a.b.name is a module, or a name that the module's source mentions."""
    wrong = []
    for dotted in set(re.findall(r"\bslime(?:_plugins)?(?:\.\w+)+", text_of(path))):
        parts = dotted.split(".")
        for size in range(len(parts), 0, -1):
            base = ROOT.joinpath(*parts[:size])
            source = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
            if source.is_file():
                break
        rest = parts[size:]
        if size < 2 or (rest and not re.search(rf"\b{rest[0]}\b", source.read_text())):
            wrong.append(dotted)
    assert not wrong


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_named_tests_exist(path):
    """`tests/.../test_x.py::test_y` is a function of that file."""
    wrong = []
    for file, test in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text_of(path)):
        if not re.search(rf"^def {test}\(", (ROOT / file).read_text(), flags=re.MULTILINE):
            wrong.append(f"{file}::{test}")
    assert not wrong
