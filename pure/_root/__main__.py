"""``numden``, also ``python -m numden``: the command line joins the parts.

A command is imported when it is run, so that each needs no more than its own extra.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import typer


class Command(NamedTuple):
    """Where a command is, the extra that it needs, and what it does."""

    module: str
    extra: str
    help: str


COMMANDS = {
    "train": Command(
        "numden.models.cli",
        "train",
        "Train a target decoder and a DSpark drafter, decode with both, and check the gradient.",
    ),
    "check": Command(
        "numden.property_tests.cli",
        "check",
        "Try the laws of a loss function: is it a pair of sums, whatever the batch is cut into?",
    ),
    "check-step": Command(
        "numden.property_tests.cli",
        "check",
        "Compare a training step with the ratio of sums, and name what it computes instead.",
    ),
}


def main() -> None:
    """Run the command line."""
    try:
        import typer  # noqa: F401
    except ImportError:
        command = COMMANDS.get(sys.argv[1] if sys.argv[1:] else "train", COMMANDS["train"])
        what = f"Install it: pip install 'numden[{command.extra}]'"
        sys.exit(f"numden: the command line needs typer. {what}")
    _app()()


def _app() -> "typer.Typer":
    import typer

    app = typer.Typer(
        help="Training losses as ratios of sums: sums first, one division, SUM-reduced gradients.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    # All that follows the name, --help too, is for the command itself.
    untouched = {"allow_extra_args": True, "ignore_unknown_options": True}

    def run(context: typer.Context) -> None:
        assert context.info_name
        assert context.parent
        _run(context.info_name, context.args, context.parent.info_name)

    for name, command in COMMANDS.items():
        app.command(name, help=command.help, context_settings=untouched, add_help_option=False)(run)
    return app


def _run(name: str, args: list[str], prog_name: str | None) -> None:
    command = COMMANDS[name]
    try:
        commands = import_module(command.module).app
    except ImportError as error:
        if error.name and error.name.partition(".")[0] == "numden":
            raise
        sys.exit(
            f"numden {name}: needs the package {error.name}, which is not installed. "
            f"Run: pip install 'numden[{command.extra}]'"
        )
    commands([name, *args], prog_name=prog_name)


if __name__ == "__main__":
    main()
