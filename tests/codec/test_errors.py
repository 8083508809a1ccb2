"""Every error survives pickling, which is how it crosses a Ray call."""

from __future__ import annotations

import pickle

import pytest

from codec import errors

#: One of every class that is raised.  A new class gets a line here.
SAMPLES: list[errors.FabricError] = [
    errors.ConfigError("chunk_tokens must be a multiple of 16, got 250"),
    errors.UnsupportedModelError("mamba", "no recurrent snapshots"),
    errors.RetentionError(rule="window", term="q - k < W", why="W is not positive"),
    errors.UnqualifiedCodecError(codec="00", node="a", why="there is no receipt for it"),
    errors.BackendUnavailable("nvcomp", "install kvfabric[cuda]"),
    errors.ArenaFullError(wanted_bytes=300, free_bytes=100),
    errors.StaleLeaseError(generation=2),
    errors.StaleIncarnationError(node="a", wanted=1, found=2),
    errors.StaleNameError(kind="step", name="7", why="was aborted"),
    errors.UnknownComponentError(component="00/l0-1.h0-1/unbounded", node="a"),
    errors.CorruptBlobError(where="header", why="checksum does not match"),
    errors.IdentityMismatchError(field="namespace", wanted="00", found="01"),
    errors.UnknownCodecError(codec="00", node="a"),
    errors.UnsupportedVersionError(found=2, supported=1),
    errors.IncompletePullError("b.gpu0", "00/l0-1.h0-1/unbounded", "corrupt"),
    errors.PeerLostError(peer="a:1", cause="connection reset"),
    errors.ProtocolError(peer="a:1", why="frame 3 before frame 2"),
    errors.TransferTimeoutError(peer="a:1", step="handshake", deadline_s=1.5),
    errors.ReceiptError(step=7, why="page 3 of full is not mapped"),
    errors.QuarantinedError(request=4, why="a receipt of step 7 was wrong"),
    errors.CertificateError(line=12, why="page 3 of full is still in use"),
    errors.VmmMisaligned(what="size", found=100, granule_bytes=4096),
    errors.VmmOutOfMemory(limit="budget", wanted_bytes=300, free_bytes=100),
    errors.VmmNotReserved(va=0x7000, nbytes=300),
    errors.VmmAlreadyMapped(va=0x7000, nbytes=300),
    errors.VmmNotMapped(va=0x7000, nbytes=300, why="the middle is not mapped"),
    errors.VmmBadHandle(handle=3),
    errors.VmmBusy(what="the reservation", why="2 mappings are left"),
    errors.VmmForked(owner_pid=100, pid=101),
    errors.VmmClosed(what="arena"),
    errors.VmmDriverError(call="mmap", code=12),
    errors.VmmNotShared(what="handle 3", why="its memory was made without export"),
]
#: The packages whose errors count: other tests may derive classes for themselves.
PACKAGES = ("codec", "policies", "actors", "fabric")


def leaves(cls: type[Exception]) -> set[type[Exception]]:
    """Classes of ours under ``cls`` that nothing of ours derives from."""
    subclasses = [c for c in cls.__subclasses__() if c.__module__.split(".")[0] in PACKAGES]
    return set().union(*map(leaves, subclasses)) if subclasses else {cls}


@pytest.mark.parametrize("error", SAMPLES, ids=lambda e: type(e).__name__)
def test_error_keeps_type_fields_and_message(error: errors.FabricError) -> None:
    """Nothing is lost on the way through pickle."""
    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is type(error)
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


def test_every_leaf_has_a_sample() -> None:
    """A new error class cannot skip the test above."""
    assert leaves(errors.FabricError) - {type(error) for error in SAMPLES} == set()


@pytest.mark.parametrize("error", SAMPLES, ids=lambda e: type(e).__name__)
def test_message_is_a_sentence_with_the_fields_in_it(error: errors.FabricError) -> None:
    """Whoever reads a log sees what was wanted and what was found."""
    text = str(error)

    assert not text.endswith(".")
    for value in vars(error).values():
        assert str(value) in text or f"{value:#x}" in text


def test_the_tree_drawn_at_the_top_is_the_tree() -> None:
    """Each class is listed under the class it derives from, and no other class is listed."""
    assert errors.__doc__ is not None
    drawn, parent = {"FabricError": "Exception"}, ""
    for line in errors.__doc__.splitlines():
        mark, name = [*line.split(), "", ""][:2]
        if mark == "+":
            drawn[name], parent = "FabricError", name
        elif mark == "-":
            drawn[name] = parent

    classes = [c for c in vars(errors).values() if isinstance(c, type)]

    assert {c.__name__: c.__bases__[0].__name__ for c in classes} == drawn


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (errors.ConfigError, ValueError),
        (errors.BackendUnavailable, ImportError),
        (errors.TransferTimeoutError, TimeoutError),
        (errors.VmmMisaligned, ValueError),
        (errors.VmmOutOfMemory, MemoryError),
    ],
)
def test_error_is_what_python_calls_it(
    error: type[errors.FabricError], builtin: type[Exception]
) -> None:
    """Code that knows nothing of the fabric can catch it."""
    assert issubclass(error, builtin)
