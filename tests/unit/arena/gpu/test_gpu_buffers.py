"""Arrays on a GPU become rows, which know their GPU and the streams that write to the arrays."""

from typing import Any

import numpy as np
import pytest
from helpers.arena.gpus import noise, table_of
from helpers.project.torch_or_skip import torch_or_skip

from raykv.arena import buffers
from raykv.arena.gpu import device as devices
from raykv.arena.gpu.device import Device
from raykv.keys import CacheId, check


def test_rows_on_a_gpu(cupy: Any, gpu: Device) -> None:
    layers = [cupy.asarray(noise(40, seed).reshape(4, 10)) for seed in range(2)]
    found = buffers.paged(layers, [3, 1], 2, 20, writable=True)
    assert found.device == gpu.uuid and found[:1].device == gpu.uuid and found[:1].after == found.after
    assert found.addresses.tolist() == [[layer.data.ptr + 10 * i for layer in layers] for i in (3, 1)]
    to = gpu.bounce_buffer()
    gpu.copy(np.stack([to.ctypes.data + 10 * np.arange(4), found.addresses.ravel(), np.full(4, 10)], 1), found.after)
    assert (to[:40].reshape(2, 20) == np.hstack([layer.get() for layer in layers])[[3, 1]]).all()
    assert buffers.dense("out", layers[0], 3, 10).device == gpu.uuid
    assert buffers.rows_of([layers[0], np.zeros((0, 10), np.uint8)]).device == gpu.uuid  # no bytes in host memory
    assert buffers.rows_of([np.zeros((2, 2), np.uint8)]).device is None


def test_rows_of_the_wrong_kind(cupy: Any) -> None:
    with pytest.raises(ValueError, match=r"blocks: float32 of shape \(2, 8\)"):
        buffers.dense("blocks", cupy.zeros((2, 8), np.float32), 2, 8)
    with pytest.raises(ValueError, match=r"paged is on GPU-.* and host memory"):
        buffers.paged([cupy.zeros((2, 8), np.uint8), np.zeros((2, 8), np.uint8)], [0], 1, 16)
    with pytest.raises(ValueError, match="keys: a ndarray"):
        check(cupy.zeros((2, 16), np.uint8), CacheId("m", 16, 8, b""))


def test_rows_on_two_gpus(on_host: Any) -> None:
    here = on_host.zeros((2, 8), np.uint8)
    with on_host.cuda.Device(1):
        there = on_host.zeros((2, 8), np.uint8)
    assert buffers.rows_of([there]).device == devices.visible()[1]
    with pytest.raises(ValueError, match=" and ".join(devices.visible())):
        buffers.rows_of([here, there])


class Foreign:
    """Another library's array over the same memory, which names a stream or does not."""

    def __init__(self, array: Any, **stream: int | None) -> None:
        self._array = array
        interface = {name: value for name, value in array.__cuda_array_interface__.items() if name != "stream"}
        self.__cuda_array_interface__ = {**interface, **stream}


def streams_of(rows: buffers.Rows, on_host: Any) -> set[int]:
    return {on_host.cuda.runtime._events[event.ptr][0] for event in rows.after}


def test_streams_of_rows(on_host: Any) -> None:
    array = on_host.zeros((2, 8), np.uint8)
    assert streams_of(buffers.rows_of([array]), on_host) == {1}
    with on_host.cuda.Stream(non_blocking=True) as stream:
        assert streams_of(buffers.rows_of([array, array]), on_host) == {stream.ptr}
    other, silent = Foreign(array, stream=stream.ptr), Foreign(array, stream=None)
    assert streams_of(buffers.rows_of([Foreign(array)]), on_host) == {1}  # the library may use the default stream
    assert buffers.rows_of([silent]).after == ()
    assert streams_of(buffers.rows_of([silent, other]), on_host) == {stream.ptr}


@pytest.mark.parametrize("handles", [[2], ["own", 1]])
def test_several_streams_are_waited_for(on_host: Any, handles: list[Any]) -> None:
    """A copy waits for all work that the streams had when the rows were made. 2 is a thread's own default stream."""
    gpu = devices.device(devices.visible()[0])
    array, bounce = on_host.zeros((2, 8), np.uint8), gpu.bounce_buffer()
    streams = [on_host.cuda.Stream().ptr if handle == "own" else handle for handle in handles]
    bounce[:16] = range(1, 17)
    copy = on_host.cuda.runtime.memcpyAsync
    for i, stream in enumerate(streams):
        copy(array.data.ptr + 8 * i, bounce.ctypes.data, 8, 1, stream)
    rows = buffers.rows_of([Foreign(array, stream=stream) for stream in streams])
    for i, stream in enumerate(streams):
        copy(array.data.ptr + 8 * i, bounce.ctypes.data + 8, 8, 1, stream)
    gpu.copy(table_of((bounce.ctypes.data + 100, array.data.ptr, 16)), rows.after, "to_host")
    assert bounce[100:116].reshape(2, 8)[: len(streams)].tolist() == [list(range(1, 9))] * len(streams)


def test_rows_of_torch(on_host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor's interface names no stream, so the current stream of its device counts."""
    torch_or_skip()
    import torch

    array = on_host.zeros((2, 8), np.uint8)

    class Tensor(torch.Tensor):
        is_cuda, device = True, torch.device("cuda", 0)
        __cuda_array_interface__ = Foreign(array).__cuda_array_interface__

    tensor = torch.zeros((2, 8), dtype=torch.uint8).as_subclass(Tensor)
    for handle, stream in ((0, 1), (77, 77)):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _, at=handle: type("Stream", (), {"cuda_stream": at}))
        rows = buffers.rows_of([tensor])
        assert streams_of(rows, on_host) == {stream} and rows.addresses[0, 0] == array.data.ptr
    assert buffers.rows_of([torch.zeros((2, 8), dtype=torch.uint8)]).device is None
    with pytest.raises(ValueError, match=r"memory: on meta.*\.cpu\(\)"):
        buffers.rows_of([torch.zeros((2, 8), dtype=torch.uint8, device="meta")])
