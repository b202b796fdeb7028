"""Fixed numbers for the steps of a method that are None, for tests of what is not about steps."""

from dataclasses import fields, is_dataclass, replace

import fedbilevel as fb

NUMBERS = {"outer_lr": 0.1, "lr": 0.5, "step": 0.1, "client_lr": 0.01}
OF_SYSTEMS = {"lr": 0.1}
XYV = fb.XYV(x=0.01, y=0.1, v=0.1)


def fixed(method):
    """The method, or part, with a number for each step that is None, of its parts too."""
    changed, numbers = {}, OF_SYSTEMS if isinstance(method, fb.parts.SystemSteps) else NUMBERS
    for field in fields(method):
        value, open_ = getattr(method, field.name), field.metadata.get("adaptive") or field.metadata.get("tied")
        if open_ and isinstance(value, fb.XYV):
            changed[field.name] = fb.XYV(*(b if a is None else a for a, b in zip(value, XYV, strict=True)))
        elif open_ and value is None:
            changed[field.name] = numbers[field.name]
        elif is_dataclass(value) and not isinstance(value, type) and hasattr(value, "phases"):
            changed[field.name] = fixed(value)
    return replace(method, **changed) if changed else method
