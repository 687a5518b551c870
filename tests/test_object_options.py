"""What people write for s3fs and gcsfs means the same to obstore, or is refused."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import InvalidInputError, StorageError
from kvstore.filesystem import Filesystem
from kvstore.gcs_options import gcs_arguments
from kvstore.s3_options import s3_arguments
from kvstore.storage_options import hold_credentials

pytest.importorskip("obstore", reason="the extras s3 and gcs are not installed")
KEYS = {"key": "AKIA", "secret": "wJalrXUtnFEMI"}
BROKEN = {
    "type": "service_account",
    "client_email": "me@example.com",
    "private_key": "wJalrXUtnFEMI",
    "token_uri": "https://oauth2.googleapis.com/token",
}
PEM = b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
USER = {
    "type": "authorized_user",
    "client_id": "id",
    "client_secret": "wJalrXUtnFEMI",
    "refresh_token": "refresh",
}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings but a test's own."""
    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE_", "STORAGE_EMULATOR", "CLOUDSDK")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("NO_GCE_CHECK", "true")


@pytest.mark.parametrize(
    ("options", "held"),
    [
        ({}, False),
        (KEYS, True),
        ({"account_key": "secret"}, True),
        ({"key": None, "token": ""}, False),
        ({"profile": "mine", "s3_additional_kwargs": {"SSEKMSKeyId": "arn:x"}}, False),
        ({"token": "anon"}, True),
        ({"anon": True}, True),
        ({"anon": False}, False),
        ({"token": "google_default"}, False),
        ({"token": "/run/secrets/key.json"}, False),
        ({"token": BROKEN}, True),
    ],
)
def test_credentials_that_stand_in_the_options_cannot_change(
    options: dict[str, Any], held: bool
) -> None:
    assert hold_credentials(options) == held


class TestS3:
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("botocore", reason="the extra s3 is not installed")

    def config(self, options: dict[str, Any], bucket: str = "bucket") -> dict[str, Any]:
        """The store's config, which obstore takes."""
        from obstore.store import S3Store

        arguments = s3_arguments(bucket, options)
        S3Store(bucket, **arguments)
        config: dict[str, Any] = arguments["config"]
        return config

    def test_credentials(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of the options alone, though the environment has a token of others."""
        monkeypatch.setenv("AWS_SESSION_TOKEN", "of others")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "others")
        provided = s3_arguments("bucket", KEYS)["credential_provider"]()
        assert provided["access_key_id"] == "AKIA"
        assert provided["secret_access_key"] == "wJalrXUtnFEMI"
        assert provided["token"] is None
        provided = s3_arguments("bucket", KEYS | {"token": "ours"})["credential_provider"]()
        assert provided["token"] == "ours"

    def test_credentials_of_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
        provided = s3_arguments("bucket", {})["credential_provider"]()
        assert (provided["access_key_id"], provided["token"]) == ("AKIA", "token")

    @pytest.mark.parametrize("by", ["option", "variable"])
    def test_profile(
        self, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "config"
        file.write_text(
            "[profile work]\nregion = eu-central-1\nendpoint_url = https://s3.example.com\n"
            "aws_access_key_id = AKIA\naws_secret_access_key = secret\n"
        )
        monkeypatch.setenv("AWS_CONFIG_FILE", str(file))
        if by == "variable":
            monkeypatch.setenv("AWS_PROFILE", "work")
        options = {"profile": "work"} if by == "option" else {}
        assert s3_arguments("bucket", options)["credential_provider"]()["access_key_id"]
        config = self.config(options)
        assert config["region"] == "eu-central-1"
        assert config["aws_endpoint_url_s3"] == "https://s3.example.com"

    @pytest.mark.parametrize(
        ("options", "bucket", "endpoint", "region"),
        [
            ({}, "bucket", "https://bucket.s3.amazonaws.com", "us-east-1"),
            ({}, "a.b", "https://s3.amazonaws.com", "us-east-1"),
            (
                {"client_kwargs": {"region_name": "eu-central-1"}},
                "bucket",
                "https://bucket.s3.eu-central-1.amazonaws.com",
                "eu-central-1",
            ),
            (
                {"client_kwargs": {"region_name": "cn-north-1"}},
                "bucket",
                "https://bucket.s3.cn-north-1.amazonaws.com.cn",
                "cn-north-1",
            ),
            (
                {"config_kwargs": {"s3": {"use_dualstack_endpoint": True}}},
                "bucket",
                "https://bucket.s3.dualstack.us-east-1.amazonaws.com",
                None,
            ),
            ({"endpoint_url": "http://host:8333"}, "bucket", "http://host:8333", None),
            ({"endpoint_url": "https://host/s3/"}, "bucket", "https://host/s3", None),
            (
                {"client_kwargs": {"endpoint_url": "http://host"}},
                "bucket",
                "http://host",
                None,
            ),
            (
                {
                    "endpoint_url": "https://host",
                    "config_kwargs": {"s3": {"addressing_style": "virtual"}},
                },
                "bucket",
                "https://bucket.host",
                None,
            ),
        ],
    )
    def test_endpoint(
        self, options: dict[str, Any], bucket: str, endpoint: str, region: str | None
    ) -> None:
        config = self.config(KEYS | options, bucket)
        assert config["aws_endpoint_url_s3"] == endpoint
        assert config["region"] == (region or "us-east-1")
        assert config["virtual_hosted_style_request"] == (f"//{bucket}." in endpoint)

    @pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
    def test_endpoint_of_the_environment(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It counts where the options have none, and never before them."""
        monkeypatch.setenv(name, "http://variable:1")
        assert self.config(KEYS)["aws_endpoint_url_s3"] == "http://variable:1"
        given = self.config(KEYS | {"endpoint_url": "http://given:2"})
        assert given["aws_endpoint_url_s3"] == "http://given:2"

    def test_the_settings_that_obstore_would_look_for_elsewhere(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from obstore.store import S3Store

        for name in ("SKIP_SIGNATURE", "VIRTUAL_HOSTED_STYLE_REQUEST", "REQUEST_PAYER"):
            monkeypatch.setenv(f"AWS_{name}", "true")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://variable:1")
        options = KEYS | {"endpoint_url": "http://given:2"}
        store = S3Store("bucket", **s3_arguments("bucket", options))
        assert "variable:1" not in json.dumps(store.config)
        assert store.config["skip_signature"] in (False, "false")
        assert store.config["virtual_hosted_style_request"] in (False, "false")

    def test_anonymous(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from obstore.store import S3Store

        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "half-of-a-pair")
        arguments = s3_arguments("bucket", {"anon": True, "endpoint_url": "http://host"})
        S3Store("bucket", **arguments)
        assert arguments["config"]["skip_signature"] is True
        assert arguments["credential_provider"] is None

    def test_the_rest(self, tmp_path: Path) -> None:
        extra = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "id"}
        config = self.config(
            KEYS
            | {
                "requester_pays": True,
                "s3_additional_kwargs": extra,
                "config_kwargs": {"s3": {"payload_signing_enabled": True}},
            }
        )
        assert config["server_side_encryption"] == "aws:kms"
        assert config["sse_kms_key_id"] == "id"
        assert config["request_payer"] is True
        assert config["unsigned_payload"] is False
        assert self.config(KEYS)["unsigned_payload"] is True

    def test_certificates(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        bundle = tmp_path / "ca.pem"
        bundle.write_bytes(PEM)
        for verify in (False, str(bundle)):
            options = KEYS | {"client_kwargs": {"verify": verify}}
            found = s3_arguments("bucket", options)["client_options"]
            assert found.get("allow_invalid_certificates", False) is not bool(verify)
            assert found.get("root_certificate") == (PEM if verify else None)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(bundle))
        found = s3_arguments("bucket", KEYS)["client_options"]
        assert found["root_certificate"] == PEM

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"endpoint_ulr": "x"}, "unknown option 'endpoint_ulr'. Did you mean"),
            ({"use_ssl": False}, "storage_options: unknown option 'use_ssl'"),
            ({"session": object()}, "storage_options: unknown option 'session'"),
            (
                {"config_kwargs": {"retries": {}}},
                "storage_options.config_kwargs: unknown option 'retries'",
            ),
            (
                {"config_kwargs": {"s3": {"x": 1}}},
                "storage_options.config_kwargs.s3: unknown option 'x'",
            ),
            (
                {"client_kwargs": {"use_ssl": False}},
                "storage_options.client_kwargs: unknown option 'use_ssl'",
            ),
            (
                {"s3_additional_kwargs": {"ACL": "private"}},
                "storage_options.s3_additional_kwargs: unknown option 'ACL'",
            ),
        ],
    )
    def test_an_option_that_cannot_be_honoured_is_refused(
        self, options: dict[str, Any], problem: str
    ) -> None:
        with pytest.raises(InvalidInputError) as refused:
            Filesystem("s3://bucket/kv", KEYS | options)
        assert problem in str(refused.value)
        assert '"client": "fsspec"' in str(refused.value)

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            (
                {"endpoint_url": "storage.example.com"},
                "endpoint_url: expected http://host or https://host, maybe with a port, "
                "found 'storage.example.com'",
            ),
            ({"endpoint_url": "ftp://host"}, "endpoint_url: expected http://host"),
            ({"endpoint_url": "http://"}, "endpoint_url: expected http://host"),
            ({"endpoint_url": "http://host:x"}, "endpoint_url: expected http://host"),
            ({"endpoint_url": "http://[::1"}, "endpoint_url: expected http://host"),
            (
                {"endpoint_url": "me:wJalrXUtnFEMI@host"},
                "found a user or password before 'host'",
            ),
            (
                {"endpoint_url": "https://me:wJalrXUtnFEMI@host"},
                "found a user or password before 'host'",
            ),
            ({"endpoint_url": 7}, "endpoint_url: expected str, found 7"),
            ({"client_kwargs": {"endpoint_url": "host"}}, "client_kwargs.endpoint_url: ex"),
            ({"client_kwargs": {"region_name": 7}}, "region_name: expected str, found 7"),
            ({"client_kwargs": {"verify": 7}}, "verify: expected bool or str, found 7"),
            ({"client_kwargs": []}, "client_kwargs: expected an object, found list"),
            ({"key": 12345}, "storage_options.key: expected str, found int"),
            (
                {"secret": ["wJalrXUtnFEMI"]},
                "storage_options.secret: expected str, found l",
            ),
            ({"token": 7}, "storage_options.token: expected str, found int"),
            ({"anon": "false"}, "storage_options.anon: expected bool, found 'false'"),
            ({"requester_pays": "no"}, "requester_pays: expected bool, found 'no'"),
        ],
    )
    @pytest.mark.parametrize("client", ["obstore", "fsspec"])
    def test_what_is_not_of_its_kind_is_refused(
        self, options: dict[str, Any], problem: str, client: Any
    ) -> None:
        with pytest.raises(InvalidInputError) as refused:
            Filesystem("s3://bucket/kv", KEYS | options, client=client)
        assert problem in str(refused.value)
        assert "wJalrXUtnFEMI" not in str(refused.value)
        assert "12345" not in str(refused.value)

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            (
                {"config_kwargs": {"s3": {"addressing_style": "pth"}}},
                r"storage_options.config_kwargs.s3.addressing_style: expected one of "
                r"\('auto', 'path', 'virtual'\), found 'pth'",
            ),
            (
                {"s3_additional_kwargs": {"ServerSideEncryption": "bogus"}},
                "ServerSideEncryption: expected one of .*'AES256'.*, found 'bogus'",
            ),
            (
                {"client_kwargs": {"verify": "/no/such/file"}},
                "verify: expected a file of certificates that can be read, found "
                "'/no/such/file': No such file or directory",
            ),
            (
                {"client_kwargs": {"verify": os.devnull}},
                "verify: expected certificates in PEM format, found none in '/dev/null'",
            ),
            ({"client_kwargs": {"region_name": "a b"}}, "InvalidRegionError: .*'a b'"),
            ({"profile": "nope"}, r"found for s3://bucket/kv: ProfileNotFound: .*\(nope\)"),
        ],
    )
    def test_what_the_client_cannot_use_is_refused(
        self, options: dict[str, Any], problem: str
    ) -> None:
        with pytest.raises(InvalidInputError, match=problem):
            Filesystem("s3://bucket/kv", KEYS | options)

    def test_settings_around_the_options_that_the_client_cannot_use_are_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(InvalidInputError, match='Invalid bucket name "my bucket"'):
            Filesystem("s3://my bucket/kv", KEYS)
        (tmp_path / "config").write_text(
            "[profile a]\nrole_arn = arn:aws:iam::123456789012:role/a\nsource_profile = b\n"
            "[profile b]\nrole_arn = arn:aws:iam::123456789012:role/b\nsource_profile = a\n"
        )
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        with pytest.raises(InvalidInputError, match="Infinite loop in credential config"):
            Filesystem("s3://bucket/kv", {"profile": "a"})
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
        with pytest.raises(InvalidInputError, match="missing: AWS_SECRET_ACCESS_KEY"):
            Filesystem("s3://bucket/kv")

    def test_an_endpoint_of_the_environment_without_protocol_is_refused(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "host:9000")
        with pytest.raises(
            InvalidInputError, match=r"in the environment, found .*host:9000"
        ):
            Filesystem("s3://bucket/kv", KEYS)

    @pytest.mark.parametrize("encryption", ["AES256", "aws:kms", "aws:kms:dsse"])
    def test_every_encryption_that_is_named_is_one_of_obstores(
        self, encryption: str
    ) -> None:
        extra = {"ServerSideEncryption": encryption, "BucketKeyEnabled": True}
        Filesystem("s3://bucket/kv", KEYS | {"s3_additional_kwargs": extra})

    def test_a_secret_in_a_clients_own_words_is_masked(self) -> None:
        with pytest.raises(InvalidInputError) as refused:
            Filesystem("s3://bucket/kv", KEYS | {"profile": "wJalrXUtnFEMI"})
        assert "(***) could not be found" in str(refused.value)
        assert refused.value.__cause__ is None

    def test_half_of_the_credentials(self) -> None:
        with pytest.raises(InvalidInputError, match="key and secret belong together"):
            Filesystem("s3://bucket/kv", {"key": "AKIA"})

    def test_no_credentials(self) -> None:
        with pytest.raises(InvalidInputError, match="found no credentials for S3"):
            Filesystem("s3://bucket/kv")

    def test_options_of_fsspecs_own_configuration(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from fsspec.config import conf

        monkeypatch.setitem(conf, "s3", {"endpoint_ulr": "http://host"})
        with pytest.raises(InvalidInputError, match="endpoint_ulr"):
            Filesystem("s3a://bucket/kv", KEYS)


class TestGoogle:
    @pytest.fixture(autouse=True)
    def installed(self) -> None:
        pytest.importorskip("google.auth", reason="the extra gcs is not installed")

    @pytest.mark.parametrize("form", ["object", "path", "variable"])
    def test_credentials(
        self, form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "user.json"
        path.write_text(json.dumps(USER))
        options: dict[str, Any] = {"token": USER if form == "object" else str(path)}
        if form == "variable":
            monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(path))
            options = {}
        arguments = gcs_arguments(options)
        assert arguments["config"] == {
            "base_url": "https://storage.googleapis.com",
            "skip_signature": False,
        }
        assert arguments["credential_provider"] is not None

    def test_anonymous(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from obstore.store import GCSStore

        monkeypatch.setenv("GOOGLE_BASE_URL", "http://variable")
        arguments = gcs_arguments({"token": "anon", "project": "any"})
        assert arguments["config"]["skip_signature"] is True
        assert arguments["credential_provider"]() == {"token": "", "expires_at": None}
        assert "variable" not in json.dumps(GCSStore("bucket", **arguments).config)

    @pytest.mark.parametrize(
        ("host", "endpoint"),
        [
            ("localhost:4443", "http://localhost:4443"),
            ("https://localhost:4443/", "https://localhost:4443"),
            ("default", "https://storage.googleapis.com"),
        ],
    )
    def test_emulator(
        self, host: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
        anonymous = {"token": "anon"}
        assert gcs_arguments(anonymous)["config"]["base_url"] == endpoint
        given = gcs_arguments(anonymous | {"endpoint_url": "http://given"})
        assert given["config"]["base_url"] == "http://given"

    @pytest.mark.parametrize("host", ["ftp://host", "http://"])
    def test_an_emulator_that_is_no_host_is_refused(
        self, host: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
        with pytest.raises(InvalidInputError, match="STORAGE_EMULATOR_HOST: expected http"):
            Filesystem("gs://bucket/kv", {"token": "anon"})

    @pytest.mark.parametrize("client", ["obstore", "fsspec"])
    @pytest.mark.parametrize(
        "endpoint", ["storage.example.com", "ftp://host", 7, "http://"]
    )
    def test_an_endpoint_that_is_no_url_of_http_is_refused(
        self, endpoint: Any, client: Any
    ) -> None:
        with pytest.raises(
            InvalidInputError, match=r"storage_options.endpoint_url: expect"
        ):
            Filesystem(
                "gs://bucket/kv", {"token": "anon", "endpoint_url": endpoint}, client=client
            )

    def test_a_panic_is_an_error_of_storage(self) -> None:
        from obstore.store import GCSStore

        filesystem = Filesystem("gs://bucket/kv", {"token": "anon"})
        arguments = gcs_arguments({"token": "anon"})
        arguments["config"]["base_url"] = "storage.example.com"  # of which it makes no URL
        client: Any = filesystem._client._client
        client._store = GCSStore("bucket", **arguments)
        with pytest.raises(
            StorageError, match="cannot write below gs://bucket/kv: request"
        ):
            filesystem.probe()

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"token": "browser"}, '\'browser\' is gcsfs\'s own.*"client": "fsspec"'),
            ({"token": "/no/such/file"}, "found no credentials"),
            ({"token": {"client_secret": "wJalrXUtnFEMI"}}, "expected the type 'service_a"),
            ({"token": BROKEN}, "found no credentials"),
            ({"token": 7}, "expected a path, an object, .* found int"),
            ({"consistency": "md5"}, 'unknown option \'consistency\'.*"client": "fsspec"'),
        ],
    )
    def test_what_cannot_be_honoured_is_refused(
        self, options: dict[str, Any], problem: str
    ) -> None:
        with pytest.raises(InvalidInputError, match=problem) as refused:
            Filesystem("gs://bucket/kv", options)
        assert "wJalrXUtnFEMI" not in str(refused.value)
        assert refused.value.__suppress_context__ or not refused.value.__context__

    def test_no_credentials(self) -> None:
        with pytest.raises(InvalidInputError, match="found no credentials for Google"):
            Filesystem("gs://bucket/kv")


@pytest.mark.parametrize(
    ("url", "package", "extra"), [("s3://b", "obstore", "s3"), ("gs://b", "obstore", "gcs")]
)
def test_a_package_that_is_missing(
    url: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InvalidInputError, match=rf"pip install 'kvstore-zarr\[{extra}\]'"):
        Filesystem(url, KEYS)


def test_a_package_that_is_looked_for_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    problem = r"^url: no package for hdfs:// is installed, found 'hdfs://h/kv': pyarrow "
    with pytest.raises(InvalidInputError, match=problem):
        Filesystem("hdfs://h/kv")


def test_which_storage_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(url: str = "s3://bucket/kv", **options: Any) -> str:
        return Filesystem(url, {"anon": True} | options).storage()

    plain, there = of(), of(endpoint_url="http://a:1")
    assert len({plain, there, of(endpoint_url="http://b:1")}) == 3
    assert of(endpoint_url="http://a:1", **KEYS, requester_pays=True) == there
    assert of(endpoint_url=None, client_kwargs={}) == plain
    assert Filesystem("s3://bucket/kv", KEYS, client="fsspec").storage() == plain
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    assert of() == plain
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://b:1")
    assert of() != plain
    assert Filesystem("/tmp/kv").storage() == ""


def test_an_unknown_client() -> None:
    with pytest.raises(InvalidInputError, match="client: expected one of"):
        Filesystem("memory://kv", client="boto3")  # type: ignore[arg-type]


def test_other_urls_are_fsspecs_whatever_the_client() -> None:
    with pytest.raises(InvalidInputError, match="Did you mean 'auto_mkdir'"):
        Filesystem("/tmp/kv", {"auto_mkdr": True}, client="obstore")
