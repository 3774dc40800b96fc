"""load_function's spellings and errors, singletons, periodic actions, grouping, commands."""

import subprocess
import threading
import time

import pytest

from slime.utils.misc import SingletonMeta, exec_command, group_by, load_function, should_run_periodic_action


def test_a_dotted_path_and_a_file_path_load_functions(tmp_path):
    plugin = tmp_path / "my_plugin.py"
    plugin.write_text("calls = []\ndef first():\n    return 'first'\ndef second():\n    return calls\n")
    assert load_function("os.path.join")("a", "b") == "a/b"
    assert load_function(f"{plugin}:first")() == "first"
    # one module per file, whatever the spelling: both functions see the same globals
    load_function(f"{plugin}:calls").append(1)
    assert load_function(f"{tmp_path}/./my_plugin.py:second")() == [1]


def test_loading_is_memoised(tmp_path):
    plugin = tmp_path / "once.py"
    plugin.write_text("def f():\n    return 1\n")
    loaded = load_function(f"{plugin}:f")
    plugin.unlink()
    assert load_function(f"{plugin}:f") is loaded


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("nodots", ValueError, "'nodots': give package.module.name or path/to/file.py:name"),
        (".name", ValueError, "give package.module.name"),
        ("no_such_package.module.f", ImportError, "'no_such_package.module.f': importing.*No module named"),
        ("os.path.no_such_name", ImportError, "'os.path.no_such_name'.*has no 'no_such_name'"),
        ("/no/such/file.py:f", ImportError, "no file /no/such/file.py"),
    ],
)
def test_errors_name_the_path_and_what_failed(path, error, message):
    with pytest.raises(error, match=message):
        load_function(path)


def test_a_plugin_that_fails_while_loading_is_named_and_can_be_mended(tmp_path):
    plugin = tmp_path / "broken.py"
    plugin.write_text("raise RuntimeError('boom')\n")
    with pytest.raises(ImportError, match=r"broken.py:f.*RuntimeError: boom"):
        load_function(f"{plugin}:f")
    plugin.write_text("def f():\n    return 'mended, and of another length'\n")
    assert load_function(f"{plugin}:f")().startswith("mended")


def test_a_singleton_is_built_once_even_by_many_threads():
    built = []

    class Slow(metaclass=SingletonMeta):
        def __init__(self):
            time.sleep(0.01)
            built.append(self)

    seen = []
    threads = [threading.Thread(target=lambda: seen.append(Slow())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert len(built) == 1 and all(instance is built[0] for instance in seen) and len(seen) == 8


def test_clearing_a_singleton_builds_anew():
    class Thing(metaclass=SingletonMeta):
        pass

    first = Thing()
    SingletonMeta.clear_all_instances()
    assert Thing() is not first


@pytest.mark.parametrize(
    ("interval", "per_epoch", "total", "due"),
    [
        (None, 2, 7, []),
        (3, None, None, [2, 5, 8]),
        (3, None, 8, [2, 5, 7]),
        (4, 5, None, [3, 4, 7, 9]),
        (4, 0, None, [3, 7]),
    ],
)
def test_periodic_actions(interval, per_epoch, total, due):
    ids = range(total or 10)
    assert [i for i in ids if should_run_periodic_action(i, interval, per_epoch, total)] == due


def test_a_non_positive_interval_is_refused():
    with pytest.raises(ValueError, match="must be positive, got 0"):
        should_run_periodic_action(0, 0)


def test_group_by_keeps_order():
    assert list(group_by([3, 1, 4, 1, 5], lambda x: x % 2).items()) == [(1, [3, 1, 1, 5]), (0, [4])]
    assert group_by("abca") == {"a": ["a", "a"], "b": ["b"], "c": ["c"]}


def test_exec_command():
    assert exec_command("echo $((1 + 2))", capture_output=True) == "3\n"
    assert exec_command("true") is None
    with pytest.raises(subprocess.CalledProcessError):
        exec_command("exit 3")
