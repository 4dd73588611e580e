"""The object tier: one S3 object per chunk, its bytes between pinned memory and the socket without a copy.

tier        ObjectTier: what a store, a load, a lookup are as requests
parts       a large chunk in parallel ranges, and whether that helps
requests    one request with its deadline: which endpoint, which failures are tried again
endpoints   spreading, fail-over, the probe of what has failed
breaker     when an endpoint is left alone
wire        HTTP connections with deadlines, and their pool
access      boto3: configuration, credentials, signatures, the rare calls
failures    what an answer, or none, means
"""

from kvsluice.tiers.obj.tier import ObjectTier

__all__ = ["ObjectTier"]
