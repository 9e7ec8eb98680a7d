"""The routes: what is done at each address."""
