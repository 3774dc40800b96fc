"""Packaging of slime. The versions pinned here are the ones the tests run with; `requirements.lock` is compiled from them."""

from pathlib import Path

from setuptools import find_packages, setup

REQUIREMENTS = [
    "torch==2.11.0",
    "megatron-core==0.19.2",
    "sglang==0.5.17",
    "sglang-router==0.3.2",
    "ray[default]==2.60.*",
    "mbridge==0.15.1",
    "transformers==5.12.1",
    "safetensors",
    "psutil",
    "einops",
    "numpy",
    "httpx",
    "aiohttp",
    "pyyaml",
    "rich",
    "matplotlib",
    "pyarrow",
    "sympy",
]

EXTRAS = {
    "te": ["transformer-engine[pytorch]"],
    "flash-attn": ["flash-attn"],
    "wandb": ["wandb"],
    "test": ["pytest>=8", "pytest-timeout", "hypothesis", "ruff"],
    "docs": ["mkdocs-material"],
}

setup(
    name="slime",
    version="0.3.1",
    description="An RL post-training framework for large language models: Megatron-core trains, SGLang generates, Ray orchestrates.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_packages(include=["slime*", "slime_plugins*"]),
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
)
