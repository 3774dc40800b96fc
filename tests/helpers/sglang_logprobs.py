"""Log-probs of one prompt by SGLang engines on a GPU, one engine after the other.

python -m tests.helpers.sglang_logprobs OUT.json LENGTH DIRECTORY...   (token ids 3, 4, ... are the prompt)
"""

import json
import os
import sys
from pathlib import Path

from slime.backends.sglang_utils.server_args import ENGINE_ENV


def main(out: Path, length: int, directories: list[Path]) -> None:
    """Writes {directory name: log-probs of tokens 1 to LENGTH - 1}."""
    import sglang

    ids = list(range(3, 3 + length))
    result = {}
    for directory in directories:
        engine = sglang.Engine(
            model_path=str(directory),
            dtype="bfloat16",
            mem_fraction_static=0.2,
            disable_cuda_graph=True,
            skip_tokenizer_init=True,
            log_level="warning",
        )
        answer = engine.generate(
            input_ids=ids, sampling_params={"max_new_tokens": 1}, return_logprob=True, logprob_start_len=0
        )
        result[directory.name] = [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]
        engine.shutdown()
    out.write_text(json.dumps(result))


if __name__ == "__main__":  # the engine's own processes import this module as well
    os.environ |= {name: value for name, value in ENGINE_ENV.items() if name not in os.environ}
    main(Path(sys.argv[1]), int(sys.argv[2]), [Path(directory) for directory in sys.argv[3:]])
