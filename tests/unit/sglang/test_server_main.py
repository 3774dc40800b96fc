"""Seeds of list requests: what the server's entry point changes in SGLang's request class, on a class like it."""

import pytest

from slime.backends.sglang_utils.server_main import number_seeds


@pytest.fixture
def request_class():
    class Request:
        """The part of SGLang's GenerateReqInput that concerns sampling parameters."""

        def __init__(self, sampling_params, batch_size, parallel_sample_num=1):
            self.sampling_params, self.batch_size = sampling_params, batch_size
            self.parallel_sample_num = parallel_sample_num

        def _normalize_sampling_params(self, num):
            if isinstance(self.sampling_params, dict):
                self.sampling_params = [self.sampling_params] * num
            else:
                self.sampling_params = self.sampling_params * self.parallel_sample_num

    number_seeds(Request)
    return Request


def normalized(request):
    request._normalize_sampling_params(request.batch_size * request.parallel_sample_num)
    return request.sampling_params


def test_entries_draw_with_seeds_that_count_up(request_class):
    params = {"temperature": 0.5, "sampling_seed": 40}
    entries = normalized(request_class(params, 3))
    assert entries == [{"temperature": 0.5, "sampling_seed": seed} for seed in (40, 41, 42)]
    assert params["sampling_seed"] == 40
    assert [entry["sampling_seed"] for entry in normalized(request_class({"sampling_seed": 0}, 2))] == [0, 1]


def test_requests_without_a_seed_and_lists_of_parameters_stay(request_class):
    for params in ({"temperature": 1.0}, {"sampling_seed": None}):
        assert normalized(request_class(params, 2)) == [params, params]
    own = [{"sampling_seed": 9}, {"sampling_seed": 3}]
    assert normalized(request_class(own, 2)) == own


def test_parallel_samples_keep_one_entry_a_sample(request_class):
    """SGLang orders them prompt after prompt within each round."""
    entries = normalized(request_class({"sampling_seed": 5}, 2, parallel_sample_num=3))
    assert [entry["sampling_seed"] for entry in entries] == [5, 6] * 3
