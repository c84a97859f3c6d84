"""Weight updates and membership changes, as the hub orders them."""
