"""Layer-spec providers of model families: what `--spec module function` of a model script names."""
