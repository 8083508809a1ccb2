"""When an arena gives idle memory back: once holding it has cost what giving it back does."""

from __future__ import annotations

from math import isinf

from actors.arena.arena import Arena
from policies.vmm_gate import MemoryPrice, UnitCosts, release_after_s


class Keeper:
    """Tidies one arena by the unit costs of its driver and a price of memory, both frozen.

    Parameters
    ----------
    costs
        Measured on the arena's driver, for its extents.
    price
        At no price nothing is ever given back.
    """

    def __init__(self, arena: Arena, costs: UnitCosts, price: MemoryPrice) -> None:
        self._arena = arena
        self.costs = costs
        # What is still there when memory is needed elsewhere must be moved at least.
        self.hold_s = release_after_s(costs, price, reuse_us=costs.steal_us)
        """How long memory may be idle; infinite for always."""

    def tidy(self) -> int:
        """Give memory back that has been idle for too long; how many bytes.

        Raises
        ------
        VmmError
            If the driver refuses; what was given back before stays so.
        """
        return 0 if isinf(self.hold_s) else self._arena.release_idle(self.hold_s)
