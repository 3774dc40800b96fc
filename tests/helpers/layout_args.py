"""A namespace with the flags that pipeline layouts read, at Megatron's defaults."""

from argparse import Namespace


def layout_args(**changes) -> Namespace:
    """`changes` win; GLM-5.2 has dsa_indexer_topk=2048, dsa_indexer_topk_freq=4, dsa_indexer_skip_topk_offset=3."""
    values = {
        "num_layers": 12,
        "pipeline_model_parallel_size": 1,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "num_layers_per_virtual_pipeline_stage": None,
        "num_virtual_stages_per_pipeline_rank": None,
        "pipeline_model_parallel_layout": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "overlap_p2p_comm": True,
        "mtp_num_layers": None,
        "experimental_attention_variant": None,
        "dsa_indexer_topk": None,
        "dsa_indexer_topk_freq": 1,
        "dsa_indexer_skip_topk_offset": 0,
    }
    return Namespace(**{**values, **changes})
