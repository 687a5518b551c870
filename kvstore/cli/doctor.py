"""`doctor`: whether a URL can be used, and what to change."""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
from collections.abc import Iterator
from typing import Annotated

import typer

from kvstore.cli.codes import FOUND
from kvstore.cli.options import (
    AsJson,
    ClientOption,
    StorageOptions,
    Timeout,
    Url,
    open_root,
    parse_storage_options,
)
from kvstore.cli.output import print_json, print_line
from kvstore.offline.checks import Check, Verdict
from kvstore.offline.doctor import examine, transfer_config

Seconds = Annotated[
    float,
    typer.Option("--seconds", min=0.0, max=600.0, help="For which blocks are stored."),
]
ReadOnly = Annotated[
    bool,
    typer.Option("--read-only", help="Write nothing: for engines that only load."),
]


def doctor(
    url: Url,
    seconds: Seconds = 5.0,
    read_only: ReadOnly = False,
    storage_options: StorageOptions = None,
    client: ClientOption = "obstore",
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Say whether an engine can use URL, how fast it is, what to change, and vLLM's config.

    Nothing is left there.

    Example: kvstore doctor s3://bucket/kv
    """
    root = open_root(url, storage_options, client, timeout, read_only=read_only)
    options = parse_storage_options(storage_options)
    checks = []
    with _ending(), contextlib.closing(examine(root, options, seconds=seconds)) as found:
        for check in found:
            checks.append(check)
            if not as_json:
                _tell(check)
    config = transfer_config(root, options, client=client)
    if as_json:
        told = [check.to_dict() for check in checks]
        print_json(
            {"url": root.filesystem.url, "checks": told, "kv_transfer_config": config}
        )
    else:
        print_line("")
        print_line(
            f"vllm serve MODEL --kv-transfer-config {shlex.quote(json.dumps(config))}"
        )
    if any(check.verdict == Verdict.FAIL for check in checks):
        raise typer.Exit(FOUND)


@contextlib.contextmanager
def _ending() -> Iterator[None]:
    """Let SIGINT and SIGTERM end the work by an exception, so that what it wrote goes. A
    second one ends the process at once.
    """
    before = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM)
        if (handler := signal.getsignal(number)) != signal.SIG_IGN
    }

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def end(number: int, _: object) -> None:
        restore()
        raise SystemExit(128 + number)

    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        restore()


def _tell(check: Check) -> None:
    print_line(f"{check.verdict:4}  {check.name:17}  {check.found}")
    if check.advice:
        print_line(f"{'':25}{check.advice}")
