"""Tokenizers, multimodal processors, and the pictures they take. transformers is imported only when one is loaded."""

import base64
import io
import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """The Hugging Face tokenizer of a checkpoint."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=True, **kwargs)


def load_processor(name_or_path: str, **kwargs: Any) -> Any | None:
    """The multimodal processor of a checkpoint, or None for a text-only one (transformers then gives a tokenizer)."""
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    try:
        processor = AutoProcessor.from_pretrained(name_or_path, trust_remote_code=True, **kwargs)
    except (OSError, ValueError) as error:  # what transformers raises when no processor class or file fits
        logger.info("no multimodal processor in %s: %s", name_or_path, error)
        return None
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def process_vision_info(messages: list[dict], processor: Any) -> dict | None:
    """The pictures named by the messages' content items: {"images": [PIL.Image, ...]}, or None without any.

    An image item holds a PIL image, a local path, a data URI, raw bytes, or a {"bytes", "path"} pair as parquet
    data sets store it. Raises ValueError for a video or audio item, which no code behind this can feed to an engine.
    """
    images = []
    for message in messages:
        content = message.get("content")
        for item in content if isinstance(content, list) else []:
            match item.get("type"):
                case "image" | "image_url":
                    images.append(_open_image(item.get("image", item.get("image_url"))))
                case "video" | "audio" as kind:
                    raise ValueError(f"{type(processor).__name__}: {kind} inputs are not supported yet, only images")
    return {"images": images} if images else None


def build_processor_kwargs(multimodal_inputs: dict | None) -> dict:
    """Keyword arguments for a processor call: token ids come back as lists, pixel data as torch tensors."""
    tensors = {f"{kind}_kwargs": {"return_tensors": "pt"} for kind in ("images", "videos", "audio")}
    return {**(multimodal_inputs or {}), "text_kwargs": {"return_tensors": None}, **tensors}


def encode_image_for_rollout_engine(image: Any) -> str:
    """A PIL image as PNG data URI, lossless, for the engine's `image_data`."""
    buffer = io.BytesIO()
    (image if image.mode == "RGB" else image.convert("RGB")).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")


def _open_image(source: Any) -> Any:
    """An RGB PIL image. Raises ValueError for an unknown kind of source, OSError for an unreadable picture."""
    from PIL import Image

    if isinstance(source, dict):
        source = next((source[key] for key in ("bytes", "path", "url") if source.get(key) is not None), None)
    if isinstance(source, Image.Image):
        return source.convert("RGB")
    if isinstance(source, str) and source.startswith("data:image"):
        source = base64.b64decode(source.partition(",")[2])
    if isinstance(source, bytes):
        return Image.open(io.BytesIO(source)).convert("RGB")
    if isinstance(source, str | Path) and not str(source).startswith(("http://", "https://")):
        return Image.open(str(source).removeprefix("file://")).convert("RGB")
    raise ValueError(f"an image must be a PIL image, bytes, a data URI or a local path, got {str(source)[:80]!r}")
