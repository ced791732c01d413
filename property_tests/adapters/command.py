"""Any program as a step, of whatever language and framework: it reads and writes files."""

import json
import os
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..worlds.world import StepResult, World, windows_of
from ._module import make_step, require_ranks, values_of

__all__ = ["from_command"]

LAST_LINES = 15


def from_command(
    argv: Sequence[str],
    *,
    num_ranks: int | None = None,
    cwd: str | Path | None = None,
    timeout: float = 60.0,
) -> Any:
    """A step of a program, which is run once for a world as ``argv… FOLDER``. Needs numpy.

    The program finds in the folder:

    - ``params.npz``: an array for each parameter, by name.
    - ``rank{r}_micro{i}.npz``: the micro-batch ``i`` of rank ``r``, an array for each field by
      name; both count from 0. A batch that is one array has the field ``batch``.
    - ``rank{r}_rest{i}.npz``: micro-batches that were generated together with these, if any.
    - ``world.json``: ``ranks``; ``mesh``, the size of each mesh axis by name, ranks numbered in
      row-major order; ``accumulation``, for how many micro-steps the trainer is configured;
      ``micro_steps`` and ``rest``, how many files of either kind there are for each rank;
      ``params`` and ``fields``, the names of parameters and of fields.

    It plays all the ranks, by its own means, and leaves in the folder one of these or both:

    - ``grads.npz``: the gradient that its optimizer gets, by the names of the parameters;
    - ``new_params.npz``: the parameters after the update, by plain SGD with lr 1;

    and, if it likes, ``result.json`` with the numbers ``loss``, as it would log it, and
    ``eval_loss``, as it would report it for the same micro-batches before the update. Arrays have
    the dtype that they came with, float64 if the params are.

    In Python::

        folder = Path(sys.argv[1])
        world = json.loads((folder / "world.json").read_text())
        params = dict(np.load(folder / "params.npz"))
        for rank, count in enumerate(world["micro_steps"]):
            window = [dict(np.load(folder / f"rank{rank}_micro{i}.npz")) for i in range(count)]
        ...
        np.savez(folder / "grads.npz", **grads)

    Args:
        argv: the program and its first arguments.
        num_ranks: the number of ranks that the program can play; any number if None.
        cwd: where to run it.
        timeout: seconds for one run. The program is killed then, with all that it started.

    Returns:
        ``(params, world) -> StepResult``.

    Raises:
        RuntimeError: by the step, when the program fails; with the last lines that it wrote to
            stderr.
        TimeoutError: by the step, when it takes too long.
        FileNotFoundError: by the step, when it leaves no gradient and no params.
        ValueError: by the step, when names or shapes are not those of the params.

    Examples:
        >>> import sys
        >>> program = '''
        ... import sys, numpy as np
        ... batch = np.load(sys.argv[1] + "/rank0_micro0.npz")
        ... np.savez(sys.argv[1] + "/grads.npz", w=batch["x"].mean())
        ... '''
        >>> step = from_command([sys.executable, "-c", program], num_ranks=1)
        >>> step({"w": torch.tensor(1.0)}, World([[{"x": torch.tensor([1.0, 3.0])}]])).grads
        {'w': tensor(2.)}
    """
    argv = [str(word) for word in argv]

    def step(params: Any, world: World) -> StepResult:
        world = windows_of(world)
        require_ranks("from_command", world, num_ranks)
        params = values_of(params)
        with tempfile.TemporaryDirectory(prefix="numden_step_") as name:
            folder = Path(name)
            _write(folder, params, world)
            _run([*argv, name], folder, cwd, timeout)
            return _read(folder, params, argv)

    return make_step(step, "from_command", argv, num_ranks)


def _write(folder: Path, params: Mapping[str, Tensor], world: World) -> None:
    _save(folder / "params.npz", params)
    fields: dict[str, None] = {}
    for kind, windows in (("micro", world), ("rest", world.rest)):
        for rank, window in enumerate(windows):
            for index, batch in enumerate(window):
                batch = batch if isinstance(batch, Mapping) else {"batch": batch}
                fields |= dict.fromkeys(batch)
                _save(folder / f"rank{rank}_{kind}{index}.npz", batch)
    about = {
        "ranks": len(world),
        "mesh": world.mesh,
        "accumulation": world.accumulation,
        "micro_steps": [len(window) for window in world],
        "rest": [len(window) for window in world.rest],
        "params": list(params),
        "fields": list(fields),
    }
    (folder / "world.json").write_text(json.dumps(about, indent=2))


def _save(path: Path, values: Mapping[str, Any]) -> None:
    import numpy as np

    try:
        tensors = {name: torch.as_tensor(value) for name, value in values.items()}
        arrays = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"from_command: params and batches must be tensors by name, of dtypes that numpy has, "
            f"got {list(values)}. Give a flat mapping of such. ({error})"
        ) from error
    np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]


def _run(argv: list[str], folder: Path, cwd: str | Path | None, timeout: float) -> None:
    """Run a program; whatever happens, nothing of it is left running."""
    with (folder / "stderr").open("wb") as stderr:
        process = subprocess.Popen(
            argv, cwd=cwd, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True
        )
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(
                f"from_command: must end within timeout={timeout:g} s, got no end of "
                f"{shlex.join(argv[:-1])}. Give more time.{_last_lines(folder)}"
            ) from None
        finally:
            _kill(process)
    if code:
        raise RuntimeError(
            f"from_command: must exit with status 0, got {code} from {shlex.join(argv[:-1])}."
            f"{_last_lines(folder)}"
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _last_lines(folder: Path) -> str:
    lines = (folder / "stderr").read_text(errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join(["", "It wrote last to stderr:", *lines]) if lines else ""


def _read(folder: Path, params: Mapping[str, Tensor], argv: list[str]) -> StepResult:
    grads, new = (_load(folder / f"{name}.npz", params) for name in ("grads", "new_params"))
    if grads is None and new is None:
        raise FileNotFoundError(
            "from_command: the program must write grads.npz or new_params.npz into the folder, got "
            f"neither from {shlex.join(argv)}.{_last_lines(folder)}"
        )
    numbers = folder / "result.json"
    result = json.loads(numbers.read_text()) if numbers.exists() else {}
    return StepResult(grads, new, result.get("loss"), result.get("eval_loss"))


def _load(path: Path, params: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    import numpy as np

    if not path.exists():
        return None
    with np.load(path) as arrays:
        found = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    shapes, right = _shapes(found), _shapes(params)
    if shapes != right:
        raise ValueError(
            f"from_command: {path.name} must have the names and shapes of the params, {right}, got "
            f"{shapes}. Write one array for each, by name."
        )
    return found


def _shapes(values: Mapping[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in values.items()}
