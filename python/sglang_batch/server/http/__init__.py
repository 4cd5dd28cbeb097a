"""The HTTP API that is added to SGLang's server: batches, files, uploads, waves."""
