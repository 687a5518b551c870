"""`examine`: whether a URL can be used by an engine, how fast it is, and what to change."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any

from kvstore.client import EXTRAS
from kvstore.errors import FormatError, StorageError
from kvstore.fsspec_client import environment_options
from kvstore.gcs_options import gcs_source
from kvstore.offline.checks import (
    Check,
    Failed,
    Verdict,
    fail,
    failing,
    of_folder,
    ok,
    warn,
)
from kvstore.offline.folder import standing_checks, user_name
from kvstore.offline.root import Root
from kvstore.offline.writing import folder_of, load_checks, write_checks
from kvstore.paths import DOCUMENT
from kvstore.releases import SPAN, installed, supports
from kvstore.s3_options import s3_source
from kvstore.storage_options import secret_strings, without_secrets
from kvstore.upkeep import Upkeep

LIST = "list"
"""The check without which no block is found."""

GROUPS = 200
"""Groups whose documents are read."""


def examine(
    root: Root, storage_options: Mapping[str, Any] | None = None, *, seconds: float = 5.0
) -> Generator[Check, None, None]:
    """Look at all there is, one check after the other, as they are done.

    Args:
        root: opened without `read_only`, unless it is only to be read.
        storage_options: what it was opened with: to say where credentials come from.
        seconds: for which blocks are stored to see how fast that is.
    """
    filesystem = root.filesystem
    yield from _guarded(_credentials(filesystem, storage_options or {}))
    reached = list(_guarded(_reach(filesystem)))
    yield from reached
    if filesystem.local:
        yield from _guarded(_standing(filesystem))
    if all(check.verdict != Verdict.FAIL for check in reached):
        listed = all(check.name != LIST for check in reached)
        if not filesystem.read_only:
            yield from _guarded(write_checks(filesystem, seconds))
        elif listed:
            yield from _guarded(load_checks(root))
        if listed:
            yield from _guarded(_namespaces(root))
    yield _vllm()


def _guarded(checks: Iterator[Check]) -> Iterator[Check]:
    """Checks that build on each other, up to the first that cannot be done."""
    try:
        yield from checks
    except Failed as failed:
        yield failed.check


# ---- what is looked at


def _credentials(filesystem: Upkeep, given: Mapping[str, Any]) -> Iterator[Check]:
    if filesystem.local:
        yield ok("credentials", f"user {user_name(os.geteuid())}")
        return
    protocol = filesystem.url.partition("://")[0]
    options = environment_options(protocol) | dict(given)
    kind = EXTRAS.get(protocol)
    if kind == "s3":
        source = s3_source(options)
    elif kind == "gcs":
        source = gcs_source(options)
    else:
        given_here = any(True for _ in secret_strings(options))
        source = "storage_options" if given_here else f"what fsspec's {protocol} finds"
    _, left_out = without_secrets(given)
    if left_out:
        yield warn(
            "credentials",
            source,
            "An engine's options are seen in its command line: put credentials where the "
            "cloud's own tools find them.",
        )
    else:
        yield ok("credentials", source)


def _reach(filesystem: Upkeep) -> Iterator[Check]:
    began = time.monotonic()
    with failing("reach"):
        filesystem.read(DOCUMENT, 1)
    took = (time.monotonic() - began) * 1e3
    if filesystem.shared:
        yield ok("reach", f"the first answer took {took:,.1f} ms")
    else:
        yield warn(
            "reach", "memory of this process", "No other process sees it: for tests only."
        )
    try:
        filesystem.folders("")
    except StorageError as error:
        advice = "Limits (max_bytes, max_age) and these commands list: allow it for them."
        yield warn(LIST, str(error), advice)


def _standing(filesystem: Upkeep) -> Iterator[Check]:
    root = folder_of(filesystem)
    with of_folder("folder"):
        if not os.path.exists(root):
            found = f"{root} is not there"
            if filesystem.read_only:
                yield warn("folder", found, "Check the path and the mount.")
            else:
                yield ok("folder", f"{found}: the first engine makes it")
        yield from standing_checks(root)


def _namespaces(root: Root) -> Iterator[Check]:
    models, layouts, unreadable, count = set(), set(), [], 0
    with failing("namespaces"):
        for place in itertools.islice(root.places(), GROUPS):
            count += 1
            try:
                group = root.read_group(place)
            except FormatError as error:
                unreadable.append(str(error))
                continue
            models.add(group.namespace)
            layouts.add(group.layout.digest)
    more = "at least " if count == GROUPS else ""
    if not count:
        yield ok("namespaces", "none yet")
        return
    found = (
        f"{more}{len(models)} with {len(layouts)} layouts: {', '.join(sorted(models)[:5])}"
    )
    if unreadable:
        yield warn("namespaces", f"{found}; {unreadable[0]}", "Run kvstore verify.")
    else:
        yield ok("namespaces", found)


def _vllm() -> Check:
    found = installed()
    if found is None:
        return warn("vLLM", "not installed here", f"Engines need vLLM {SPAN}.")
    name, version = found
    if not supports(version):
        return fail("vLLM", f"{name} {version}", f"Install one of {SPAN}.")
    return ok("vLLM", f"{name} {version}")


# ---- what an engine is told


def transfer_config(
    root: Root, storage_options: Mapping[str, Any] | None = None, *, client: str = "obstore"
) -> dict[str, Any]:
    """What vLLM's `--kv-transfer-config` would be, without credentials."""
    extra: dict[str, Any] = {"url": root.filesystem.url}
    options, _ = without_secrets(storage_options or {})
    if options:
        extra["storage_options"] = options
    if client != "obstore":
        extra["client"] = client
    if root.filesystem.read_only:
        extra["read_only"] = True
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
