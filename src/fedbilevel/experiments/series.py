"""Several runs under one folder, started by one command: read what is finished, continue what is not, start the rest.

A series maps the places of its runs to their specs; every place is in the series' folder, or one level below.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedbilevel.core.errors import ConfigurationError
from fedbilevel.experiments.folder import Folder, as_damage
from fedbilevel.experiments.places import require_free
from fedbilevel.experiments.spec import Spec, read_like

ORDER = "methods.json"  # in a comparison's folder: its methods, in the order of their colours

Series = Mapping[Path, Spec]


def seeded(spec: Spec, seed: int) -> Spec:
    """The spec with that seed, for the run, the clock and, where it has one, the task."""
    task = {"seed": seed} if "seed" in spec.task.fields else {}
    return spec.replace(run={"seed": seed}, task=task, clock={"seed": seed})


def recorded_order(folder: Path) -> list[str]:
    """The names of a comparison's methods in the order of their colours; none where the folder has no such record.

    Raises:
        ConfigurationError: the record is damaged.
    """
    file = folder / ORDER
    if not file.is_file():
        return []
    with as_damage(file):
        names = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("a JSON list of the methods' names is expected")
    return names


def finished(place: Path) -> bool:
    """Whether a run's folder holds its outcome."""
    return Folder(place).summary.is_file()


def require_series(folder: Path, series: Series, *, besides: Sequence[str] = ()) -> None:
    """Refuse a folder with anything but some of these runs (and files of the names in `besides`)."""
    if folder.exists() and not folder.is_dir():
        require_free(folder)
    above = {parent for place in series for parent in place.parents if folder in parent.parents}
    for parent in [folder, *sorted(above)]:
        for path in sorted(parent.iterdir()) if parent.is_dir() else []:
            if path not in series and path not in above and not (parent == folder and path.name in besides):
                raise ConfigurationError(f"cannot write these runs to {folder}: {path} is there and not one of them")
    for place, spec in series.items():
        _require_run(folder, place, spec)


def _require_run(folder: Path, place: Path, spec: Spec) -> None:
    found = Folder(place)
    if not found.begun and not finished(place):
        found.require_free()
        return
    if changed := difference(read_like(found.spec, spec), spec):
        raise ConfigurationError(f"cannot continue the runs in {folder}: {found.spec} differs in {changed}")


def difference(there: Spec, asked: Spec) -> str:
    """The first field in which two specs differ, in words; nothing if they agree."""
    one, other = there.tables(), asked.tables()
    for section in one:
        for name in {**one[section], **other[section]}:
            a, b = (_plain(tables[section].get(name)) for tables in (one, other))
            if a != b:
                return f"{section}.{name}: {a!r} there, {b!r} now"
    return ""


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
