"""The command ``sglang-batch run``: files in, a file out."""
