"""Draw how FISM finds, among all points that lie in every ball, the point nearest to an anchor.

Run: python examples/location.py [FILE.png]        (needs matplotlib)

F, the mean distance to the balls, is 0 at all points that lie in every ball (shaded). H is half the squared distance to
the anchor, and chooses one of these points. At this point, the dashed circle around the anchor touches the shaded area.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Circle

import fedbilevel as fb
from fedbilevel.tasks import Task, location
from fedbilevel.tasks.location import nearest_in_all

Path = np.ndarray  # (points, 2)


def walked(task: Task, rounds: int) -> tuple[Path, Path]:
    """Run FISM, and return x_k and the average iterate x̂_k of every round."""
    coordinates = {
        f"{name}{i}": lambda x, y, i=i, average=average: (y if average else x)[i]
        for name, average in (("x", False), ("average", True))
        for i in (0, 1)
    }
    algorithm = fb.FISM(lr=2.0, regularization=0.05)
    history = fb.solve(
        algorithm, task.problem, task.clients, task.x0, rounds=rounds, eval_every=1, metrics=coordinates
    ).history
    paths = [np.stack([history[f"{name}0"], history[f"{name}1"]], axis=1) for name in ("x", "average")]
    return paths[0], paths[1]


def draw(file: str, balls: dict[str, np.ndarray], anchor: np.ndarray, path: Path, average: Path) -> None:
    """Draw the balls, the anchor, the paths and the solution, and save the picture as PNG."""
    centers, radii = balls["center"], balls["radius"]
    solution = nearest_in_all(anchor, centers, radii)
    figure = Figure(figsize=(7, 7), layout="constrained")
    axes = figure.subplots()
    grid = np.linspace(-10, 10, 801)
    places = np.stack(np.meshgrid(grid, grid), axis=-1)
    beyond = np.max(np.linalg.norm(places[:, :, None] - centers, axis=-1) - radii, axis=-1)
    axes.contourf(grid, grid, beyond, levels=[-np.inf, 0], colors=["#009E73"], alpha=0.25)
    for center, radius in zip(centers, radii, strict=True):
        axes.add_patch(Circle(tuple(center), radius, fill=False, color="#BBBBBB", linewidth=0.8))
    reach = float(np.linalg.norm(solution - anchor))
    axes.add_patch(Circle(tuple(anchor), reach, fill=False, color="black", linestyle="--", linewidth=0.8))
    axes.plot(*path.T, color="#0072B2", marker=".", markersize=4, linewidth=1, label="x, round by round")
    axes.plot(*average.T, color="#D55E00", marker=".", markersize=3, linewidth=1, label="average iterate")
    axes.plot(*path[0], color="black", marker="o", linestyle="", label="start")
    axes.plot(*anchor, color="#CC79A7", marker="*", markersize=14, linestyle="", label="anchor")
    axes.plot(*solution, color="black", marker="x", markersize=10, markeredgewidth=2, linestyle="", label="solution")
    axes.set(xlim=(-10.5, 10.5), ylim=(-10.5, 10.5), aspect="equal")
    axes.legend(loc="lower left", framealpha=0.9)
    axes.set_title(f"‖x − x*‖ = {np.linalg.norm(path[-1] - solution):.1e} after {len(path) - 1} rounds")
    figure.savefig(file, dpi=110, metadata={"Software": None})


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    task = location(targets=12, clients=4, seed=4)
    anchor = -np.asarray(jax.grad(lambda x: task.problem.outer(x, None, None))(jnp.zeros(2)))
    file = sys.argv[1] if len(sys.argv) > 1 else "location.png"
    draw(file, task.clients.inner.values, anchor, *walked(task, rounds=300))
    print(file)


if __name__ == "__main__":
    main()
