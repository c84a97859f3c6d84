"""Rewards: run the user's function so that it cannot block the event loop or end the run."""
