"""`storage_options` of s3fs -> what obstore's S3 store takes. Makes no request of S3.

botocore itself says which endpoint, region, address style and credentials follow from the
options, the environment and the profiles, so that a bucket is the same one with either
client, and credentials of a role are refreshed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidInputError
from kvstore.storage_options import S3_KINDS, refuse_for_obstore, require_http

_ADDITIONAL = {
    "BucketKeyEnabled": "sse_bucket_key_enabled",
    "SSEKMSKeyId": "sse_kms_key_id",
    "ServerSideEncryption": "server_side_encryption",
}

_NOBODY = dict.fromkeys(("aws_access_key_id", "aws_secret_access_key"), "")
"""Without it, obstore would look for a pair in the environment, and refuse half of one."""

_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"

_CREDENTIALS_LAST = timedelta(minutes=5)
"""After this time botocore is asked again; it refreshes those that expire before it."""


def s3_arguments(bucket: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `obstore.store.S3Store`.

    Raises:
        InvalidInputError: an option cannot be honoured, or there are no credentials.
        ImportError: botocore is not installed.
    """
    refuse_for_obstore(options, S3_KINDS, "storage_options")
    client_kwargs = options.get("client_kwargs") or {}
    s3 = (options.get("config_kwargs") or {}).get("s3") or {}
    additional = options.get("s3_additional_kwargs") or {}
    from botocore import UNSIGNED
    from botocore.config import Config

    session = _session(options)
    if options.get("key") or options.get("secret"):
        if not (options.get("key") and options.get("secret")):
            raise InvalidInputError("storage_options: key and secret belong together")
        session.set_credentials(options["key"], options["secret"], options.get("token"))
    anonymous = bool(options.get("anon"))
    credentials = None if anonymous else session.get_credentials()
    if credentials is None and not anonymous:
        raise InvalidInputError(
            "storage_options: found no credentials for S3, there or in the environment: "
            'set key and secret, or "anon": true for a public endpoint'
        )
    client = session.create_client(
        "s3",
        region_name=client_kwargs.get("region_name"),
        endpoint_url=options.get("endpoint_url") or client_kwargs.get("endpoint_url"),
        config=Config(signature_version=UNSIGNED if anonymous else "s3v4", s3=dict(s3)),
    )
    endpoint = require_http(client.meta.endpoint_url, "the environment's endpoint of S3")
    # Whether the bucket is part of the host name is told by an object's URL.
    url = client.generate_presigned_url("get_object", {"Bucket": bucket, "Key": "key"})
    if virtual := f"://{bucket}." in url:
        endpoint = endpoint.replace("://", f"://{bucket}.", 1)
    return {
        "config": {
            # Each is set, or obstore would look for it in variables of its own.
            "aws_endpoint_url_s3": endpoint,
            "conditional_put": "etag",
            "disable_bulk_delete": True,
            "region": client.meta.region_name,
            "request_payer": bool(options.get("requester_pays")),
            "skip_signature": anonymous,
            # The signature covers the rest; the bytes have a checksum of their own, and a
            # SHA-256 of them costs as much as all else.
            "unsigned_payload": not s3.get("payload_signing_enabled", False),
            "virtual_hosted_style_request": virtual,
            **(_NOBODY if anonymous else {}),
            **{_ADDITIONAL[name]: value for name, value in additional.items()},
        },
        "client_options": {
            "allow_http": endpoint.startswith("http://"),
            **_certificates(client_kwargs, session.get_config_variable("ca_bundle")),
        },
        "credential_provider": None if anonymous else _provider(credentials),
    }


def _session(options: Mapping[str, Any]) -> Any:
    """botocore's, of the profile that the options name, if any."""
    from botocore.session import Session

    session = Session(profile=options.get("profile"))
    loader = _loader(session.get_config_variable("data_path"))
    session.register_component("data_loader", loader)
    return session


@cache
def _loader(data_path: str | None) -> Any:
    """botocore's descriptions of S3 and of its endpoints.

    It keeps what it has read. Each session would read them anew: a third of a second.
    """
    from botocore.loaders import create_loader

    return create_loader(data_path)


_SOURCES = {
    "env": "environment variables",
    "shared-credentials-file": "the shared credentials file",
    "config-file": "the config file",
    "iam-role": "the machine's role",
    "container-role": "the container's role",
    "assume-role": "an assumed role",
    "assume-role-with-web-identity": "a web identity",
    "sso": "single sign-on",
    "custom-process": "a process of the config file",
}


def s3_source(options: Mapping[str, Any]) -> str:
    """Where credentials come from, without a word of them.

    Raises:
        ImportError: botocore is not installed.
    """
    if options.get("anon"):
        return "none: anonymous"
    if options.get("key"):
        return "storage_options"
    session = _session(options)
    credentials = session.get_credentials()
    if credentials is None:
        return "none were found"
    source = _SOURCES.get(credentials.method, str(credentials.method))
    profile = session.get_config_variable("profile")
    return f"{source}, profile {profile}" if profile else source


def _certificates(client_kwargs: Mapping[str, Any], bundle: str | None) -> dict[str, Any]:
    verify = client_kwargs.get("verify")
    if verify is False:
        return {"allow_invalid_certificates": True}
    given = isinstance(verify, str)
    path = verify if given else bundle
    if not path:
        return {}
    where = "storage_options.client_kwargs.verify" if given else "AWS_CA_BUNDLE"
    try:
        certificates = Path(path).read_bytes()
    except OSError as error:
        raise InvalidInputError(
            f"{where}: expected a file of certificates that can be read, found {path!r}: "
            f"{error.strerror}"
        ) from error
    if _CERTIFICATE not in certificates:
        raise InvalidInputError(
            f"{where}: expected certificates in PEM format, found none in {path!r}"
        )
    return {"root_certificate": certificates}


def _provider(credentials: Any) -> Callable[[], dict[str, Any]]:
    def provide() -> dict[str, Any]:
        frozen = credentials.get_frozen_credentials()
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_LAST,
        }

    return provide
