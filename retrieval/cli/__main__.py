"""`python -m retrieval.cli`: what launchers of several processes call."""

from retrieval.cli.app import main

main()
