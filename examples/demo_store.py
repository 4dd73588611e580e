"""The demo's object store: moto's server where no other is named, the bucket, and damage on purpose."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_boto3_s3.client import S3Client

__all__ = ["StoreError", "break_file", "break_object", "local_store", "open_bucket"]


class StoreError(Exception):
    """The bucket cannot be had; the message names it, its endpoint and what the server said."""


@contextmanager
def local_store() -> Iterator[tuple[str, dict[str, str]]]:
    """moto's S3 server on a free port of the loopback interface, and the credentials that it takes."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # a line per request otherwise
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield (
            f"http://{host}:{port}",
            {"AWS_ACCESS_KEY_ID": "demo", "AWS_SECRET_ACCESS_KEY": "demo", "AWS_DEFAULT_REGION": "us-east-1"},
        )
    finally:
        server.stop()


@contextmanager
def open_bucket(endpoint_url: str, bucket: str, prefix: str, environment: Mapping[str, str]) -> Iterator[S3Client]:
    """A client, with `bucket` there; what lies under `prefix` is deleted at the end.

    Raises:
        StoreError: the server refuses or is not there; 404 alone is answered by making the bucket.
    """
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    try:
        client = boto3.client(
            "s3",
            endpoint_url=endpoint_url,
            aws_access_key_id=environment.get("AWS_ACCESS_KEY_ID"),
            aws_secret_access_key=environment.get("AWS_SECRET_ACCESS_KEY"),
            aws_session_token=environment.get("AWS_SESSION_TOKEN"),
            region_name=environment.get("AWS_DEFAULT_REGION", "us-east-1"),
            config=Config(connect_timeout=5, read_timeout=20, retries={"total_max_attempts": 2}),
        )
    except ValueError as error:
        raise StoreError(f"endpoint {endpoint_url!r}: {error}: give http://HOST:PORT or https://HOST") from error
    try:
        try:
            client.head_bucket(Bucket=bucket)
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] != 404:
                raise StoreError(f"bucket {bucket!r} at {endpoint_url} cannot be used: {error}") from error
            try:
                client.create_bucket(Bucket=bucket)
                print(f"made bucket {bucket!r} at {endpoint_url}; it stays")
            except ClientError as refusal:
                raise StoreError(f"bucket {bucket!r} at {endpoint_url} cannot be made: {refusal}") from refusal
        except NoCredentialsError as error:
            raise StoreError("no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") from error
        except BotoCoreError as error:
            raise StoreError(f"bucket {bucket!r} at {endpoint_url} cannot be reached: {error}") from error
        yield client
        for key in _keys(client, bucket, prefix):
            client.delete_object(Bucket=bucket, Key=key)
    finally:
        client.close()


def break_object(client: S3Client, bucket: str, prefix: str) -> None:
    """Delete one chunk of the tier, as a lifecycle rule would."""
    client.delete_object(Bucket=bucket, Key=_one_chunk(_keys(client, bucket, prefix)))


def break_file(root: Path) -> None:
    """Flip one byte in the middle of one chunk of the tier, as a bad disk would."""
    path = Path(_one_chunk([str(path) for path in root.rglob("*") if path.is_file()]))
    content = bytearray(path.read_bytes())
    content[-len(content) // 4] ^= 0xFF
    path.write_bytes(content)


def _keys(client: S3Client, bucket: str, prefix: str) -> list[str]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return [entry["Key"] for page in pages for entry in page.get("Contents", [])]


def _one_chunk(names: list[str]) -> str:
    return min(name for name in names if name.endswith(".safetensors"))
