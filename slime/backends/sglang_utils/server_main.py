"""Entry point of a server process: `sglang.launch_server`, whose list requests give every entry a seed of its own.

SGLang gives all entries of a list one set of sampling parameters, so equal prompts with a `sampling_seed` get equal
responses. SGLang takes a list of parameters too, but the router in front of it does not (sglang-router 0.3.2), and a
request per sample costs more than generating a short response. Here entry i of a list draws with `sampling_seed` + i.
Not needed any more once the router forwards lists of sampling parameters.
"""

import os
import sys


def number_seeds(request_class: type) -> None:
    """request_class: SGLang's GenerateReqInput, whose list requests are changed; single ones stay as they are."""
    normalize = request_class._normalize_sampling_params

    def _normalize_sampling_params(self, num: int) -> None:
        params = self.sampling_params
        if isinstance(params, dict) and params.get("sampling_seed") is not None:
            first = params["sampling_seed"]
            self.sampling_params = [params | {"sampling_seed": first + i} for i in range(self.batch_size)]
        normalize(self, num)

    request_class._normalize_sampling_params = _normalize_sampling_params


def main(argv: list[str]) -> None:
    """What `python -m sglang.launch_server` does."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        run_server(prepare_server_args(argv))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ in ("__main__", "__mp_main__"):  # the latter: SGLang's further tokenizer processes
    import sglang.launch_server  # noqa: F401  (first, as SGLang itself does it)
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    from slime.backends.sglang_utils.draft_weights import reach_draft

    number_seeds(GenerateReqInput)
    reach_draft(SchedulerWeightUpdaterManager)

if __name__ == "__main__":
    main(sys.argv[1:])
