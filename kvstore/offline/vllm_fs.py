"""The folder that vLLM's `fs` tier writes: which rows it holds, and what it tells of them.

    <root_dir>/<model>_<digest>/config.json
    <root_dir>/<model>_<digest>_r<rank>/<hhh>/<hh>_g<group>/<block hash in hex>.bin

Only `config.json` tells anything of the rows. It is believed if its fields are the ones
that named its folder.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, replace

from kvstore import local
from kvstore.arrays import MAX_DOCUMENT_BYTES
from kvstore.config import Config, hub_snapshot
from kvstore.errors import FormatError, InvalidInputError, shown
from kvstore.offline.shares import WIDTH, Share
from kvstore.offline.vllm_rows import FAN_OUT, reading
from kvstore.records import refuse_unknown

CONFIG = "config.json"
TOLD = (
    *("model_name", "tokens_per_hash", "blocks_per_file"),
    *("tp_size", "pp_size", "pcp_size", "dcp_size", "dtype", "kv_cache_groups"),
    *("inference_engine", "parallel_agnostic", "replicated_layout", "canonical_format"),
)
"""The fields of a config that vLLM records."""

MAX_TOLD = 5
"""Folders that a message names, where one was meant."""


@dataclass(frozen=True, slots=True)
class VllmCache:
    """What one engine configuration of vLLM wrote.

    Attributes:
        rows: the folder of the rows, absolute.
        config: what `config.json` records. If `parallel_agnostic`, it tells no sizes: vLLM
            took the rows for the same under all of them.
    """

    rows: str
    config: Config

    @classmethod
    def find(cls, folder: str | os.PathLike[str]) -> VllmCache:
        """Read what is recorded at a `root_dir`, or at the folder of `config.json` in it.

        Raises:
            InvalidInputError: there is no such cache, or there are several; or there are
                rows that no engine on kvstore would ask for.
            FormatError: `config.json` is not as vLLM writes it, or another folder's.
            StorageError: the folder cannot be read.
        """
        base = _base(os.path.abspath(folder))
        config = _recorded(base)
        parent, name = os.path.split(base)
        with reading(parent):
            ranks = sorted(
                entry[len(name) + 2 :]
                for entry in os.listdir(parent)
                if re.fullmatch(rf"{re.escape(name)}_r[0-9]+", entry)
            )
        if ranks != ["0"]:
            found = ", ".join(f"_r{rank}" for rank in ranks[:MAX_TOLD]) or "none"
            raise InvalidInputError(
                f"rank: expected rows in {shown(name + '_r0')} alone, found {found}. Rows "
                "of another rank are of one of several schedulers, each of which has kept "
                "its own workers' part; an engine on kvstore asks for whole rows"
            )
        rows = f"{base}_r0"
        if (kind := local.kind(rows)) != "a folder":
            raise InvalidInputError(
                f"dir: expected a folder of rows, found {kind} at {shown(rows)}"
            )
        return cls(rows, config)

    def shares(self, label: str) -> tuple[list[Share], list[str]]:
        """The fan-outs that are there, in shares that begin at the same places whatever is
        there; and the names beside them that vLLM did not give.

        Args:
            label: the folder that the shares are called by.

        Raises:
            StorageError: the folder cannot be read.
        """
        with reading(self.rows):
            names = os.listdir(self.rows)
        starts = {int(n, 16) // WIDTH * WIDTH for n in names if FAN_OUT.fullmatch(n)}
        strays = sorted(name for name in names if not FAN_OUT.fullmatch(name))
        return [Share(label, at, at + WIDTH) for at in sorted(starts)], strays


def _base(folder: str) -> str:
    """The folder of `config.json`: this one, or the only one in it."""
    if os.path.lexists(f"{folder}/{CONFIG}"):
        return folder
    if not os.path.isdir(folder):
        raise InvalidInputError(f"dir: expected a folder, found none at {shown(folder)}")
    with reading(folder):
        names = [
            name
            for name in sorted(os.listdir(folder))
            if os.path.lexists(f"{folder}/{name}/{CONFIG}")
        ]
    if len(names) != 1:
        found = ", ".join(map(shown, names[:MAX_TOLD])) or "none"
        raise InvalidInputError(
            f"dir: expected the root_dir of vLLM's fs tier with one {CONFIG} below it, or "
            f"the folder that holds it, found {found} in {shown(folder)}"
        )
    return f"{folder}/{names[0]}"


def _recorded(base: str) -> Config:
    """What `config.json` records, if it is the one that named the folder."""
    place = f"{base}/{CONFIG}"
    try:
        with reading(place):
            text = local.read(place, MAX_DOCUMENT_BYTES + 1)
        if len(text) > MAX_DOCUMENT_BYTES:
            raise InvalidInputError(f"expected {MAX_DOCUMENT_BYTES} bytes, found more")
        data = json.loads(text)
        if isinstance(data, dict):
            refuse_unknown(data, TOLD, where=CONFIG)
        config = Config.from_fields(data, where=CONFIG)
        if config.fields() != data:
            raise InvalidInputError("expected every field that vLLM writes, found fewer")
    except (ValueError, RecursionError) as error:
        raise FormatError(place, f"not as vLLM writes it: {error}") from error
    name = f"{config.model_name.replace('/', '_')}_{config.digest}"
    if os.path.basename(base) != name:
        raise FormatError(
            place,
            f"expected to be in a folder called {shown(name)}, which its fields have the "
            "digest of: it is another folder's, or was changed",
        )
    return _by_hub_name(config)


def _by_hub_name(config: Config) -> Config:
    """Offline, vLLM names a model by its place in the hub's cache; an engine on kvstore
    then records the hub's name and commit.
    """
    if (snapshot := hub_snapshot(config.model_name)) is None:
        return config
    return replace(config, model_name=snapshot.name, revision=snapshot.commit)
