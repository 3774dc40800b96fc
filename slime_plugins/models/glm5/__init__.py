"""Sparse latent attention (DSA): DeepSeek-V3.2, GLM-5, GLM-5.2."""
