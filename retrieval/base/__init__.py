"""What every room stands on: arrays, files, places, locks, progress, memory and runtimes."""
