from tests.hub.conftest import engine, rig

__all__ = ["engine", "rig"]
