"""Make a folder as vLLM's `fs` tier writes it, without vLLM, to try `import-vllm` on.

python examples/vllm_cache.py vllm
"""

import json
import sys
from pathlib import Path

import numpy as np
from cache import LAYOUT, config_of, key_of

from kvstore import Config

MODEL = "org/small"
PAGE = 4096
GROUP_BYTES = 4


def fill(root_dir: str | Path, config: Config | None = None, count: int = 12) -> Path:
    """Some rows of one KV group.

    Args:
        root_dir: the tier's.
        config: of the engine; by default, the first one's of `cache.py`.
        count: how many rows.

    Returns:
        The folder of the rows.
    """
    config = config or config_of(MODEL)
    name = f"{config.model_name.replace('/', '_')}_{config.digest}"
    base = Path(root_dir, name)
    base.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config.fields(), indent=2, sort_keys=True)
    (base / "config.json").write_text(text)
    random = np.random.default_rng(0)
    for number in range(count):
        values = random.standard_normal(LAYOUT.shape).astype("float16")
        file = row_file(base, key_of(MODEL, number))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(padded(values.tobytes()))
    return base.with_name(f"{name}_r0")


def row_file(base: Path, key: bytes) -> Path:
    """Where the row of a key lies, for the folder of `config.json`."""
    digits, group = key[:-GROUP_BYTES].hex(), int.from_bytes(key[-GROUP_BYTES:], "big")
    folder = base.with_name(f"{base.name}_r0")
    return folder / digits[:3] / f"{digits[3:5]}_g{group}" / f"{digits}.bin"


def padded(block: bytes) -> bytes:
    """A row: the block, rounded up to a page."""
    return block + bytes(-len(block) % PAGE)


if __name__ == "__main__":
    fill(sys.argv[1])
