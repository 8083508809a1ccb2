"""A copy of the router's index in another process, kept up by feeds.

The replica asks for what it lacks (``router.feed(*replica.position)``) and applies what
comes back.  At equal versions it answers exactly as the router does; until then its
answers are true as of the version that they state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from codec.geometry import Stage
from codec.identity import UNBOUNDED, ChunkKey, CodecId
from policies.residency.changes import Feed
from policies.residency.index import ResidencyIndex
from policies.residency.view import Residency


class ReplicaIndex:
    """Answers about residency without asking anybody."""

    def __init__(self, *, tokens_per_chunk: int) -> None:
        self._index = ResidencyIndex(tokens_per_chunk=tokens_per_chunk)
        #: The router's start whose versions ours are; 0 before the first feed.
        self._epoch = 0

    @property
    def version(self) -> int:
        """Changes applied so far, counted as the router counts them."""
        return self._index.version

    @property
    def position(self) -> tuple[int, int]:
        """Version and epoch: from where on the next feed should begin."""
        return self._index.version, self._epoch

    @property
    def ready(self) -> bool:
        """Whether the router, as of our version, knew what every node holds."""
        return self._index.ready

    def apply(self, feed: Feed) -> bool:
        """Catch up; false if ``feed`` does not connect, and a feed from `position` is needed.

        Feeds may come twice or out of order: what is known already is skipped.
        """
        if feed.epoch < self._epoch:
            return False
        if feed.nodes is not None:
            if feed.epoch > self._epoch or feed.version > self.version:
                self._index.load(feed.version, feed.nodes)
                self._epoch = feed.epoch
            return True
        if feed.epoch > self._epoch or feed.since_version > self.version:
            return False
        for change in feed.changes[self.version - feed.since_version :]:
            self._index.apply(change)
        return True

    def residency(
        self,
        keys: Sequence[ChunkKey],
        stages: Sequence[Stage],
        *,
        codecs: Iterable[Sequence[CodecId]] | None = None,
        retention_class: str = UNBOUNDED,
    ) -> Residency:
        """Answer as `ResidencyIndex.residency` does."""
        return self._index.residency(keys, stages, codecs=codecs, retention_class=retention_class)

    def gauges(self) -> dict[str, int]:
        """See `ResidencyIndex.gauges`."""
        return self._index.gauges()

    def check(self) -> None:
        """Assert every invariant.  For tests, not for control flow."""
        self._index.check()
