"""`storage_options` of gcsfs -> what obstore's GCS store takes.

Credentials come from google-auth, as with gcsfs: application default credentials of every
kind, and they are refreshed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import UTC
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidInputError, shown
from kvstore.storage_options import GCS_KINDS, refuse_for_obstore, require_http

_GOOGLE = "https://storage.googleapis.com"
_SCOPES = ("https://www.googleapis.com/auth/devstorage.read_write",)
_NO_EMULATOR = ("", "default", "unset")
_INTERACTIVE = ("browser", "cache")


def gcs_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `obstore.store.GCSStore`.

    Raises:
        InvalidInputError: an option cannot be honoured, or there are no credentials.
        ImportError: google-auth or requests is not installed.
    """
    refuse_for_obstore(options, GCS_KINDS, "storage_options")
    endpoint = _endpoint(options.get("endpoint_url"))
    token = options.get("token")
    return {
        "config": {
            # Each is set, or obstore would look for it in variables of its own.
            "base_url": endpoint,
            "skip_signature": token == "anon",
        },
        "client_options": {"allow_http": endpoint.startswith("http://")},
        "credential_provider": _nobody if token == "anon" else _provider(token),
    }


def gcs_source(options: Mapping[str, Any]) -> str:
    """Where credentials come from, without a word of them.

    Raises:
        InvalidInputError: there are none.
        ImportError: google-auth is not installed.
    """
    token = options.get("token")
    if token == "anon":
        return "none: anonymous"
    if token == "cloud":
        return "the machine's service account"
    if token not in (None, "google_default"):
        given = "a file named there" if isinstance(token, str) else "an object"
        return f"storage_options.token: {given}"
    if os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return "the file that GOOGLE_APPLICATION_CREDENTIALS names"
    kind = type(_credentials(token))
    if kind.__module__.startswith("google.auth.compute_engine"):
        return "the machine's service account"
    return f"application default credentials of gcloud ({kind.__name__})"


def _nobody() -> dict[str, Any]:
    # Without a provider obstore would look for a token to write with, unsigned or not.
    return {"token": "", "expires_at": None}


def _endpoint(given: str | None) -> str:
    """As gcsfs finds it."""
    if given:
        return require_http(given, "storage_options.endpoint_url")
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    if emulator in _NO_EMULATOR:
        return _GOOGLE
    host = emulator if "://" in emulator else f"http://{emulator}"
    return require_http(host, "STORAGE_EMULATOR_HOST")


def _provider(token: Any) -> Callable[[], dict[str, Any]]:
    from google.auth.transport.requests import Request

    credentials, request = _credentials(token), Request()

    def provide() -> dict[str, Any]:
        if not credentials.valid:
            credentials.refresh(request)
        expiry = credentials.expiry  # in UTC, without saying so
        return {
            "token": credentials.token,
            "expires_at": expiry and expiry.replace(tzinfo=UTC),
        }

    return provide


def _credentials(token: Any) -> Any:
    import google.auth
    from google.auth.compute_engine import Credentials
    from google.auth.exceptions import GoogleAuthError

    if isinstance(token, str) and token in _INTERACTIVE:
        raise InvalidInputError(
            f"storage_options.token: {token!r} is gcsfs's own: choose gcsfs with "
            '"client": "fsspec"'
        )
    try:
        if token is None or token == "google_default":
            return google.auth.default(scopes=_SCOPES)[0]
        if token == "cloud":
            return Credentials(scopes=_SCOPES)
        if isinstance(token, str | os.PathLike):
            token = json.loads(Path(token).expanduser().read_bytes())
        if isinstance(token, Mapping):
            return _of_key(dict(token))
    except InvalidInputError:
        raise
    except (GoogleAuthError, OSError, ValueError) as error:
        # Their own words may quote the file.
        raise InvalidInputError(
            f"storage_options.token: found no credentials for Google Cloud Storage "
            f"({type(error).__name__}): give the path of a service account's JSON file, "
            'or "anon" for a public endpoint'
        ) from None
    raise InvalidInputError(
        "storage_options.token: expected a path, an object, 'google_default', 'cloud' or "
        f"'anon', found {type(token).__name__}"
    )


def _of_key(key: dict[str, Any]) -> Any:
    """Credentials of what a JSON file of Google's holds."""
    from google.oauth2 import credentials, service_account

    if key.get("type") == "service_account":
        return service_account.Credentials.from_service_account_info(key, scopes=_SCOPES)
    if key.get("type") == "authorized_user":
        return credentials.Credentials.from_authorized_user_info(key, scopes=_SCOPES)
    raise InvalidInputError(
        "storage_options.token: expected the type 'service_account' or 'authorized_user', "
        f"found {shown(key.get('type'))}: name a file of another type in "
        "GOOGLE_APPLICATION_CREDENTIALS"
    )
