"""Pure decisions over snapshots: no I/O, no clock of their own, no Ray."""
