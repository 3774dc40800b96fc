"""The page of all flags is written from the tables, in both languages, and is up to date."""

import re
from dataclasses import replace

import pytest
import yaml

from slime.utils.arguments.groups import GROUPS
from tools.make_argument_reference import COMMAND, ROOT, TRANSLATIONS, Translations, keys, page

FLAGS = [flag for group in GROUPS for flag in group.flags]


@pytest.fixture(scope="module")
def english() -> str:
    return page("en")


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_committed_page_is_what_the_tables_say(language):
    committed = (ROOT / "docs" / language / "reference" / "arguments.md").read_text(encoding="utf-8")
    assert committed == page(language), f"run: {COMMAND}"


def test_every_flag_has_a_row_with_its_default_and_meaning(english):
    for flag in FLAGS:
        (row,) = re.findall(rf"^\| `{flag.name}`.*$", english, flags=re.MULTILINE)
        assert flag.help.replace("|", "\\|") in row
        if flag.kind == "value" and not flag.required and flag.default not in (None, [], ["train_overall"]):
            assert f"`{flag.default}`" in row, row


def test_what_is_not_supported_is_marked_and_listed(english):
    listed = english[english.index("\n- ", english.index("## Not supported yet")) :]
    for flag in FLAGS:
        (row,) = re.findall(rf"^\| `{flag.name}`.*$", english, flags=re.MULTILINE)
        assert ("**Not supported yet.**" in row) == (not flag.supported)
        assert (f"`{flag.name}`" in listed) == (not flag.supported)
    assert "`--update-weight-mode delta`" in listed


def test_every_translation_is_used():
    assert Translations().unused(keys()) == []


def test_a_missing_translation_names_the_flag(tmp_path):
    pairs = yaml.safe_load(TRANSLATIONS.read_text(encoding="utf-8"))
    del pairs["--lr"]
    file = tmp_path / "pairs.yaml"
    file.write_text(yaml.safe_dump(pairs, allow_unicode=True), encoding="utf-8")
    with pytest.raises(KeyError, match="--lr is missing"):
        page("zh", translations=Translations(file))


def test_a_translation_of_an_older_sentence_is_refused():
    """A meaning that changes in English only would leave the Chinese page saying the opposite, unnoticed."""
    groups = [
        replace(g, flags=[replace(f, help="Another meaning.") if f.name == "--lr" else f for f in g.flags])
        for g in GROUPS
    ]
    with pytest.raises(KeyError, match=r"--lr translates 'Learning rate\.'; needed is 'Another meaning\.'"):
        page("zh", groups)


def test_a_translation_names_the_same_flags_and_code():
    for key, (english, chinese) in yaml.safe_load(TRANSLATIONS.read_text(encoding="utf-8")).items():
        names = [set(re.findall(r"--[a-z][\w-]*|f\([^)]*\)|\{\w+\}", text)) for text in (english, chinese)]
        assert names[0] == names[1], key
        assert re.search(r"[一-鿿]", chinese) or key.startswith("owned "), key
