"""Searches for the fastest Schedule by timing: candidates run in child processes of all ranks."""
