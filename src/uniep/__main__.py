"""`python -m uniep`, and the `uniep` command."""

import sys


def main() -> None:
    try:
        from uniep.cli.main import app

        app(prog_name="uniep")
    except KeyboardInterrupt:  # while modules are loaded, too
        sys.exit(130)
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "matplotlib"):
            raise
        sys.exit(
            f"the `uniep` command needs {error.name}, which is not installed: pip install typer rich matplotlib "
            "(uniep's extra `cli`); the library itself needs only PyTorch"
        )


if __name__ == "__main__":
    main()
