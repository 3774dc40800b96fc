"""Loading tokenizers and processors from checkpoints on disk."""

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from slime.utils.processing_utils import load_processor, load_tokenizer


def test_a_text_checkpoint_has_a_tokenizer_and_no_processor(tmp_path):
    vocabulary = {"a": 0, "b": 1, "<unk>": 2}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    assert load_tokenizer(str(tmp_path)).encode("b") == [1]
    assert load_processor(str(tmp_path)) is None
