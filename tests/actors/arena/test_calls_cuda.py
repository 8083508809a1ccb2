"""`CudaCalls`: answers as errors, and contexts that are left as they were."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from actors.arena.calls_cuda import CudaCalls
from codec.errors import VmmDriverError
from tests.fakes.cuda_fake import FakeCuda, fake_cuda


@pytest.fixture
def fake() -> Iterator[FakeCuda]:
    """The stand-in, healed after the test."""
    fake = fake_cuda()
    yield fake
    fake.heal()


@pytest.fixture
def call(fake: FakeCuda) -> CudaCalls:
    """Its calls."""
    return CudaCalls()


@pytest.fixture
def contexts(call: CudaCalls) -> Iterator[list[Any]]:
    """The primary contexts of both devices."""
    yield [call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", n)) for n in (0, 1)]
    for number in (0, 1):
        call("cuDevicePrimaryCtxRelease", call("cuDeviceGet", number))


def in_a_new_thread(work: Callable[[], list[int]]) -> list[int]:
    """What ``work`` returns in a thread that has no context."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.extend(work()))
    thread.start()
    thread.join()
    return found


def test_an_answer_is_a_result_or_an_error(call: CudaCalls, fake: FakeCuda) -> None:
    """With the call's name and the driver's code; the next call knows nothing of it."""
    fake.fail("cuDeviceGetCount", 1, 999)

    with pytest.raises(VmmDriverError) as caught:
        call("cuDeviceGetCount")

    assert (caught.value.call, caught.value.code) == ("cuDeviceGetCount", 999)
    assert call("cuDeviceGetCount") == 2


def test_a_code_can_be_asked_for(call: CudaCalls, fake: FakeCuda) -> None:
    """Whatever it is."""
    fake.fail("cuDeviceGetCount", 1, 600)

    assert [call.ask("cuDeviceGetCount") for _ in range(2)] == [600, 0]


def test_a_thread_without_a_context_keeps_the_one_it_gets(
    call: CudaCalls, contexts: list[Any]
) -> None:
    """It is set once, and found again by the next call."""

    def work() -> list[int]:
        found = [int(call("cuCtxGetCurrent"))]
        for _ in range(2):
            with call.current(contexts[0]):
                found.append(int(call("cuCtxGetCurrent")))
        return [*found, int(call("cuCtxGetCurrent"))]

    ours = int(contexts[0])
    before = fake_cuda().calls("cuCtxSetCurrent")
    assert in_a_new_thread(work) == [0, ours, ours, ours]
    assert fake_cuda().calls("cuCtxSetCurrent") == before + 1


def test_a_thread_with_a_context_has_it_back(call: CudaCalls, contexts: list[Any]) -> None:
    """Also where what is done in ours fails."""

    def work() -> list[int]:
        call("cuCtxSetCurrent", contexts[1])
        found = []
        with call.current(contexts[0]):
            found.append(int(call("cuCtxGetCurrent")))
        with pytest.raises(VmmDriverError), call.current(contexts[0]):
            call("cuMemRelease", 999)
        return [*found, int(call("cuCtxGetCurrent"))]

    assert in_a_new_thread(work) == [int(contexts[0]), int(contexts[1])]
