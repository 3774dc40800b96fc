"""How many samples a second the rollout client can handle when the engine costs (almost) nothing: run it as a script.

The fake engine runs in a process of its own; the client's own CPU time per sample is what matters, as both may share
cores.
"""

import argparse
import logging
import multiprocessing
import time
from multiprocessing.connection import Connection

from slime.rollout import generate_state
from slime.rollout.base_types import flatten_samples
from slime.rollout.sglang_rollout import generate_rollout
from slime.rollout.train_data import convert_samples_to_train_data, split_train_data_by_dp
from slime.utils.http_utils import init_http_client
from tests.helpers.fake_generation_engine import FakeEngine, Reply
from tests.helpers.rollout_args import CharTokenizer, ListSource, groups_of, rollout_args


def serve(connection: Connection, response_length: int) -> None:
    with FakeEngine(reply=lambda *_: Reply([7] * response_length)) as engine:
        connection.send(engine.url)
        connection.recv()


def measure(url: str, name: str, num_groups: int, group_size: int, **changes) -> None:
    args = rollout_args(
        url, rollout_batch_size=num_groups, over_sampling_batch_size=num_groups, n_samples_per_prompt=group_size,
        sglang_server_concurrency=512, rollout_max_response_len=100_000, **changes,
    )  # fmt: skip
    generate_state.GenerateState.clear_all_instances()
    init_http_client(args)
    best = float("inf")
    for rollout_id in range(4):
        source = ListSource(groups_of([f"what is {i}?" for i in range(num_groups)], group_size))
        start, cpu = time.perf_counter(), time.process_time()
        output = generate_rollout(args, rollout_id, source)
        best = min(best, time.perf_counter() - start)
        cpu = time.process_time() - cpu
    total = num_groups * group_size
    print(f"{name:<44} {total / best:8.0f} samples/s   {1e6 * cpu / total:6.0f} us client CPU a sample")
    samples = flatten_samples(output.samples)
    start = time.perf_counter()
    data = convert_samples_to_train_data(args, samples)
    converted = time.perf_counter()
    for key, value in {"global_batch_size": total, "micro_batch_size": 1, "use_dynamic_batch_size": True}.items():
        setattr(args, key, value)
    args.max_tokens_per_gpu, args.balance_data, args.balance_by_flops = 200_000, False, False
    parallel = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    split_train_data_by_dp(args, data, parallel)
    print(f"    conversion {1e3 * (converted - start):.0f} ms, split {1e3 * (time.perf_counter() - converted):.0f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--response-length", type=int, default=5)
    response_length = parser.parse_args().response_length
    logging.disable(logging.WARNING)
    generate_state.load_tokenizer = lambda *_, **__: CharTokenizer()
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, response_length))
    server.start()
    url = ours.recv()
    try:
        measure(url, "64 groups of 8, one request a group", 64, 8)
        measure(url, "64 groups of 8, with seeds", 64, 8, sglang_enable_deterministic_inference=True)
        measure(url, "512 groups of 1", 512, 1)
    finally:
        ours.send("stop")
        server.join(10)


if __name__ == "__main__":
    main()
