"""The tables of Megatron's, SGLang's and the router's flags, their cache, and how slime's own tables fit in."""

import argparse
import json

import pytest

from slime.utils.arguments import upstream
from slime.utils.arguments.dump_upstream import rows_of
from slime.utils.arguments.flag import Flag, scaled_int
from slime.utils.arguments.groups import GROUPS
from slime.utils.arguments.parser import Grammar

ROW = {
    "options": ["--x"],
    "dest": "x",
    "kind": "value",
    "type": "int",
    "nargs": None,
    "default": 3,
    "choices": None,
    "const": None,
    "help": "",
    "deprecated": "",
}


@pytest.fixture
def builds(monkeypatch) -> list[str]:
    """Packages whose parser was asked for; stands in for the slow subprocess."""
    asked = []

    def build(package):
        asked.append(package)
        return [ROW]

    monkeypatch.setattr(upstream, "_build", build)
    return asked


def test_a_table_is_built_once(tmp_path, builds):
    first = upstream.load_rows("router", tmp_path / "cache")
    second = upstream.load_rows("router", tmp_path / "cache")
    assert first == second == [ROW] and builds == ["router"]


def test_a_new_version_builds_a_new_table(tmp_path, builds, monkeypatch):
    upstream.load_rows("router", tmp_path)
    monkeypatch.setattr(upstream, "_version", lambda package: "99.0")
    upstream.load_rows("router", tmp_path)
    assert builds == ["router", "router"]
    assert (tmp_path / "flags-sglang-router-99.0.json").is_file()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"rows": []}', '{"format": -1, "rows": []}'])
def test_an_unreadable_or_older_table_is_rebuilt(tmp_path, builds, content):
    file = tmp_path / f"flags-sglang-router-{upstream._version('router')}.json"
    file.write_text(content)
    assert upstream.load_rows("router", tmp_path) == [ROW]
    assert builds == ["router"] and json.loads(file.read_text())["rows"] == [ROW]
    assert [path.name for path in tmp_path.iterdir()] == [file.name]  # nothing written aside is left


def test_a_directory_that_cannot_be_written_costs_only_time(tmp_path, builds, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert upstream.load_rows("router", blocked / "cache") == [ROW]
    assert "cannot keep" in capsys.readouterr().err


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(upstream.DISTRIBUTIONS, "router", "no-such-distribution")
    with pytest.raises(RuntimeError, match="no-such-distribution is not installed"):
        upstream.load_rows("router", tmp_path)


def test_a_failing_parser_shows_its_error(tmp_path, monkeypatch):
    monkeypatch.setitem(upstream.DISTRIBUTIONS, "nonsense", "sglang-router")
    monkeypatch.setitem(upstream.TITLES, "nonsense", "nonsense")
    with pytest.raises(RuntimeError, match="KeyError"):
        upstream.load_rows("nonsense", tmp_path)


def test_the_real_router_table_is_built_by_its_own_parser(tmp_path, capsys):
    rows = upstream.load_rows("router", tmp_path)
    assert "once for this version" in capsys.readouterr().err
    (policy,) = [row for row in rows if row["dest"] == "router_policy"]
    assert "cache_aware" in policy["choices"] and policy["options"] == ["--router-policy"]


def test_cache_directory_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert upstream.cache_dir() == tmp_path / "slime"


def test_every_action_kind_survives_the_table():
    """A parser and the parser rebuilt from its table read the same tokens alike."""
    original = argparse.ArgumentParser(allow_abbrev=False)
    original.add_argument("--number", "-n", type=int, default=7, help="100%% of %(default)s")
    original.add_argument("--many", type=float, nargs="+", default=[1.0])
    original.add_argument("--on", action="store_true")
    original.add_argument("--no-thing", action="store_false", dest="thing")
    original.add_argument("--maybe", action=argparse.BooleanOptionalAction)
    original.add_argument("--again", action="append", nargs=2)
    original.add_argument("--fixed", action="store_const", const="c", default="d")
    original.add_argument("--pick", choices=["a", "b"], default="a")
    rows = json.loads(json.dumps(rows_of(original)))
    assert rows[0]["help"] == "100% of 7"
    rebuilt = argparse.ArgumentParser(allow_abbrev=False)
    for row in rows:
        upstream._flag(row).add_to(rebuilt)
    for argv in (
        [],
        ["-n", "5", "--many", "1", "2.5", "--on", "--no-thing", "--no-maybe", "--fixed", "--pick", "b"],
        ["--again", "1", "2", "--again", "3", "4", "--maybe"],
    ):
        assert rebuilt.parse_args(argv) == original.parse_args(argv)


def test_an_action_kind_without_a_row_is_an_error():
    parser = argparse.ArgumentParser()
    parser.add_argument("-v", action="count")
    with pytest.raises(TypeError, match="-v"):
        rows_of(parser)


def test_slimes_rows_read_as_many_tokens_as_megatrons():
    """Tokens of a flag that both know go to Megatron's parser as they are, so the two must agree on type and arity."""
    grammar = Grammar(upstream.load_tables())
    megatron = {option: flag for flag in grammar.tables.megatron.flags for option in flag.options}
    shared = {option: flag for option, flag in grammar.slime_options.items() if option in megatron}
    assert len(shared) > 10
    for option, flag in shared.items():
        theirs = megatron[option]
        assert (flag.kind, flag.nargs, flag.dest) == (theirs.kind, theirs.nargs, theirs.dest), option
        assert flag.kind == "switch" or flag.type is theirs.type, option


def test_no_two_rows_of_slime_share_an_option_or_a_dest():
    flags = [flag for group in GROUPS for flag in group.flags]
    options = [option for flag in flags for option in flag.options]
    assert len(options) == len(set(options))
    assert len(flags) == len({flag.dest for flag in flags})


def test_dests_of_slime_are_megatrons_only_under_the_same_option():
    grammar = Grammar(upstream.load_tables())
    upstream_flags = (*grammar.tables.megatron.flags, *grammar.tables.sglang.flags, *grammar.tables.router.flags)
    taken = {flag.dest: set(flag.options) for flag in upstream_flags}
    for group in GROUPS:
        for flag in group.flags:
            assert flag.dest not in taken or taken[flag.dest] & set(flag.options), flag.name


def test_every_flag_has_a_sentence():
    for group in GROUPS:
        for flag in group.flags:
            assert flag.help.endswith("."), flag.name


@pytest.mark.parametrize(
    ("text", "value"), [("4096", 4096), ("4k", 4000), ("4Ki", 4096), ("25.6k", 25600), ("-1", -1), ("1M", 10**6)]
)
def test_scaled_int(text, value):
    assert scaled_int(text) == value


@pytest.mark.parametrize("text", ["1.5", "1.5Ki", "k", "4kb", ""])
def test_scaled_int_refuses(text):
    with pytest.raises(argparse.ArgumentTypeError, match="4Ki"):
        scaled_int(text)


def test_results_do_not_share_default_lists(case):
    first, second = case.args(), case.args()
    first.rollout_sample_hook_path.append("mine")
    assert second.rollout_sample_hook_path == [] == case.args().rollout_sample_hook_path


def test_dest_follows_the_name():
    assert Flag("--a-b-c").dest == "a_b_c"
    assert Flag("--a-b", dest="other").dest == "other"
