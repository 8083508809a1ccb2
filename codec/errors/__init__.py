"""Every exception the fabric raises on purpose, grouped by what the caller does next.

* FabricError
  + ConfigError (also ValueError)     fix the settings
    - UnsupportedModelError
    - RetentionError
    - UnqualifiedCodecError
    - BackendUnavailable (also ImportError)
  + CapacityError                     wait, or ask for less
    - ArenaFullError
  + StaleError                        look it up again
    - StaleLeaseError
    - StaleIncarnationError
    - StaleNameError
    - UnknownComponentError
  + CodecError                        treat as a miss, recompute
    - CorruptBlobError
    - IdentityMismatchError
    - UnknownCodecError
    - UnsupportedVersionError
  + TransferError                     other source, or recompute
    - IncompletePullError
    - PeerLostError
    - ProtocolError
    - TransferTimeoutError (also TimeoutError)
  + ProofError                        memory stays as it is until it is recovered
    - ReceiptError
    - QuarantinedError
    - CertificateError
  + VmmError                          a memory driver refused a verb: a defect, or no room
    - VmmMisaligned (also ValueError)
    - VmmOutOfMemory (also CapacityError, MemoryError)
    - VmmNotReserved
    - VmmAlreadyMapped
    - VmmNotMapped
    - VmmBadHandle
    - VmmBusy
    - VmmForked
    - VmmClosed
    - VmmDriverError
    - VmmNotShared

Fields go to ``super().__init__`` by position and the sentence is built in
``__str__``.  That keeps an error picklable, and so catchable by its own type on
the far side of a Ray call.
"""

from __future__ import annotations

from codec.errors.fabric import (
    ArenaFullError,
    BackendUnavailable,
    CapacityError,
    CertificateError,
    CodecError,
    ConfigError,
    CorruptBlobError,
    FabricError,
    IdentityMismatchError,
    IncompletePullError,
    PeerLostError,
    ProofError,
    ProtocolError,
    QuarantinedError,
    ReceiptError,
    RetentionError,
    StaleError,
    StaleIncarnationError,
    StaleLeaseError,
    StaleNameError,
    TransferError,
    TransferTimeoutError,
    UnknownCodecError,
    UnknownComponentError,
    UnqualifiedCodecError,
    UnsupportedModelError,
    UnsupportedVersionError,
)
from codec.errors.vmm import (
    VmmAlreadyMapped,
    VmmBadHandle,
    VmmBusy,
    VmmClosed,
    VmmDriverError,
    VmmError,
    VmmForked,
    VmmMisaligned,
    VmmNotMapped,
    VmmNotReserved,
    VmmNotShared,
    VmmOutOfMemory,
)

__all__ = [
    "ArenaFullError",
    "BackendUnavailable",
    "CapacityError",
    "CertificateError",
    "CodecError",
    "ConfigError",
    "CorruptBlobError",
    "FabricError",
    "IdentityMismatchError",
    "IncompletePullError",
    "PeerLostError",
    "ProofError",
    "ProtocolError",
    "QuarantinedError",
    "ReceiptError",
    "RetentionError",
    "StaleError",
    "StaleIncarnationError",
    "StaleLeaseError",
    "StaleNameError",
    "TransferError",
    "TransferTimeoutError",
    "UnknownCodecError",
    "UnknownComponentError",
    "UnqualifiedCodecError",
    "UnsupportedModelError",
    "UnsupportedVersionError",
    "VmmAlreadyMapped",
    "VmmBadHandle",
    "VmmBusy",
    "VmmClosed",
    "VmmDriverError",
    "VmmError",
    "VmmForked",
    "VmmMisaligned",
    "VmmNotMapped",
    "VmmNotReserved",
    "VmmNotShared",
    "VmmOutOfMemory",
]
