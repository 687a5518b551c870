"""`storage_options` of s3fs -> what obstore's S3 store takes. Makes no request of S3.

botocore itself says which endpoint, region, address style and credentials follow from the
options, the environment and the profiles, so that a bucket is the same one with either
client, and credentials of a role are refreshed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidInputError
from kvstore.storage_options import refuse_for_obstore

_OPTIONS = (
    "anon",
    "client_kwargs",
    "config_kwargs",
    "endpoint_url",
    "key",
    "profile",
    "requester_pays",
    "s3_additional_kwargs",
    "secret",
    "token",
)
_CLIENT = ("endpoint_url", "region_name", "verify")
_CONFIG = ("s3",)
_CONFIG_S3 = ("addressing_style", "payload_signing_enabled", "use_dualstack_endpoint")
_ADDITIONAL = {
    "BucketKeyEnabled": "sse_bucket_key_enabled",
    "SSEKMSKeyId": "sse_kms_key_id",
    "ServerSideEncryption": "server_side_encryption",
}

_CREDENTIALS_LAST = timedelta(minutes=5)
"""After this time botocore is asked again; it refreshes those that expire before it."""


def s3_arguments(bucket: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `obstore.store.S3Store`.

    Raises:
        InvalidInputError: an option cannot be honoured, or there are no credentials.
        ImportError: botocore is not installed.
    """
    client_kwargs, s3, additional = _nested(options)
    from botocore import UNSIGNED
    from botocore.config import Config
    from botocore.session import Session

    session = Session(profile=options.get("profile"))
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
        config=Config(signature_version=UNSIGNED if anonymous else "s3v4", s3=s3),
    )
    endpoint = client.meta.endpoint_url.rstrip("/")
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
            **{_ADDITIONAL[name]: value for name, value in additional.items()},
        },
        "client_options": {
            "allow_http": endpoint.startswith("http://"),
            **_certificates(client_kwargs, session.get_config_variable("ca_bundle")),
        },
        "credential_provider": None if anonymous else _provider(credentials),
    }


def _nested(
    options: Mapping[str, Any],
) -> tuple[Mapping[str, Any], dict[str, Any], Mapping[str, Any]]:
    """`client_kwargs`, the `s3` of `config_kwargs`, and `s3_additional_kwargs`."""
    where = "storage_options"
    refuse_for_obstore(options, _OPTIONS, where)
    client_kwargs = options.get("client_kwargs") or {}
    refuse_for_obstore(client_kwargs, _CLIENT, f"{where}.client_kwargs")
    config = options.get("config_kwargs") or {}
    refuse_for_obstore(config, _CONFIG, f"{where}.config_kwargs")
    s3 = config.get("s3") or {}
    refuse_for_obstore(s3, _CONFIG_S3, f"{where}.config_kwargs.s3")
    additional = options.get("s3_additional_kwargs") or {}
    refuse_for_obstore(additional, _ADDITIONAL, f"{where}.s3_additional_kwargs")
    return client_kwargs, dict(s3), additional


def _certificates(client_kwargs: Mapping[str, Any], bundle: str | None) -> dict[str, Any]:
    verify = client_kwargs.get("verify")
    if verify is False:
        return {"allow_invalid_certificates": True}
    path = verify if isinstance(verify, str) else bundle
    return {"root_certificate": Path(path).read_bytes()} if path else {}


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
