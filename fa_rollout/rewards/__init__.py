"""Rewards: the user's function, called where it can neither block the event loop nor take the run down."""
