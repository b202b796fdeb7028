"""Translate modules of PyTorch into functions of JAX arrays for losses, and their parameters into x and y.

    from fedbilevel.torch import from_torch, load

    features, x0 = from_torch(backbone, torch.zeros(1, 3, 32, 32))  # features(x0, images) runs in JAX
    head, y0 = from_torch(classifier, torch.zeros(1, 64))
    result = fb.solve(…, x0, y0, rounds=100)
    load(backbone, result.x)

To divide the parameters of one module into x and y, use `split`; the losses then call apply(x | y, inputs). PyTorch is
imported at the first use of a name of this package; if it is missing, an error says which command installs it.
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
