"""The models of SGLang that most engines of the tests run.

SGLang looks for a model in the package that ``SGLANG_EXTERNAL_MODEL_PACKAGE`` names first, and
imports its 260 modules of models only if it isn't there.
"""
