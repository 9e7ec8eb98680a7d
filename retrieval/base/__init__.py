"""What every room stands on: arrays, files, photos, progress, the machine and its runtimes."""
