"""Pure planning: from the token ids of a job's prompts to the order of its requests.

numpy and numba only: no torch, no SGLang, no files, no clock. Read ``requests`` for the
input, then the packages in the order of the data: ``prefixes``, ``costs``,
``output_lengths``, ``ordering``, ``sharding``, ``admission_rules``, ``simulator``. ``plan``
puts them together for one job and decides.
"""
