"""Files and directories of tensors: what is written is what safetensors reads; what is broken is named."""

import json
import os
import resource
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.utils import safetensors_io as io
from slime.utils.safetensors_io import CheckpointDirectory, CheckpointError, TensorFile, TensorInfo, write_file

TENSORS = {
    "odd": torch.arange(3, dtype=torch.uint8),
    "bf16": torch.randn(5, 7).bfloat16(),
    "fp8": torch.randn(4, 6).to(torch.float8_e4m3fn),
    "words": torch.arange(6, dtype=torch.int32).view(2, 3),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4, dtype=torch.float16),
    "double": torch.randn(2).double(),
}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.reshape(-1).tolist() == b.reshape(-1).tolist()


def infos(tensors) -> dict[str, TensorInfo]:
    return {name: TensorInfo.of(tensor) for name, tensor in tensors.items()}


def test_written_files_are_read_by_safetensors_and_back(tmp_path):
    """In any order of writing; every tensor begins at a multiple of its element size, as mapped memory needs it."""
    path = tmp_path / "a.safetensors"
    write_file(path, infos(TENSORS), reversed(TENSORS.items()))
    loaded, own = load_file(path), TensorFile(path)
    assert loaded.keys() == own.infos.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert same(loaded[name], tensor) and same(own.read(name), tensor)
    header = json.loads(path.read_bytes()[8:].split(b"}}")[0] + b"}}")
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % TENSORS[name].element_size() == 0
    assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_files_of_safetensors_are_read(tmp_path):
    save_file(TENSORS, tmp_path / "a.safetensors", metadata={"format": "pt"})
    file = TensorFile(tmp_path / "a.safetensors")
    assert all(same(file.read(name), tensor) for name, tensor in TENSORS.items())


@pytest.mark.parametrize(
    "tensors, message",
    [
        ([("a", torch.ones(2)), ("a", torch.ones(2))], "a came twice"),
        ([("a", torch.ones(2)), ("c", torch.ones(2))], "c was not announced"),
        ([("a", torch.ones(3))], "a was announced as"),
        ([("a", torch.ones(2).half())], "a was announced as"),
        ([("a", torch.ones(2))], "b was announced and never came"),
    ],
)
def test_what_was_not_announced_leaves_no_file(tmp_path, tensors, message):
    with pytest.raises(CheckpointError, match=message):
        write_file(tmp_path / "a.safetensors", infos({"a": torch.ones(2), "b": torch.ones(2)}), tensors)
    assert not list(tmp_path.iterdir())


@contextmanager
def largest_file(size: int):
    """No file of this process may grow beyond `size`: the disk is full as far as it can tell."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_named_and_leaves_the_older_file(tmp_path):
    path = tmp_path / "a.safetensors"
    write_file(path, infos({"a": torch.ones(2)}), [("a", torch.ones(2))])
    large = {"a": torch.ones(100_000)}
    with largest_file(50_000), pytest.raises(CheckpointError, match=r"cannot write .*a\.safetensors: File too large"):
        write_file(path, infos(large), large.items())
    assert same(load_file(path)["a"], torch.ones(2))
    assert len(list(tmp_path.iterdir())) == 1


def damaged(data: bytes) -> dict[str, tuple[bytes, str]]:
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length]
    swap = lambda a, b: data[:8] + header.replace(a, b) + data[8 + length :]  # noqa: E731
    return {
        "cut in the data": (data[:-5], "it is cut off or damaged"),
        "cut in the header": (data[:60], "announce a header of"),
        "too long": (data + b"\0", "it is cut off or damaged"),
        "empty": (b"", "no safetensors file"),
        "a pointer of git lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "no safetensors file"),
        "no JSON": (swap(b'{"', b'#"'), "not JSON"),
        "no offsets": (swap(b"data_offsets", b"data_0ffsets"), "does not describe tensors"),
        "wrong shape": (swap(b"[5,7]", b"[5,8]"), r"bf16 \[5, 8\] BF16 needs 80 bytes"),
        "unknown dtype": (swap(b'"U8"', b'"X8"'), "dtype X8"),
    }


@pytest.mark.parametrize("case", damaged(b"\0" * 8 + b"{}"))
def test_damaged_files_are_named(tmp_path, case):
    path = tmp_path / "a.safetensors"
    write_file(path, infos(TENSORS), TENSORS.items())
    data, message = damaged(path.read_bytes())[case]
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message) as error:
        TensorFile(path)
    assert str(path) in str(error.value)


@pytest.fixture
def directory(tmp_path):
    """Two files and their index."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "qwen3"}')
    files = {"one.safetensors": {"a": torch.ones(2)}, "two.safetensors": {"b": torch.ones(3), "c": torch.zeros(1)}}
    for name, tensors in files.items():
        write_file(path / name, infos(tensors), tensors.items())
    io.write_index(path, {name: infos(tensors) for name, tensors in files.items()})
    return path


def test_directory_reads_through_the_index(directory):
    checkpoint = CheckpointDirectory(directory)
    assert checkpoint.weight_map == {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    assert same(checkpoint.read("b"), torch.ones(3)) and "d" not in checkpoint
    assert checkpoint.config == {"model_type": "qwen3"}
    with pytest.raises(CheckpointError, match="has no tensor d"):
        checkpoint.info("d")
    index = json.loads((directory / io.INDEX).read_text())
    assert index["metadata"]["total_size"] == 6 * 4, "bytes, not rows"


def test_directory_without_an_index(directory):
    (directory / io.INDEX).unlink()
    assert CheckpointDirectory(directory).weight_map["c"] == "two.safetensors"
    write_file(directory / "more.safetensors", infos({"a": torch.ones(2)}), [("a", torch.ones(2))])
    with pytest.raises(CheckpointError, match=r"a is in more\.safetensors and in one\.safetensors"):
        CheckpointDirectory(directory)


def test_index_and_files_must_agree(directory):
    index = json.loads((directory / io.INDEX).read_text())

    def message(**weight_map) -> str:
        kept = {name: file for name, file in (index["weight_map"] | weight_map).items() if file}
        (directory / io.INDEX).write_text(json.dumps(index | {"weight_map": kept}))
        with pytest.raises(CheckpointError) as error:
            CheckpointDirectory(directory)
        return str(error.value)

    assert "says that d is in one.safetensors, but no file has it" in message(d="one.safetensors")
    assert "but it is in two.safetensors" in message(c="one.safetensors")
    assert "holds c, which model.safetensors.index.json does not list (1 such" in message(c=None)
    assert "lists three.safetensors, which is not there (1 of 3 missing)" in message(d="three.safetensors")
    (directory / io.INDEX).write_text("[]")
    with pytest.raises(CheckpointError, match="is no index"):
        CheckpointDirectory(directory)


def test_directories_that_are_none(tmp_path):
    with pytest.raises(CheckpointError, match=r"no .*config\.json"):
        CheckpointDirectory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="holds no"):
        CheckpointDirectory(tmp_path)


def test_publishing_keeps_the_older_directory_when_the_rename_fails(tmp_path):
    target = tmp_path / "out"
    target.mkdir()
    (target / "old").touch()
    with pytest.raises(CheckpointError, match=f"cannot write {target}"):
        io.publish(tmp_path / "no-such-partial", target)
    assert (target / "old").exists() and len(list(tmp_path.iterdir())) == 1


def test_temporaries_of_the_dead_are_removed_and_those_of_the_living_stay(tmp_path):
    host = os.uname().nodename
    dead = tmp_path / f"model.safetensors.{host}.4194300.tmp"
    living = tmp_path / f"model.safetensors.{host}.{os.getpid()}.tmp"
    elsewhere = tmp_path / "model.safetensors.another-host.4194300.tmp"
    for path in (dead, living, elsewhere):
        path.touch()
    io.remove_temporaries(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([living, elsewhere])
