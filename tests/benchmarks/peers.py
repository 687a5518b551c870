"""Who is measured: kvstore, and the tiers that can do the same here."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from servers import BUCKET, Server, ServerUnavailable, seaweedfs

from benchmarks.figures import OURS, Results
from benchmarks.process import descendants
from benchmarks.settings import Settings
from benchmarks.tiers import Config

OBJ = "vLLM obj"
FS = "vLLM fs"


def kvstore(storage_options: dict[str, Any] | None = None) -> Config:
    """kvstore's bare tier: what it is given is what the others are given."""

    def config(root: str) -> dict[str, Any]:
        more = {"storage_options": storage_options} if storage_options else {}
        return {"type": "KVStoreTier", "module_path": "kvstore.vllm", "url": root, **more}

    return config


def folder_peers(settings: Settings) -> dict[str, Config]:
    """Tiers that keep blocks in a folder."""
    peers: dict[str, Config] = {
        OURS: kvstore(),
        FS: lambda root: {"type": "fs", "root_dir": root},
    }
    for name, template in settings.tiers.items():
        peers[name] = _filled(json.dumps(template))
    return peers


def _filled(template: str) -> Config:
    def config(root: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(template.replace("{ROOT}", root))
        return found

    return config


@contextmanager
def fresh_folder(parent: Path) -> Iterator[Path]:
    """A folder of its own, removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="kvstore-benchmark-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Bucket:
    """An object store to measure on.

    Attributes:
        name: for the results.
        url: fsspec's, below which everything is put.
        storage_options: fsspec's.
        peers: the tiers that can use it.
        servers: the processes that run it, if this process started them.
    """

    name: str
    url: str
    storage_options: dict[str, Any]
    peers: dict[str, Config]
    servers: frozenset[int] = frozenset()

    def fresh(self) -> str:
        """A prefix of its own."""
        return f"{self.url}/{uuid.uuid4().hex}"


@contextmanager
def bucket(settings: Settings, results: Results) -> Iterator[Bucket | None]:
    """The object store that the settings name, or SeaweedFS; None if there is neither."""
    if settings.bucket is not None:
        options = settings.storage_options
        yield _bucket(
            "bucket",
            Server(
                url=settings.bucket,
                storage_options=options,
                endpoint=options.get("endpoint_url", ""),
            ),
            results,
        )
        return
    if find_spec("s3fs") is None:
        results.note("S3 is left out: s3fs is not installed.")
        yield None
        return
    # In memory where there is room: it is the clients that are measured, not a disk.
    with fresh_folder(settings.memory or settings.disk) as folder:
        before = set(descendants())
        try:
            with seaweedfs(folder) as server:
                started = frozenset(set(descendants()) - before)
                where = "in memory" if settings.memory else "on the disk"
                results.note(
                    f"S3 is SeaweedFS on the same cores as the tiers, its data {where}."
                )
                yield _bucket("S3", server, results, started)
        except ServerUnavailable as reason:
            results.note(f"S3 is left out: {reason}")
            yield None


def _bucket(
    name: str, server: Server, results: Results, servers: frozenset[int] = frozenset()
) -> Bucket:
    peers = {OURS: kvstore(server.storage_options)}
    options = server.storage_options
    if not server.endpoint or not options.get("key"):
        results.note(f"{OBJ} is left out: it needs an endpoint_url, a key and a secret.")
    elif find_spec("nixl") is None:
        results.note(f"{OBJ} is left out: nixl is not installed.")
    else:
        # Without it, NIXL has no transfer times, and the tier fails when it asks.
        os.environ.setdefault("NIXL_TELEMETRY_ENABLE", "y")
        peers[OBJ] = _obj(server)
    return Bucket(name, server.url, options, peers, servers)


def _obj(server: Server) -> Config:
    """vLLM's tier for object stores, over NIXL."""
    name, _, above = server.url.partition("://")[2].partition("/")

    def config(root: str) -> dict[str, Any]:
        prefix = root.removeprefix(f"{server.url}/")
        return {
            "type": "obj",
            "prefix": f"{above}/{prefix}" if above else prefix,
            "store_config": {
                "bucket": name or BUCKET,
                "endpoint_override": server.endpoint,
                "access_key": server.storage_options["key"],
                "secret_key": server.storage_options["secret"],
                "scheme": server.endpoint.partition("://")[0],
            },
        }

    return config
