"""Modules of PyTorch as they are: functions of JAX arrays for losses, and parameters for x and y.

    from fedbilevel.torch import from_torch, load

    features, x0 = from_torch(backbone, torch.zeros(1, 3, 32, 32))  # features(x0, images) is JAX
    head, y0 = from_torch(classifier, torch.zeros(1, 64))
    result = fb.solve(…, x0, y0, rounds=100)
    load(backbone, result.x)

Of one module, `split` divides the parameters into x and y, and the losses call apply(x | y, inputs). The names below
are loaded when they are first used; without PyTorch the error says which command installs it.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedbilevel.torch.bridge import from_torch, load, parameters, split

__all__ = ["from_torch", "load", "parameters", "split"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("torch") is None:
        from fedbilevel.errors import ConfigurationError
        from fedbilevel.extending import missing

        raise ConfigurationError(f"this needs {missing('PyTorch', 'torch')}")
    return getattr(import_module(f"{__name__}.bridge"), name)
