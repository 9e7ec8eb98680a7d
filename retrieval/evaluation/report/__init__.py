"""A run in one HTML file: figures, pictures of what is found and what is not, and where the
threshold lies.
"""
