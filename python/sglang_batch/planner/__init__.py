"""Pure planning: from the token ids of a job's prompts to the order of its requests.

numpy and numba only: no torch, no SGLang, no files, no clock. Read ``requests`` for the
input, then the packages in the order of the data: ``prefixes``, ``costs``, ``lengths``,
``ordering``, ``sharding``, ``admission_rules``, ``simulator``. ``candidates`` puts them
together for one job and ``plan`` decides.
"""
