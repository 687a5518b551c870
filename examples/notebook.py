"""A notebook: the KV of a real model, looked at in Python.

Open it in VS Code or Jupyter (with jupytext), or run it: python examples/notebook.py. It
needs what the demo needs, and xarray. KVSTORE_URL names the store, a temporary folder by
default.
"""

# %% [markdown]
# # What is in a KV cache
#
# An engine reads a page of *Alice in Wonderland*, and what it has computed lies in a store.
# We take a block out of it, find the model's own K and V in it, give it to xarray, torch
# and Zarr, and deal its heads out to three workers. Only the first cell needs an engine.

# %%
import os
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import zarr
from demo import BLOCK_TOKENS, PROMPT, distance, reference
from engine import Run, connector, run
from smollm2 import smollm2

from kvstore.offline import Root
from kvstore.offline.convert import Convert, Converted, claim, plan
from kvstore.offline.shares import run as run_shares
from kvstore.offline.target import Wanted, target_of
from kvstore.offline.views import dataset, kv_tensors, zarr_array

scratch = tempfile.mkdtemp(prefix="kvstore-notebook-")
url = os.environ.get("KVSTORE_URL") or f"{scratch}/kv"
model = str(smollm2())
[answer] = run(Run(model=model, prompts=[PROMPT], kv_transfer_config=connector(url)))
print(f"{len(answer.prompt_token_ids)} tokens of prompt, then:{answer.text!r}")

# %% [markdown]
# ## What lies there
#
# `Root` lists namespaces and groups by their documents; `blocks()` lists without reading.

# %%
[group] = Root(url).groups()
lengths = dict(zip(group.layout.axes, group.layout.shape, strict=True))
print(f"{group.config.model_name}\n{lengths}, {group.layout.dtype}, {group.layout.packing}")
print(f"{sum(1 for _ in group.blocks())} blocks of {group.layout.nbytes} bytes")

# %% [markdown]
# ## One block
#
# `open` reads a block whole and proves it. Keys are hashes, so the block of the prompt's
# beginning is found by its values: the ones that are nearest to what transformers computes
# for these tokens. `keys_and_values` takes K and V out of the tiles that the CPU's
# attention keeps them in.

# %%
opened = [group.open(found.key) for found in group.blocks()]
blocks = [block for block in opened if block is not None]
tokens = answer.prompt_token_ids[:BLOCK_TOKENS]
exact, rounded = (reference(model, tokens, dtype) for dtype in ("float32", "bfloat16"))
first = min(blocks, key=lambda block: distance(block.keys_and_values(), exact))
error, rounding = distance(first.keys_and_values(), exact), distance(rounded, exact)
print(
    f"{first.key.hex()}\n{error:.2%} from float32; transformers' bfloat16: {rounding:.2%}"
)
assert error < 1.5 * rounding

# %% [markdown]
# ## xarray: by name
#
# How far K spreads, by layer and head. xarray computes with few of bfloat16's values, and
# says of equal ones that they are not, so they become float32 first.

# %%
kv = dataset(first).astype("float32")
spread = kv.K.std(("token", "value"))
print(spread.to_pandas().round(2).head())
assert kv.sizes == {"layer": 30, "head": 3, "token": BLOCK_TOKENS, "value": 64}

# %% [markdown]
# ## torch: with the engine's dtype
#
# How alike the keys of neighbouring tokens are, in the first layer.

# %%
keys, content, axes = kv_tensors(first)
print(axes, keys.dtype)
alike = torch.cosine_similarity(keys[0, :, 1:].float(), keys[0, :, :-1].float(), dim=-1)
print(alike.mean(-1))
assert torch.equal(keys.float(), torch.from_numpy(kv.K.values))

# %% [markdown]
# ## Zarr: the same bytes, by any of its tools
#
# `zarr_array` is proved and in memory. zarr-python opens the stored one by its URL as well.

# %%
proved, stored = np.asarray(zarr_array(first)[:]), zarr.open_array(first.url, mode="r")
print(stored.attrs.asdict()["kvstore"])
assert np.asarray(stored[:]).tobytes() == proved.tobytes() == first.payload

# %% [markdown]
# ## Three workers
#
# The same block as an engine of tensor-parallel size 3 has it: one KV head for each worker.

# %%
_, layout = target_of(group.config, group.layout, Wanted(tp=3))
sharded = first.converted(layout)
print(dict(zip(layout.axes, layout.shape, strict=True)))
for worker in range(3):
    theirs = dataset(sharded).astype("float32").isel(worker=worker, head=0)
    assert theirs.equals(kv.isel(head=worker))
assert sharded.converted(group.layout) == first

# %% [markdown]
# ## All blocks
#
# What `kvstore convert` does: the order of vLLM's other model runner, in another folder.
# Each block is proved, converted back, compared, stored, and read again.

# %%
destination = Root(f"{scratch}/converted", read_only=False)
wanted = Wanted(axes=("head", "layer", "packed"), runner="v2")
target = plan(group, destination, wanted)
claim(target)
with ThreadPoolExecutor(2) as pool:
    shares = run_shares(Convert(group, target), group.shares(), pool, ahead=4)
    done = sum((result for _, result in shares), Converted())
print(done)
assert done.converted == len(blocks)
assert all(target.facts(block.key).problem is None for block in blocks)

# %%
shutil.rmtree(scratch)
