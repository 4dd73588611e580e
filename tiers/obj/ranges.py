"""A load in parallel ranges of one object."""

from __future__ import annotations

import re

from kvsluice.tiers.obj.failures import ObjectFailure, RequestFailedError
from kvsluice.tiers.obj.parts import PartCrew, Span
from kvsluice.tiers.obj.requests import Request, Requests
from kvsluice.tiers.obj.wire import Response

__all__ = ["NoRangesError", "OtherLengthError", "get_in_ranges"]

_CONTENT_RANGE = re.compile(r"bytes (?:(\d{1,19})-(\d{1,19})|\*)/(\d{1,19})", re.ASCII)


class OtherLengthError(Exception):
    """The object is not as long as the chunk."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.num_bytes = num_bytes


class NoRangesError(Exception):
    """The server answers with the whole object when it is asked for a part."""


def get_in_ranges(
    requests: Requests, crew: PartCrew, name: str, view: memoryview, spans: list[Span], end_s: float
) -> None:
    """Fill `view` with the object; when this returns or raises, nothing writes to `view` any more.

    Args:
        name: the object's, quoted.
        spans: of `view`, all of it.

    Raises:
        OtherLengthError: the object's length is not the view's.
        NoRangesError: the server knows no ranges.
        RequestFailedError: a range could not be read, or the object was replaced meanwhile.
    """

    def get(span: Span) -> str:
        start, end = span

        def receive(response: Response) -> str:
            if response.status != 206:
                raise NoRangesError(f"status {response.status} to a range")
            headers = response.headers
            found = _CONTENT_RANGE.fullmatch(headers.get("content-range", ""))
            if found is None or found.group(1) is None:
                raise NoRangesError(f"content-range {headers.get('content-range')!r}")
            if int(found.group(3)) != view.nbytes:
                raise OtherLengthError(int(found.group(3)))
            if (int(found.group(1)), int(found.group(2)) + 1) != span or response.length not in (None, end - start):
                raise NoRangesError(f"content-range {headers.get('content-range')!r} to bytes {start}-{end - 1}")
            response.read_exactly(view[start:end])
            return headers.get("etag", "")

        try:
            return requests.send(Request("GET", name, "", {"range": f"bytes={start}-{end - 1}"}), end_s, receive)
        except RequestFailedError as error:
            if error.failure.status == 416:
                # It ends before this range starts.
                raise OtherLengthError(start) from error
            raise

    # The sum over the whole would find a mix out too, and take it for damage that is to be removed.
    if len(set(crew.run_all(get, spans))) > 1:
        raise RequestFailedError(ObjectFailure(None, "the object was replaced while it was read", "replaced"))
