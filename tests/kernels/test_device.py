"""What is asked of CUDA for streams, events and threads: seen through stand-ins, since there is no GPU here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from kvsluice.kernels import device as device_module
from kvsluice.kernels.device import CpuDevice, CudaDevice, device_for
from kvsluice.kernels.driver import NO_DRIVER, DriverError, relax_stream_capture

GPU = torch.device("cuda", 1)


class Cuda:
    """What torch.cuda was asked for, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.current: object = "the engine's"
        cuda = self

        class Stream:
            def __init__(self, device: torch.device, priority: int = 0) -> None:
                cuda.calls.append(("stream", device, priority))

            def wait_event(self, event: object) -> None:
                cuda.calls.append(("wait", self, event))

            def query(self) -> bool:
                cuda.calls.append(("query", self))
                return True

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.timed = enable_timing

            def record(self, stream: object) -> None:
                cuda.calls.append(("record", self, stream))

            def query(self) -> bool:
                return False

            def elapsed_time(self, end: object) -> float:
                return 1500.0

        @contextlib.contextmanager
        def stream(chosen: object) -> Iterator[None]:
            before, cuda.current = cuda.current, chosen
            yield
            cuda.current = before

        def set_stream(chosen: object) -> None:
            cuda.current = chosen

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "set_stream", set_stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: self.calls.append(("device", device)))
        monkeypatch.setattr(device_module, "relax_stream_capture", lambda: self.calls.append(("relax",)))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_a_name_is_one_stream_however_often_it_is_asked_for(cuda: Cuda) -> None:
    device = CudaDevice(GPU)
    streams = {name: device.new_stream(name) for name in ("out", "in", "out kernels", "in kernels")}
    for name in list(streams) * 20:
        assert device.new_stream(name) is streams[name]
    assert len([call for call in cuda.calls if call[0] == "stream"]) == 4, "torch has 32 of a priority to give"


def test_streams_are_of_the_higher_priority_on_the_tensors_device(cuda: Cuda) -> None:
    CudaDevice(GPU).new_stream("out")
    assert cuda.calls == [("stream", GPU, -1)]


def test_a_thread_is_bound_to_the_device_to_a_stream_of_ours_and_lets_others_capture(cuda: Cuda) -> None:
    device = CudaDevice(GPU)
    device.bind_thread()
    assert [call[0] for call in cuda.calls] == ["device", "stream", "query", "relax"]
    assert cuda.calls[0] == ("device", GPU)
    assert cuda.current is cuda.calls[2][1], "what the thread allocates comes out of a stream of its own"
    assert cuda.current is not getattr(device.new_stream("out"), "stream", None)


def test_a_driver_that_does_not_let_others_capture_is_a_warning(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise DriverError("refused", code=1, name="error 1")

    monkeypatch.setattr(device_module, "relax_stream_capture", refuse)
    CudaDevice(GPU).bind_thread()
    assert "captures CUDA graphs" in caplog.text


def test_an_operation_runs_while_its_stream_is_the_current_one(cuda: Cuda) -> None:
    class Look:
        def run(self) -> None:
            seen.append(cuda.current)

    seen: list[object] = []
    stream = CudaDevice(GPU).new_stream("out")
    stream.submit(Look())
    assert seen == [getattr(stream, "stream", None)]
    assert cuda.current == "the engine's"


def test_events_are_recorded_on_the_stream_that_they_are_of(cuda: Cuda) -> None:
    device = CudaDevice(GPU)
    stream = device.new_stream("out")
    ready, end = device.compute_event(), stream.record()
    records = [call[2] for call in cuda.calls if call[0] == "record"]
    assert records == ["the engine's", getattr(stream, "stream", None)]
    assert end.seconds_since(ready) == 1.5
    stream.wait(ready)
    assert cuda.calls[-1][:2] == ("wait", getattr(stream, "stream", None))


def test_the_engines_stream_waits_for_an_event_of_ours(cuda: Cuda) -> None:
    device = CudaDevice(GPU)
    event = device.new_stream("in").record()
    cuda.current = torch.cuda.Stream(GPU)
    device.compute_wait(event)
    assert cuda.calls[-1][:2] == ("wait", cuda.current)


def test_without_a_driver_the_capture_mode_cannot_be_set_and_the_error_says_so() -> None:
    if torch.cuda.is_available():
        relax_stream_capture()
        return
    with pytest.raises(DriverError, match="cuThreadExchangeStreamCaptureMode cannot be called") as caught:
        relax_stream_capture()
    assert caught.value.code == NO_DRIVER


def test_each_device_has_its_twin_and_others_are_refused() -> None:
    assert isinstance(device_for(torch.device("cpu")), CpuDevice)
    assert isinstance(device_for(torch.device("cuda", 3)), CudaDevice)
    with pytest.raises(ValueError, match="KV cache on device meta: only cpu and cuda are supported"):
        device_for(torch.device("meta"))
