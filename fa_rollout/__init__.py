"""Fully asynchronous rollouts: generator, hub, launcher, engines, slime plug-in."""
