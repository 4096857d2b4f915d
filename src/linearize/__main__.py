"""`python -m linearize`: the same as the `linearize` command."""

from linearize.cli import main

main()
