"""One process of the UCX tests: obeys JSON lines on stdin, answers on stdout.

It speaks real UCX, so it can be killed, stopped and timed without harm to pytest.  When
stdin ends or says so it closes its listeners, shuts UCX down and returns: whether the
process then exits by itself is one of the things tested.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
from collections import Counter
from typing import Any, TextIO

from actors.transport import link_ucx
from actors.transport.deadlines import Deadlines
from actors.transport.report import PullReport
from actors.transport.session import server as server_module
from actors.transport.wire_ucx import num_zombies
from codec.errors import FabricError
from tests.actors.transport.samples import CODEC, SampleSink, SampleSource, key, samples, want

NODE = "server"
DEADLINE_NAMES = ("connect_s", "frame_s", "payload_s", "total_s")
INCARNATION = 1_700_000_000_000_000_000


class FlippingSource(SampleSource):
    """Announces sound bytes and sends damaged ones, as bad memory would."""

    def get(self, component: Any, codec: Any) -> Any:
        """Return a pin on a copy with its last bit flipped."""
        pin = super().get(component, codec)
        damaged = bytearray(pin.view)
        damaged[-1] ^= 1
        pin.view = memoryview(damaged)
        return pin


def checksum_before_damage(view: memoryview) -> bytes:
    """Checksum of what `FlippingSource` has damaged, before it did."""
    sound = bytearray(view)
    sound[-1] ^= 1
    return true_checksum(sound)


true_checksum = server_module.payload_checksum


def first(sink: SampleSink) -> bool:
    """Whether the reservation just made is the sink's first."""
    return len(sink.reserved) == 1


def told(report: PullReport) -> dict[str, Any]:
    """What a report says, as JSON."""
    return {
        "outcomes": [line.outcome.name for line in report.outcomes],
        "bytes_moved": report.bytes_moved,
        "wire_bytes": report.wire_bytes,
        "has_times": report.connect_s > 0 and report.transfer_s > 0,
    }


class Peer:
    """Listeners by name, and one link."""

    def __init__(self, answers: TextIO) -> None:
        self.answers = answers
        self.listeners: dict[str, Any] = {}
        self.sources: dict[str, SampleSource] = {}
        self.link = link_ucx.UcxLink(node="client")
        self.silence: list[Any] = []

    async def listen(
        self, name: str, sizes: list[int], *, flip: bool = False, **deadlines: float
    ) -> dict[str, Any]:
        """Serve samples of these sizes."""
        server_module.payload_checksum = checksum_before_damage if flip else true_checksum
        source = (FlippingSource if flip else SampleSource)(samples(sizes))
        listener = link_ucx.UcxListener(
            source, node=NODE, incarnation=INCARNATION, deadlines=Deadlines(**deadlines)
        )
        self.listeners[name], self.sources[name] = listener, source
        return {"port": await listener.start()}

    async def listen_silently(self) -> dict[str, Any]:
        """Accept endpoints and never say a word on them."""
        runtime = link_ucx.start()

        async def accept(endpoint: Any) -> None:
            self.silence.append(endpoint)

        self.silence.append(listener := runtime.ucxx.create_listener(accept, 0))
        return {"port": listener.port}

    async def pull(
        self,
        port: int,
        sizes: list[int],
        *,
        extra: int = 0,
        incarnation: int = INCARNATION,
        node: str = NODE,
        capacity_bytes: int = 1 << 30,
        tell_when_reserved: bool = False,
        cancel_when_reserved: bool = False,
        **deadlines: float,
    ) -> dict[str, Any]:
        """Pull samples of these sizes and ``extra`` ones that the server lacks."""
        known = samples(sizes)
        sink = SampleSink(known, capacity_bytes=capacity_bytes)
        wants = [(key(index), CODEC) for index in range(len(sizes) + extra)]
        pulling = asyncio.ensure_future(
            self.link.pull(
                "127.0.0.1",
                port,
                wants,
                sink,
                Deadlines(**deadlines),
                node=node,
                incarnation=incarnation,
            )
        )
        if tell_when_reserved:
            sink.on_reserve = lambda: self.answer({"reserved": True}) if first(sink) else None
        if cancel_when_reserved:
            sink.on_reserve = pulling.cancel
        try:
            answer = told(await pulling)
        except FabricError as error:
            answer = {"error": type(error).__name__, "text": str(error)}
        except asyncio.CancelledError:
            answer = {"error": "CancelledError"}
        return answer | {
            "ended": dict(sink.ended),
            "num_open": len(sink.open),
            "is_equal": all(known[named] == data for named, data in sink.committed.items()),
            "committed": [i for i in range(len(sizes)) if want(i) in sink.committed],
            "num_zombies": num_zombies(),
        }

    async def torment(self, port: int, sizes: list[int], count: int) -> dict[str, Any]:
        """Make pulls that are cancelled, or hardly have time, at every kind of moment."""
        chance = random.Random(count)
        ends: Counter[str] = Counter()
        num_open = 0
        for _ in range(count):
            hasty = {name: chance.choice([30.0, 0.02, 0.002]) for name in DEADLINE_NAMES}
            pulling = asyncio.ensure_future(self.pull(port, sizes, **hasty))
            if chance.random() < 0.5:
                for _ in range(chance.randrange(200)):
                    await asyncio.sleep(0)
                pulling.cancel()
            try:
                answer = await pulling
            except asyncio.CancelledError:  # before the pull had begun
                answer = {"error": "CancelledError", "num_open": 0}
            ends[answer.get("error", "none")] += 1
            num_open += answer["num_open"]
        return {"ends": ends, "num_open": num_open, "num_zombies": num_zombies()}

    async def pull_together(self, port: int, sizes: list[int], count: int) -> dict[str, Any]:
        """Make several pulls at once."""
        return {"answers": await asyncio.gather(*(self.pull(port, sizes) for _ in range(count)))}

    async def measure(self, port: int) -> dict[str, Any]:
        """Time the link."""
        probe = await self.link.measure_link("127.0.0.1", port, node=NODE, num_rounds=1)
        return {"t0_s": probe.t0_s, "bytes_per_s": probe.bytes_per_s}

    async def state(self, name: str) -> dict[str, Any]:
        """Counters of a listener, and what is still pinned, once its sessions are over."""
        listener = self.listeners[name]
        async with asyncio.timeout(20):
            while listener.num_sessions:
                await asyncio.sleep(0.01)
        counters = listener.counters()
        names = counters.__dataclass_fields__
        counted = {field: getattr(counters, field) for field in names}
        return counted | {"num_pinned": self.sources[name].num_pinned}

    async def transports(self) -> dict[str, Any]:
        """What UCX uses."""
        return {"transports": sorted(link_ucx.active_transports())}

    async def restart(self) -> dict[str, Any]:
        """Shut UCX down; the next command starts it again."""
        for listener in self.listeners.values():
            await listener.close()
        self.listeners.clear()
        await link_ucx.shutdown()
        return {}

    def answer(self, answer: dict[str, Any]) -> None:
        """Write one line."""
        self.answers.write(json.dumps(answer) + "\n")
        self.answers.flush()

    async def run(self) -> None:
        """Obey until there is nothing more to obey."""
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = json.loads(line)
            self.answer(await getattr(self, order.pop("do"))(**order))
        for endpoint in self.silence[1::2]:
            endpoint.abort()
        self.silence.clear()
        await self.restart()


if __name__ == "__main__":
    # UCX logs to descriptor 1: keep that for ourselves, and give it the other one.
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        asyncio.run(Peer(answers).run())
