"""`python -m retrieval.cli`, for launchers of several processes."""

from retrieval.cli.app import main

main()
