"""Multi-token prediction from its published formulas: transformers' decoder layer between plain torch around it.

x_t = eh_proj [enorm(embedding of token t + 1), hnorm(h_t)], h the decoder's normed output; one decoder layer over x;
logits_t = head shared_head.norm(y_t) predict token t + 2. transformers itself leaves the layer's weights out. Run
again, the layer reads the embedding of token t + 2 and shared_head.norm(y_t), and predicts token t + 3; and so on.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.helpers.tiny_models import LAYERS, make_tiny_model

PREFIX = f"model.layers.{LAYERS}."
AROUND = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
# a layer of the decoder that is built as the prediction layer is: with experts, with an indexer of its own
LIKE = {"glm4_moe": 3, "deepseek_v3": 3, "glm_moe_dsa": 2, "qwen2": 3}


def make_tiny_mtp_model(name: str, directory: Path, **overrides: Any) -> Path:
    """The tiny checkpoint `name` with one prediction layer, random and unlike any other layer."""
    import torch
    from safetensors.torch import load_file, save_file

    path = make_tiny_model(name, directory, num_nextn_predict_layers=1, **overrides)
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(11)
    hidden = weights["model.norm.weight"].numel()
    layer = {key: t for key, t in weights.items() if key.startswith(f"model.layers.{LIKE[name]}.")}
    added = {key.replace(f".{LIKE[name]}.", f".{LAYERS}.", 1): t for key, t in layer.items()}
    added |= {PREFIX + key: torch.ones(hidden) for key in AROUND if "norm" in key}
    added |= {PREFIX + "eh_proj.weight": torch.ones(hidden, 2 * hidden)}
    for key, tensor in added.items():
        noise = torch.randn(tensor.shape, generator=generator)
        added[key] = 1 + 0.2 * noise if "norm" in key and not key.endswith("bias") else 0.1 * noise
    save_file(weights | added, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return path


class Reference:
    """The prediction layer of the checkpoint at `path`, whose weights take gradients."""

    def __init__(self, name: str, path: Path, scratch: Path) -> None:
        import torch
        from safetensors.torch import load_file, save_file
        from torch import nn
        from transformers import AutoModelForCausalLM

        self.place, self.scratch = LIKE[name], scratch
        weights = load_file(path / "model.safetensors")
        mine = {key.removeprefix(PREFIX): weights.pop(key) for key in list(weights) if key.startswith(PREFIX)}
        self.around = {key: nn.Parameter(mine.pop(key)) for key in AROUND}
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        self.model = AutoModelForCausalLM.from_pretrained(path, **options).requires_grad_(False)
        # the layer's weights in the place of a layer of its kind, read by transformers
        shutil.copytree(path, scratch / "layer")
        inside = {f"model.layers.{self.place}.{key}": tensor for key, tensor in mine.items()}
        save_file(weights | inside, scratch / "layer" / "model.safetensors", metadata={"format": "pt"})
        self.draft = AutoModelForCausalLM.from_pretrained(scratch / "layer", **options)

    def logits(self, tokens: Any, runs: int = 1, chooses_once: bool = False) -> list[Any]:
        """Of each run [t, vocabulary]: at position t of one sequence run i (from 0) predicts token t + 2 + i.

        chooses_once: every run attends to the tokens that sparse attention chose in the first one.
        """
        import torch
        from torch.nn import functional as F

        model, draft, around = self.model.model, self.draft.model, self.around
        eps = self.model.config.rms_norm_eps

        def norm(x: Any, weight: Any) -> Any:
            return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

        with torch.no_grad():
            hidden = model(tokens[None]).last_hidden_state
        layers, last = draft.layers, draft.norm
        draft.layers, draft.norm = layers[self.place : self.place + 1], torch.nn.Identity()
        indexer = getattr(draft.layers[0].self_attn, "indexer", None)
        hook = indexer.register_forward_hook(_first_output()) if chooses_once else None
        found = []
        try:
            for run in range(runs):
                with torch.no_grad():
                    read = model.embed_tokens(F.pad(tokens, (0, run + 1))[None, run + 1 :])
                both = torch.cat((norm(read, around["enorm.weight"]), norm(hidden, around["hnorm.weight"])), -1)
                out = draft(inputs_embeds=both @ around["eh_proj.weight"].T, use_cache=False).last_hidden_state
                hidden = norm(out, around["shared_head.norm.weight"])
                found.append(self.model.lm_head(hidden)[0])
        finally:
            draft.layers, draft.norm = layers, last
            if hook is not None:
                hook.remove()
        return found

    def losses(
        self,
        samples: Sequence[Any],
        response_lengths: Sequence[int],
        masks: Sequence[Any],
        runs: int = 1,
        chooses_once: bool = False,
    ) -> list[Any]:
        """Of each run the mean over all unmasked response tokens that it predicts."""
        import torch

        totals, counts = [torch.zeros(()) for _ in range(runs)], [0] * runs
        for tokens, response, mask in zip(samples, response_lengths, masks, strict=True):
            for run, logits in enumerate(self.logits(tokens, runs, chooses_once)):
                log_probs, ahead = logits.log_softmax(-1), run + 2
                for target in range(max(len(tokens) - response, ahead), len(tokens)):
                    if mask[target - len(tokens) + response]:
                        totals[run] = totals[run] - log_probs[target - ahead, tokens[target]]
                        counts[run] += 1
        return [total / count for total, count in zip(totals, counts, strict=True)]

    def gradients(self) -> dict[str, Any]:
        """Under checkpoint names, of what `loss` was backward through; the weights are lost."""
        import torch
        from safetensors.torch import load_file

        found = {PREFIX + key: parameter.grad for key, parameter in self.around.items()}
        with torch.no_grad():
            for parameter in self.draft.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        self.draft.save_pretrained(self.scratch / "gradients")
        prefix = f"model.layers.{self.place}."
        stored = load_file(self.scratch / "gradients" / "model.safetensors")
        return found | {
            key.replace(prefix, PREFIX): t
            for key, t in stored.items()
            if key.startswith(prefix) and "correction_bias" not in key
        }


def _first_output() -> Any:
    """A forward hook that lets a module return what it returned first."""
    first: list[Any] = []

    def hook(module: Any, args: Any, output: Any) -> Any:
        first.append(output)
        return first[0]

    return hook
