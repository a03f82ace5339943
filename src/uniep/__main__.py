"""`python -m uniep`: the same as the `uniep` command."""

from uniep.cli.main import app

if __name__ == "__main__":
    app(prog_name="uniep")
