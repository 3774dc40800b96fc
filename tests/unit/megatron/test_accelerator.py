"""The accelerator objects, and what the CPU shim may not break."""

import subprocess
import sys

import pytest

from slime.utils.accelerator import detect_accelerator, get_accelerator


def _run(code: str) -> str:
    """Output of a fresh interpreter: the shim is process-wide."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_detection_looks_for_device_files(tmp_path):
    (tmp_path / "nvidiactl").touch()
    assert detect_accelerator(tmp_path) == "cpu"
    (tmp_path / "nvidia3").touch()
    assert detect_accelerator(tmp_path) == "cuda"


def test_detection_does_not_import_torch():
    code = "import sys, slime.utils.accelerator as a; a.detect_accelerator(); print('torch' in sys.modules)"
    assert _run(code).strip() == "False"


def test_cpu_accelerator_answers():
    cpu = get_accelerator("cpu")
    assert (cpu.name, cpu.distributed_backend, cpu.ray_resource) == ("cpu", "gloo", "CPU")
    assert cpu.device(3).type == "cpu" and not cpu.supports_memory_saver
    memory = cpu.memory()
    assert 0 < memory["process"] < memory["total"] and 0 < memory["free"] <= memory["total"]
    cpu.set_device(0), cpu.synchronize(), cpu.empty_cache()


def test_unknown_accelerator_lists_the_legal_ones():
    with pytest.raises(ValueError, match="'tpu': expected one of cuda, cpu"):
        get_accelerator("tpu")


SHIM = """
import warnings; warnings.filterwarnings("ignore")
import importlib.util, torch
from slime.utils.accelerator import get_accelerator
from transformers import Qwen3Config, Qwen3ForCausalLM
config = Qwen3Config(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=24, max_position_embeddings=64)
torch.manual_seed(0); Qwen3ForCausalLM(config).save_pretrained(PATH)
tokens = torch.arange(20)[None]
def logits():
    with torch.no_grad():
        return Qwen3ForCausalLM.from_pretrained(PATH, dtype=torch.float32).eval()(tokens).logits
before = logits()
get_accelerator("cpu").prepare_trainer(); get_accelerator("cpu").prepare_trainer()
assert torch.equal(before, logits()), "from_pretrained builds on the meta device: its buffers must still be filled"
assert not torch.cuda.is_available()
assert torch.zeros(2, device="cuda").device.type == "cpu" and torch.zeros(2).to("cuda:0").device.type == "cpu"
assert torch.empty(1, device=torch.cuda.current_device()).device.type == "cpu"
with torch.device("meta"):
    assert torch.empty(2).is_meta and torch.arange(3).is_meta
torch.cuda.manual_seed(5); a = torch.rand(3); state = torch.cuda.get_rng_state()
torch.cuda.manual_seed(5); assert torch.equal(torch.rand(3), a) and torch.equal(torch.cuda.get_rng_state(), state)
assert torch.zeros(1).type() == "torch.FloatTensor"
for name in ("flashinfer", "flash_attn", "transformer_engine"):
    assert importlib.util.find_spec(name) is None
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(f"{name} can be imported")
print("ok")
"""


def test_shim_keeps_transformers_and_torch_intact(tmp_path):
    """Logits before and after are identical, installing twice changes nothing, GPU packages are out of reach."""
    assert _run(SHIM.replace("PATH", repr(str(tmp_path)))).strip().endswith("ok")


def test_shim_refuses_a_process_that_has_megatron():
    code = """
import sys, types
sys.modules["megatron.core"] = types.ModuleType("megatron.core")
from slime.utils.accelerator import get_accelerator
try:
    get_accelerator("cpu").prepare_trainer()
except RuntimeError as error:
    print(error)
"""
    assert "must be installed before megatron is imported" in _run(code)


def test_shim_does_nothing_where_cuda_is_available():
    code = """
import torch
torch.cuda.is_available = lambda: True
from slime.utils.accelerator import get_accelerator, megatron_shim
zeros = torch.zeros
assert megatron_shim.install() is False and torch.zeros is zeros
try:
    get_accelerator("cpu").prepare_trainer()
except RuntimeError as error:
    print(error)
"""
    assert "CUDA_VISIBLE_DEVICES" in _run(code)
