"""Loading by path, singletons, and decoding of arrays, as slime does."""

import importlib
from functools import cache
from typing import Any


@cache
def load_function(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class SingletonMeta(type):
    _made: dict[type, Any] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in SingletonMeta._made:
            SingletonMeta._made[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta._made[cls]
