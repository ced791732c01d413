"""One window with ``optax.MultiSteps``, for ``from_command``; runs where jax and optax are.

Reads and writes the files that ``numden.property_tests.adapters.from_command`` describes. The
first argument says what a micro-step's loss is: ``mean``, over its own tokens, or ``share``, its
sum over the count of the window, times the number of micro-steps, since MultiSteps averages.
"""

import json
import sys
from pathlib import Path

import jax  # pyright: ignore[reportMissingImports]
import numpy as np
import optax  # pyright: ignore[reportMissingImports]

jax.config.update("jax_enable_x64", True)


def main(kind: str, folder: Path) -> None:
    """Run the window of the one rank."""
    world = json.loads((folder / "world.json").read_text())
    params = dict(np.load(folder / "params.npz"))
    num_steps = world["micro_steps"][0]
    window = [dict(np.load(folder / f"rank0_micro{i}.npz")) for i in range(num_steps)]
    total = sum(batch["mask"].sum() for batch in window)

    def loss_fn(params, batch):
        num, den = (batch["losses"] * batch["mask"]).sum(), max(batch["mask"].sum(), 1)
        return params["w"] * num / (den if kind == "mean" else total / num_steps)

    optimizer = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=num_steps)
    state = optimizer.init(params)
    for batch in window:
        updates, state = optimizer.update(jax.grad(loss_fn)(params, batch), state, params)
        params = optax.apply_updates(params, updates)
    np.savez(folder / "new_params.npz", w=np.asarray(params["w"]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
