"""An SFTP server over a folder of this machine."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import paramiko

USER, PASSWORD = "test-user", "test-password"


class _Login(paramiko.ServerInterface):  # type: ignore[misc]  # paramiko has no types
    def check_auth_password(self, username: str, password: str) -> Any:
        known = (username, password) == (USER, PASSWORD)
        return paramiko.AUTH_SUCCESSFUL if known else paramiko.AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> Any:
        return paramiko.OPEN_SUCCEEDED

    def get_allowed_auths(self, username: str) -> str:
        return "password"


class _File(paramiko.SFTPHandle):  # type: ignore[misc]
    def stat(self) -> Any:
        return paramiko.SFTPAttributes.from_stat(os.fstat(self.readfile.fileno()))


def _answer(call: Callable[[], Any]) -> Any:
    try:
        found = call()
    except OSError as error:
        return paramiko.SFTPServer.convert_errno(error.errno)
    return paramiko.SFTP_OK if found is None else found


class _Files(paramiko.SFTPServerInterface):  # type: ignore[misc]
    def list_folder(self, path: str) -> Any:
        return _answer(
            lambda: [
                paramiko.SFTPAttributes.from_stat(entry.stat(), entry.name)
                for entry in os.scandir(path)
            ]
        )

    def stat(self, path: str) -> Any:
        return _answer(lambda: paramiko.SFTPAttributes.from_stat(os.stat(path)))

    def open(self, path: str, flags: int, attr: object) -> Any:
        def opened() -> Any:
            file = _File(flags)
            mode = "wb" if flags & os.O_WRONLY else "rb"
            file.readfile = file.writefile = os.fdopen(os.open(path, flags, 0o666), mode)
            return file

        return _answer(opened)

    def remove(self, path: str) -> Any:
        return _answer(lambda: os.remove(path))

    def mkdir(self, path: str, attr: object) -> Any:
        return _answer(lambda: os.mkdir(path))

    def rmdir(self, path: str) -> Any:
        return _answer(lambda: os.rmdir(path))


@contextmanager
def sftp() -> Iterator[int]:
    """The port of a server for `USER`."""
    key = paramiko.ECDSAKey.generate()
    transports: list[Any] = []

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            transport = paramiko.Transport(connection)
            transports.append(transport)
            transport.add_server_key(key)
            transport.set_subsystem_handler("sftp", paramiko.SFTPServer, _Files)
            transport.start_server(server=_Login(), event=threading.Event())

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for transport in transports:
                transport.close()
