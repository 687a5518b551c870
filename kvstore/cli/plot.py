"""`plot`: what is in a block."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.heat import heat
from kvstore.cli.options import (
    AsJson,
    ClientOption,
    StorageOptions,
    Timeout,
    Url,
    open_root,
)
from kvstore.cli.output import (
    looks,
    print_json,
    print_line,
    print_picture,
    write_file,
)
from kvstore.errors import FormatError, InvalidInputError, shown
from kvstore.offline.contents import Part, parts_of
from kvstore.offline.figure import draw
from kvstore.offline.group import StoredGroup
from kvstore.offline.root import Root
from kvstore.paths import block_path

Key = Annotated[
    str | None,
    typer.Argument(
        metavar="KEY", help="The block's key, in hex. Left out where URL names a block."
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option(
        "-o",
        "--output",
        metavar="FILE",
        dir_okay=False,
        help="Draw it there with matplotlib: .png, .svg, .pdf. Otherwise the terminal "
        "shows it.",
    ),
]


def plot(
    url: Url,
    key: Key = None,
    output: Picture = None,
    storage_options: StorageOptions = None,
    client: ClientOption = "obstore",
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Show what is in a block: K and V by layer and head. The block is proved first.

    Example: kvstore plot /mnt/kv 0123456789abcdef -o block.png
    """
    root = open_root(url, storage_options, client, timeout)
    wanted = _key(root, key)
    group, payload = _block(root, wanted)
    parts = parts_of(group.layout, payload)
    place = f"{group.url}/{block_path(wanted)}"
    layout = group.layout
    about = f"{group.config.model_name}, {layout.dtype}, {','.join(layout.axes)}"
    if output is not None:
        write_file(output, draw(parts, (about, wanted.hex()), output))
    if as_json:
        told = {"url": place, "config": group.config.fields(), "layout": layout.to_dict()}
        print_json(told | {"parts": [part.to_dict() for part in parts]})
        return
    print_line(place)
    print_line(about)
    if output is None:
        _print(parts)
    else:
        print_line(f"drawn in {output}")


def _key(root: Root, given: str | None) -> bytes:
    within = root.within.key
    if given is None:
        if within is None:
            raise InvalidInputError(
                f"key: expected one, or the URL of a block, found neither.{_example(root)}"
            )
        return within
    try:
        key = bytes.fromhex(given)
    except ValueError:
        key = b""
    if not key:
        raise InvalidInputError(f"key: expected hex digits, found {shown(given)}")
    if within not in (None, key):
        raise InvalidInputError("key: expected none, since the URL names another block")
    return key


def _example(root: Root) -> str:
    for place in root.places():
        try:
            for block in root.read_group(place).blocks():
                return f" There is, for example, {block.key.hex()}"
        except FormatError:
            continue
    return f" {root.filesystem.place(root.within.path)} holds no block"


def _block(root: Root, key: bytes) -> tuple[StoredGroup, bytes]:
    """The group that holds the block, and its bytes, proved."""
    found, unreadable = [], []
    for place in root.places():
        try:
            group = root.read_group(place)
        except FormatError as error:
            unreadable.append(error)
            continue
        payload = group.load(key)
        if payload is not None:
            found.append((group, payload))
        if len(found) > 1:
            paths = " and ".join(group.path for group, _ in found)
            raise InvalidInputError(
                f"url: expected one block of this key, found one in {paths}: name the group"
            )
    if found:
        return found[0]
    if unreadable:
        raise unreadable[0]
    where = root.filesystem.place(root.within.path)
    raise InvalidInputError(f"key: expected a block, found none of {key.hex()} at {where}")


def _print(parts: tuple[Part, ...]) -> None:
    coloured, width = looks()
    for part in parts:
        print_picture(heat(part, coloured=coloured, width=width))
