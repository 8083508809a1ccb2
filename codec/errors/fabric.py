"""The errors of everything but memory drivers; `codec.errors` has the whole tree."""

from __future__ import annotations


class FabricError(Exception):
    """Base of every error in this module."""


class ConfigError(FabricError, ValueError):
    """A setting is wrong; the message names it and says what would be right."""


class UnsupportedModelError(ConfigError):
    """The model holds state that this version cannot restore exactly."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(what, why)
        self.what = what
        self.why = why

    def __str__(self) -> str:
        return f"cannot serve {self.what}: {self.why}"


class RetentionError(ConfigError):
    """A retention program, or what a model's config says of its attention, is refused."""

    def __init__(self, rule: str, term: str, why: str) -> None:
        super().__init__(rule, term, why)
        self.rule = rule
        self.term = term
        self.why = why

    def __str__(self) -> str:
        return f"{self.why}: {self.term} [{self.rule}]"


class UnqualifiedCodecError(ConfigError):
    """A lossy codec has no receipt that says what it does to the model and passes."""

    def __init__(self, codec: str, node: str, why: str) -> None:
        super().__init__(codec, node, why)
        self.codec = codec
        self.node = node
        self.why = why

    def __str__(self) -> str:
        return (
            f"{self.node} does not load the lossy codec {self.codec}: {self.why}; measure it with "
            "`kvfabric evaluate`, or take it as it is with --allow-unqualified"
        )


class BackendUnavailable(ConfigError, ImportError):  # noqa: N818 - the name DESIGN gives it
    """An optional package or device is missing."""

    def __init__(self, backend: str, remedy: str) -> None:
        super().__init__(backend, remedy)
        self.backend = backend
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.backend} is not available; {self.remedy}"


class CapacityError(FabricError):
    """There is no room now; the same call may succeed later."""


class ArenaFullError(CapacityError):
    """The arena cannot give that many bytes without evicting or growing."""

    def __init__(self, wanted_bytes: int, free_bytes: int) -> None:
        super().__init__(wanted_bytes, free_bytes)
        self.wanted_bytes = wanted_bytes
        self.free_bytes = free_bytes

    def __str__(self) -> str:
        return f"need {self.wanted_bytes} contiguous bytes, the arena can give {self.free_bytes}"


class StaleError(FabricError):
    """The thing named has moved on since the caller looked."""


class StaleLeaseError(StaleError):
    """The lease has ended, or an earlier life of the arena granted it."""

    def __init__(self, generation: int) -> None:
        super().__init__(generation)
        self.generation = generation

    def __str__(self) -> str:
        return f"the lease of generation {self.generation} is not live"


class StaleIncarnationError(StaleError):
    """The worker has restarted since the caller learned of it."""

    def __init__(self, node: str, wanted: int, found: int) -> None:
        super().__init__(node, wanted, found)
        self.node = node
        self.wanted = wanted
        self.found = found

    def __str__(self) -> str:
        return f"worker {self.node} is incarnation {self.found}, the caller meant {self.wanted}"


class StaleNameError(StaleError):
    """A request, step or snapshot has ended, has moved on, or was never begun."""

    def __init__(self, kind: str, name: str, why: str) -> None:
        super().__init__(kind, name, why)
        self.kind = kind
        self.name = name
        self.why = why

    def __str__(self) -> str:
        return f"{self.kind} {self.name} {self.why}"


class UnknownComponentError(StaleError):
    """The worker does not hold that component (any more)."""

    def __init__(self, component: str, node: str) -> None:
        super().__init__(component, node)
        self.component = component
        self.node = node

    def __str__(self) -> str:
        return f"worker {self.node} does not hold component {self.component}"


class CodecError(FabricError):
    """The stored bytes cannot be used: treat as a miss and recompute."""


class CorruptBlobError(CodecError):
    """The bytes are not what was written: a flip, a cut, an extension or a bad field."""

    def __init__(self, where: str, why: str) -> None:
        super().__init__(where, why)
        self.where = where
        self.why = why

    def __str__(self) -> str:
        return f"corrupt blob, {self.where}: {self.why}"


class IdentityMismatchError(CodecError):
    """The blob is sound but holds something else than was asked for."""

    def __init__(self, field: str, wanted: str, found: str) -> None:
        super().__init__(field, wanted, found)
        self.field = field
        self.wanted = wanted
        self.found = found

    def __str__(self) -> str:
        return f"blob has another {self.field}: wanted {self.wanted}, found {self.found}"


class UnknownCodecError(CodecError):
    """No codec with that identity is loaded here."""

    def __init__(self, codec: str, node: str) -> None:
        super().__init__(codec, node)
        self.codec = codec
        self.node = node

    def __str__(self) -> str:
        return f"codec {self.codec} is not loaded on {self.node}; register its calibration first"


class UnsupportedVersionError(CodecError):
    """The blob was written by a format version that this build does not read."""

    def __init__(self, found: int, supported: int) -> None:
        super().__init__(found, supported)
        self.found = found
        self.supported = supported

    def __str__(self) -> str:
        return f"blob format version {self.found}, this build reads {self.supported}"


class TransferError(FabricError):
    """Bytes did not arrive: use another source, or recompute."""


class IncompletePullError(TransferError):
    """The transfer ended well, but a component that was wanted did not come with it."""

    def __init__(self, peer: str, component: str, outcome: str) -> None:
        super().__init__(peer, component, outcome)
        self.peer = peer
        self.component = component
        self.outcome = outcome

    def __str__(self) -> str:
        return f"{self.peer} did not deliver {self.component}: {self.outcome}"


class PeerLostError(TransferError):
    """The peer cannot be reached, or went away during the transfer."""

    def __init__(self, peer: str, cause: str) -> None:
        super().__init__(peer, cause)
        self.peer = peer
        self.cause = cause

    def __str__(self) -> str:
        return f"lost {self.peer}: {self.cause}"


class ProtocolError(TransferError):
    """The peer sent something the protocol does not allow; the connection is closed."""

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(peer, why)
        self.peer = peer
        self.why = why

    def __str__(self) -> str:
        return f"{self.peer} broke the protocol: {self.why}"


class TransferTimeoutError(TransferError, TimeoutError):
    """A step of a transfer passed its deadline; its endpoint is closed for good."""

    def __init__(self, peer: str, step: str, deadline_s: float) -> None:
        super().__init__(peer, step, deadline_s)
        self.peer = peer
        self.step = step
        self.deadline_s = deadline_s

    def __str__(self) -> str:
        return f"{self.step} with {self.peer} passed its deadline of {self.deadline_s:g} s"


class ProofError(FabricError):
    """What should prove that memory may be used again does not."""


class ReceiptError(ProofError):
    """A receipt says that something other than what was asked for was done.

    The pages that may have been written are quarantined until they are recovered.
    """

    def __init__(self, step: int, why: str) -> None:
        super().__init__(step, why)
        self.step = step
        self.why = why

    def __str__(self) -> str:
        return f"the receipts of step {self.step} are wrong: {self.why}"


class QuarantinedError(ProofError):
    """The request stands still until its quarantined pages are recovered, or it is released."""

    def __init__(self, request: int, why: str) -> None:
        super().__init__(request, why)
        self.request = request
        self.why = why

    def __str__(self) -> str:
        return f"request {self.request} is quarantined: {self.why}"


class CertificateError(ProofError):
    """A record of a certificate log does not follow from those before it."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(line, why)
        self.line = line
        self.why = why

    def __str__(self) -> str:
        return f"line {self.line}: {self.why}"
