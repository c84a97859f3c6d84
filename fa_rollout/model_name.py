"""Names of models on Hugging Face's hub, given where a local folder is wanted."""

import re
from pathlib import Path

_SITES = ("https://huggingface.co/", "https:/huggingface.co/", "hf.co/", "hf://", "hf:/")
"""A path that was made of an address has one slash less."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def name_of(text: str) -> str | None:
    """The model that is meant; None where the text looks like a path, or is one here."""
    name = next((text.removeprefix(site) for site in _SITES if text.startswith(site)), text).rstrip("/")
    if _NAME.fullmatch(name) is None or Path(text).exists():
        return None
    return name if name != text or not Path(text).parent.is_dir() else None


def download(name: str) -> str:
    """The command that makes a folder of it."""
    return f"hf download {name} --local-dir {name.rpartition('/')[2]}"
