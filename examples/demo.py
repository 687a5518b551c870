"""The demo: one engine computes KV, another reuses it, and a wrong layout is refused.

Run by `tox run -e demo`. KVSTORE_URL names the store, a temporary folder by default. Ends
with an error if anything that it claims is not so.
"""

import os
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from engine import Answer, Run, connector, run
from fsspec.core import url_to_fs
from rich.console import Console
from rich.table import Table
from smollm2 import smollm2

from kvstore import BlockStore, Config, Layout, LayoutMismatchError, unpack

console = Console(width=100)
os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' bars would cut the story up
ALICE = Path(__file__).with_name("alice.txt").read_text()
PROMPT = f"{ALICE}\nQuestion: What did the White Rabbit take out of its pocket?\nAnswer:"
BLOCK_TOKENS = 32


def main() -> None:
    """All four acts."""
    url = os.environ.get("KVSTORE_URL")
    folder = None if url else tempfile.mkdtemp(prefix="kvstore-demo-")
    try:
        demo(url or str(folder), str(smollm2()))
    finally:
        if folder is not None:
            shutil.rmtree(folder)


def demo(url: str, model: str) -> None:
    """Run every act against one URL."""
    console.print(f"Store: {url}\nModel: SmolLM2-135M-Instruct on the CPU, bfloat16\n")
    console.print("Starting an engine on the store, asking it twice, stopping it ...")
    request = Run(
        model=model, prompts=[PROMPT], kv_transfer_config=connector(url), warm_up=True
    )
    cold, hit = run(replace(request, prompts=[PROMPT, PROMPT]))
    console.print("Starting another engine on the same store ...\n")
    [warm] = run(request)
    console.print(
        reuse_table(
            {
                "first engine": cold,
                "again, from vLLM's own prefix cache": hit,
                "restarted engine": warm,
            }
        )
    )
    require(warm.token_ids == cold.token_ids, "the token ids are those of the first run")
    require(warm.cached_tokens > 0, "KV was taken from the store")
    require(
        warm.logprobs == hit.logprobs,
        "every logprob is, to the bit, that of vLLM's own prefix cache",
    )
    group = show_block(open_groups(url, model), model, cold.prompt_token_ids)
    show_refusal(url, group)


def reuse_table(answers: dict[str, Answer]) -> Table:
    """What each engine reused, how fast it was, and what it said."""
    table = Table("", "prompt tokens", "reused", "first token", "text")
    for name, answer in answers.items():
        table.add_row(
            name,
            str(len(answer.prompt_token_ids)),
            str(answer.cached_tokens),
            f"{answer.seconds_to_first_token * 1000:.0f} ms",
            answer.text.strip().partition("\n")[0],
        )
    return table


def open_groups(url: str, model: str) -> list[zarr.Group]:
    """The KV group of each of the model's namespaces, opened with plain zarr."""
    filesystem, root = url_to_fs(url)
    return [
        zarr.open_group(filesystem.unstrip_protocol(entry["name"]), path="r0/g0", mode="r")
        for entry in filesystem.ls(root, detail=True)
        if Path(model).name in entry["name"] and entry["type"] == "directory"
    ]


def attributes(node: Any) -> dict[str, Any]:
    """What kvstore recorded of a node."""
    recorded: Any = node.attrs["kvstore"]
    return dict(recorded)


def show_block(groups: list[zarr.Group], model: str, tokens: list[int]) -> zarr.Group:
    """One block by plain zarr, and its K and V beside what transformers computes.

    Returns:
        The group that holds it.
    """
    exact = reference(model, tokens[:BLOCK_TOKENS], "float32")
    rounded = reference(model, tokens[:BLOCK_TOKENS], "bfloat16")
    rounding = distance(rounded, exact)
    error, block, group = min(
        (closest(group, exact) for group in groups), key=lambda found: found[0]
    )
    metadata = block.metadata.to_dict()
    console.print("\nOne block, opened with plain zarr:")
    for name, shown in {
        "array": block.path,
        "axes": dict(zip(metadata["dimension_names"], block.shape, strict=True)),
        "dtype": block.dtype,
        "packing": attributes(block)["packing"],
        "K and V": f"{error:.2%} from transformers' in float32, as transformers' own "
        f"in bfloat16 are {rounding:.2%}",
    }.items():
        console.print(f"  {name:8} {shown}", highlight=False)
    require(error < 1.5 * rounding, "unpacked, K and V are the model's, within rounding")
    return group


def closest(group: zarr.Group, expected: tuple[Any, Any]) -> tuple[float, Any, zarr.Group]:
    """How near to the expected K and V a group's nearest block is, and the block."""
    layout = Layout.from_dict(attributes(group)["layout"], where="layout")
    found = []
    for _, fan_out in group.groups():
        for _, block in fan_out.arrays():
            payload = np.asarray(block[...]).reshape(-1).view(np.uint8)
            found.append((distance(unpack(layout, payload), expected), block, group))
    return min(found, key=lambda near: near[0])


def distance(found: tuple[Any, Any], exact: tuple[Any, Any]) -> float:
    """The larger of K's and V's mean errors, relative to their mean size."""
    return max(
        float(np.abs(ours.astype(np.float32) - theirs).mean() / np.abs(theirs).mean())
        for ours, theirs in zip(found, exact, strict=True)
    )


def reference(model: str, tokens: list[int], dtype: str) -> tuple[Any, Any]:
    """K and V of `tokens` by transformers, each (layer, head, token, value)."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
    with torch.no_grad():
        cache = network(torch.tensor([tokens]), use_cache=True).past_key_values
    return tuple(
        torch.stack([getattr(layer, part)[0] for layer in cache.layers]).float().numpy()
        for part in ("keys", "values")
    )


def show_refusal(url: str, group: zarr.Group) -> None:
    """The other runner's order, same byte count: refused."""
    root = zarr.open_group(group.store_path.store, mode="r")
    config = Config.from_fields(attributes(root)["config"], where="config")
    layout = Layout.from_dict(attributes(group)["layout"], where="layout")
    swapped = tuple({"layer": "head", "head": "layer"}.get(a, a) for a in layout.axes)
    lengths = dict(zip(layout.axes, layout.shape, strict=True))
    other = replace(
        layout,
        axes=swapped,
        shape=tuple(lengths[axis] for axis in swapped),
        runner="v2" if layout.runner == "v1" else "v1",
        kv_cache_layout=None,
    )
    console.print("\nThe other runner's layout, of the same size, on the same store:")
    try:
        BlockStore.open(url, config, other)
    except LayoutMismatchError as error:
        console.print(str(error), highlight=False, soft_wrap=True)
    else:
        require(False, "another layout is refused")
    require(other.nbytes == layout.nbytes, "no size check could have told them apart")


def require(claim: bool, text: str) -> None:
    """Say what holds, or end with an error."""
    if not claim:
        sys.exit(f"FAILED: {text}")
    console.print(f"[green]✓[/green] {text}", highlight=False)


if __name__ == "__main__":
    main()
