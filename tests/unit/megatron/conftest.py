"""Files that need Megatron adapted to the CPU in pytest's own process run in one apart: see test_apart.py."""

collect_ignore = ["test_glm5_layer.py", "test_glm5_ties.py"]  # of a directory; named by its path a file runs as ever
