"""What a recipe can say, and reading one."""
