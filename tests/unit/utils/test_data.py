"""Prompt files and Dataset: slices, row errors with path:line, filters that count, seeded shuffles, media."""

import json
import logging
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from slime.utils.data import Dataset, get_source, read_file
from slime.utils.processing_utils import build_processor_kwargs, encode_image_for_rollout_engine, process_vision_info
from slime.utils.types import Sample


class WordTokenizer:
    """One token a word; the chat template writes `<role>content`, tools first."""

    def __call__(self, texts, add_special_tokens):
        assert add_special_tokens is False
        return {"input_ids": [text.split() for text in texts]}

    def apply_chat_template(self, messages, tools=None, tokenize=True, add_generation_prompt=False, **kwargs):
        assert tokenize is False and add_generation_prompt is True
        if any(message["role"] == "forbidden" for message in messages):
            raise RuntimeError("role forbidden")
        parts = [f"tools:{json.dumps(tools)} "] if tools else []
        parts += [f"<{message['role']}>{message['content']}" for message in messages]
        return "".join(parts) + "<assistant>" + "".join(f"[{k}={v}]" for k, v in kwargs.items())


def write(path: Path, rows: list) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


@pytest.fixture
def ten(tmp_path):
    return write(tmp_path / "ten.jsonl", [{"input": i} for i in range(10)])


# ---- files ----


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("", range(10)),
        ("@[-3:]", [7, 8, 9]),
        ("@[:-8]", [0, 1]),
        ("@[2:5]", [2, 3, 4]),
        ("@[:]", range(10)),
        ("@[8:99]", [8, 9]),
    ],
)
def test_k24_slices(ten, text, rows):
    assert [row["input"] for row in read_file(f"{ten}{text}")] == list(rows)


@given(start=st.none() | st.integers(-14, 14), end=st.none() | st.integers(-14, 14), count=st.integers(0, 9))
def test_slices_mean_what_python_means(tmp_path_factory, start, end, count):
    path = write(tmp_path_factory.mktemp("slices") / "rows.jsonl", [{"input": i} for i in range(count)])
    bounds = f"{'' if start is None else start}:{'' if end is None else end}"
    assert [row["input"] for row in read_file(f"{path}@[{bounds}]")] == list(range(count))[start:end]


@pytest.mark.parametrize("text", ["::2", "a:b", "3", ""])
def test_other_selections_are_refused(ten, text):
    with pytest.raises(ValueError, match="must be @\\[start:end\\]"):
        read_file(f"{ten}@[{text}]")


def test_a_short_slice_does_not_read_the_rows_behind_it(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"input": 0}, "{broken"])
    assert list(read_file(f"{path}@[:1]")) == [{"input": 0}]


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="missing.jsonl"):
        read_file(tmp_path / "missing.jsonl")
    (tmp_path / "rows.csv").write_text("a")
    with pytest.raises(ValueError, match=".jsonl or .parquet, not '.csv'"):
        read_file(tmp_path / "rows.csv")


def test_parquet_reads_like_jsonl(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"input": f"p{i}", "label": i, "metadata": {"k": i}} for i in range(7)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=3)
    assert list(read_file(tmp_path / "rows.parquet")) == rows
    assert list(read_file(f"{tmp_path}/rows.parquet@[-2:]")) == rows[-2:]
    dataset = Dataset(tmp_path / "rows.parquet", label_key="label")
    assert [s.label for s in dataset.samples] == list(range(7)) and dataset[3].metadata == {"k": 3}


@pytest.mark.parametrize(
    ("row", "what"), [('{"input": ', "Expecting value"), ("[1, 2]", "must be a JSON object, got list")]
)
def test_a_malformed_row_is_an_error_with_its_line(tmp_path, row, what):
    path = write(tmp_path / "rows.jsonl", [{"input": "a"}, "", row, {"input": "b"}])
    with pytest.raises(ValueError, match=f"rows.jsonl:3: malformed row: .*{what}"):
        Dataset(path)


def test_malformed_rows_can_be_skipped_and_are_counted(tmp_path, caplog):
    path = write(tmp_path / "rows.jsonl", [{"input": "a"}, "", "oops", "[]", {"input": "b"}])
    with caplog.at_level(logging.WARNING):
        dataset = Dataset(path, skip_malformed=True)
    assert [s.prompt for s in dataset.samples] == ["a", "b"] and dataset.num_skipped == 2
    assert "skipped 2 malformed rows" in caplog.text and "rows.jsonl:3" in caplog.text


# ---- rows ----


def test_missing_keys_name_the_available_ones(tmp_path):
    path = write(tmp_path / "run.jsonl", [{"prompt": "a", "answer": "b"}])
    with pytest.raises(
        ValueError, match='run.jsonl:1: "label" is missing \\(keys: prompt, answer\\); pass --label-key'
    ):
        Dataset(path, input_key="prompt", label_key="label")
    with pytest.raises(ValueError, match='run.jsonl:1: "input" is missing.*--input-key'):
        Dataset(path)


@pytest.mark.parametrize("prompt", [3, None, [], ["a"], [{"content": "no role"}], {"role": "user", "content": "a"}])
def test_a_prompt_is_text_or_messages(tmp_path, prompt):
    path = write(tmp_path / "rows.jsonl", [{"input": "fine"}, {"input": prompt}])
    with pytest.raises(ValueError, match="rows.jsonl:2: 'input' must be text or a list of messages"):
        Dataset(path)


@pytest.mark.parametrize(
    ("metadata", "expected"), [({"a": 1}, {"a": 1}), ('{"a": 1}', {"a": 1}), (None, {}), ("", {}), ("null", {})]
)
def test_metadata_may_be_json_text(tmp_path, metadata, expected):
    path = write(tmp_path / "rows.jsonl", [{"input": "a", "metadata": metadata}])
    assert Dataset(path)[0].metadata == expected


@pytest.mark.parametrize("metadata", ["not json", "[1]", 3, [1]])
def test_metadata_of_another_kind_is_refused(tmp_path, metadata):
    path = write(tmp_path / "rows.jsonl", [{"input": "a", "metadata": metadata}])
    with pytest.raises(ValueError, match='rows.jsonl:1: "metadata"'):
        Dataset(path)


def test_tools_go_to_metadata_and_template(tmp_path):
    tools = [{"name": "add"}]
    path = write(
        tmp_path / "rows.jsonl",
        [{"input": "a", "tools": tools}, {"input": "a", "tools": json.dumps(tools)}, {"input": "b"}],
    )
    samples = Dataset(path, tokenizer=WordTokenizer(), tool_key="tools", apply_chat_template=True).samples
    assert [s.metadata for s in samples] == [{"tools": tools}, {"tools": tools}, {}]
    assert samples[0].prompt == samples[1].prompt == 'tools:[{"name": "add"}] <user>a<assistant>'
    assert samples[2].prompt == "<user>b<assistant>"


def test_text_stays_text_and_messages_stay_messages_without_a_template(tmp_path):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = write(tmp_path / "rows.jsonl", [{"input": "plain"}, {"input": messages}])
    assert [s.prompt for s in Dataset(path).samples] == ["plain", messages]
    rendered = Dataset(path, tokenizer=WordTokenizer(), apply_chat_template=True, apply_chat_template_kwargs={"x": 1})
    assert [s.prompt for s in rendered.samples] == ["<user>plain<assistant>[x=1]", "<system>s<user>u<assistant>[x=1]"]


def test_a_template_error_names_the_row(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"input": [{"role": "forbidden", "content": ""}]}])
    with pytest.raises(ValueError, match="rows.jsonl:1: the chat template fails.*role forbidden"):
        Dataset(path, tokenizer=WordTokenizer(), apply_chat_template=True)


# ---- filter, emptiness, order ----


def test_long_prompts_are_left_out_in_order_and_counted(tmp_path, caplog):
    prompts = ["one", "one two three", "one two", "a b c d", [{"role": "user", "content": "x " * 99}]]
    path = write(tmp_path / "rows.jsonl", [{"input": p} for p in prompts])
    with caplog.at_level(logging.WARNING):
        dataset = Dataset(path, tokenizer=WordTokenizer(), max_length=2)
    assert [s.prompt for s in dataset.samples] == ["one", "one two", prompts[-1]] and dataset.num_filtered == 2
    assert "left out 2 of 5 prompts" in caplog.text and "1 prompts are message lists" in caplog.text


def test_an_empty_dataset_says_where_the_rows_went(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"input": "a b c"}, "oops"])
    with pytest.raises(
        ValueError, match="rows.jsonl: no prompt is left: 1 rows.*1 malformed.*1 prompts longer than 2"
    ):
        Dataset(path, tokenizer=WordTokenizer(), max_length=2, skip_malformed=True)
    with pytest.raises(ValueError, match="no prompt is left: 0 rows"):
        Dataset(f"{path}@[5:]", skip_malformed=True)


@given(seed=st.integers(0, 99), epochs=st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_the_order_depends_on_seed_and_epoch_only(tmp_path_factory, seed, epochs):
    path = write(tmp_path_factory.mktemp("shuffle") / "rows.jsonl", [{"input": str(i)} for i in range(11)])
    dataset = Dataset(path, seed=seed)
    random.seed(5)
    state = random.getstate()
    for epoch in epochs:
        dataset.shuffle(epoch)
        dataset.shuffle(epoch)  # idempotent
    assert random.getstate() == state  # the global generator is nobody's
    fresh = Dataset(path, seed=seed)
    fresh.shuffle(epochs[-1])
    order = [s.prompt for s in dataset.samples]
    assert order == [s.prompt for s in fresh.samples] and sorted(order, key=int) == [str(i) for i in range(11)]
    other = Dataset(path, seed=seed + epochs[-1])
    other.shuffle(0)
    assert [s.prompt for s in other.samples] == order


# ---- media ----


class Processor:
    """Counts two tokens an image."""

    def __call__(self, text, images=(), **kwargs):
        return {"input_ids": [text[0].split() + [0, 0] * len(images)]}


def picture(color: tuple[int, int, int]) -> Image.Image:
    return Image.new("RGB", (3, 2), color)


def test_placeholders_are_replaced_in_order_across_messages(tmp_path):
    paths = []
    for i in range(3):
        picture((i, 0, 0)).save(tmp_path / f"{i}.png")
        paths.append(str(tmp_path / f"{i}.png"))
    messages = [{"role": "user", "content": "a<image>b<image>"}, {"role": "user", "content": "<image> <video>"}]
    path = write(tmp_path / "rows.jsonl", [{"input": messages, "pics": paths}, {"input": "no picture", "pics": None}])
    dataset = Dataset(path, processor=Processor(), multimodal_keys={"image": "pics"})
    first, second = (
        [
            {"type": "text", "text": "a"},
            {"type": "image", "image": paths[0]},
            {"type": "text", "text": "b"},
            {"type": "image", "image": paths[1]},
        ],
        [{"type": "image", "image": paths[2]}, {"type": "text", "text": " <video>"}],
    )
    assert [m["content"] for m in dataset[0].prompt] == [first, second]
    assert [image.getpixel((0, 0))[0] for image in dataset[0].multimodal_inputs["images"]] == [0, 1, 2]
    assert dataset[1].multimodal_inputs is None
    assert dataset[1].prompt == [{"role": "user", "content": [{"type": "text", "text": "no picture"}]}]


@pytest.mark.parametrize(
    ("text", "pics"), [("<image>", []), ("<image>", ["a", "b"]), ("none", ["a"]), ("<image><image>", ["a"])]
)
def test_placeholders_and_items_must_be_equally_many(tmp_path, text, pics):
    path = write(tmp_path / "rows.jsonl", [{"input": text, "pics": pics}])
    with pytest.raises(ValueError, match=f'rows.jsonl:1: .*<image> placeholders but {len(pics)} items in "pics"'):
        Dataset(path, multimodal_keys={"image": "pics"})


def test_the_length_of_a_picture_prompt_counts_its_picture(tmp_path):
    picture((1, 2, 3)).save(tmp_path / "0.png")
    rows = [{"input": "w w <image>", "pics": [str(tmp_path / "0.png")]}, {"input": "w w w", "pics": []}]
    path = write(tmp_path / "rows.jsonl", rows)

    class Template(WordTokenizer):
        def apply_chat_template(self, messages, **kwargs):
            return "".join(item.get("text", "") for item in messages[0]["content"])

    options = {"tokenizer": Template(), "processor": Processor(), "multimodal_keys": {"image": "pics"}}
    for max_length, kept in ((3, 1), (4, 2)):
        dataset = Dataset(path, apply_chat_template=True, max_length=max_length, **options)
        assert len(dataset) == kept


def test_pictures_are_read_from_every_kind_of_source(tmp_path):
    image = picture((9, 8, 7))
    image.save(tmp_path / "x.png")
    uri = encode_image_for_rollout_engine(image)
    raw = (tmp_path / "x.png").read_bytes()
    sources = [
        image,
        str(tmp_path / "x.png"),
        f"file://{tmp_path}/x.png",
        uri,
        raw,
        {"bytes": raw, "path": None},
        {"url": uri},
    ]
    content = [{"type": "image", "image": source} for source in sources] + [{"type": "text", "text": "t"}]
    images = process_vision_info([{"role": "user", "content": content}], Processor())["images"]
    assert len(images) == 7 and all(np.array_equal(np.asarray(i), np.asarray(image)) for i in images)
    with pytest.raises(ValueError, match="must be a PIL image"):
        process_vision_info([{"role": "user", "content": [{"type": "image", "image": 5}]}], Processor())
    with pytest.raises(ValueError, match="video inputs are not supported yet"):
        process_vision_info([{"role": "user", "content": [{"type": "video", "video": "x"}]}], Processor())


def test_processor_arguments_ask_for_lists_of_ids_and_tensors_of_pixels():
    kwargs = build_processor_kwargs({"images": [1]})
    assert kwargs["images"] == [1] and kwargs["text_kwargs"] == {"return_tensors": None}
    assert kwargs["images_kwargs"] == {"return_tensors": "pt"}


def test_source_prefers_the_attribute():
    sample = Sample(metadata={"source_name": "meta"})
    assert get_source(sample) == "meta" and get_source(Sample()) == "unknown"
    sample.source = "attribute"
    assert get_source(sample) == "attribute"
