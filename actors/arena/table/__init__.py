"""Which pages requests have, in transactions, and when a slot may be used again."""
