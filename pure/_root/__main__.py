"""``numden``, also ``python -m numden``: the command line joins the parts."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        import typer  # noqa: F401
    except ImportError:
        sys.exit("numden: the command line needs typer. Install it: pip install 'numden[train]'")
    from numden.models.cli import app

    app()


if __name__ == "__main__":
    main()
