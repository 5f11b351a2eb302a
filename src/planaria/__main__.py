"""`python -m planaria` is the `planaria` command."""

from planaria.cli import main

main()
