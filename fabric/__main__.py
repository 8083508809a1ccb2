"""Entry of the command line: what must be settled before Ray is imported.

Ray reads its authentication mode when it is loaded, so a driver that joins a cluster with
token authentication must have the variable before that; the cluster's own file is not
enough.  Everything else is in `fabric.cli`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path

MODE = "RAY_AUTH_MODE"
_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def main() -> None:
    """Run the command line."""
    settle_authentication(sys.argv[1:], os.environ, Path.home() / ".ray" / "auth_token")
    from fabric.cli import main as run  # noqa: PLC0415 - imports Ray

    run()


def settle_authentication(
    arguments: Sequence[str], environment: MutableMapping[str, str], token: Path
) -> None:
    """Turn token authentication on where there is a token, or where one will be needed.

    Only ``up`` makes a token, since it may start a Ray; a mode that is set already stays.
    """
    if MODE in environment:
        return
    has_token = token.exists() or any(name in environment for name in _TOKENS)
    if not has_token and list(arguments[:1]) == ["up"]:
        subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", "get-auth-token", "--generate"],
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        has_token = True
    if has_token:
        environment[MODE] = "token"


if __name__ == "__main__":
    main()
