"""The object tier: one S3 object per chunk, its bytes between pinned memory and the socket without a copy.

- `tier`: `ObjectTier`, what a store, a load, a lookup are as requests.
- `namespace`: all objects of a namespace together: is the bucket there, listings, deletion in batches.
- `parts`, `ranges`, `uploads`: a large chunk in parallel parts, and whether that helps.
- `requests`: one request with its deadline: which endpoint, which failures are tried again.
- `endpoints`, `breaker`: spreading, fail-over, when an endpoint is left alone, the probe that brings it back.
- `pool`, `wire`: connections, and HTTP on them with no wait past a deadline.
- `access`, `s3_client`: boto3's part: configuration, credentials, signatures, the rare calls.
- `failures`: what an answer, or none, means.
"""

from kvsluice.tiers.obj.tier import ObjectTier

__all__ = ["ObjectTier"]
