"""The protocol's order: state machines for both ends, tables as data, no I/O.

Bytes and local events go in, instructions come out.  ``dialog`` assembles frames and
applies ``tables``; ``client`` and ``server`` know what the frames mean.
"""

from actors.transport.session.client import PullClient
from actors.transport.session.server import PullServer

__all__ = ["PullClient", "PullServer"]
