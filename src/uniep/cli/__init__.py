"""The `uniep` command.  One file per command, registered in `main`; needs the extra `uniep[cli]`."""
