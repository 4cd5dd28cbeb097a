"""A processor of ``ray.data.llm`` that plans the rows of a dataset as one job.

Ray Data gives an engine a block at a time. Here ``sglang-batch run`` gets all rows in place of the
engine's stage; the stages before it are Ray's.
"""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import islice, takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow
import ray

from ..errors import ConfigError, EngineError, InputError
from ..run.answer_table import error_of, text_in
from .frame_job import run_job
from .own_server import flags_of
from .streamer import RowLines

_STAGE = "SGLangEngineStage"
_BLOCK_ROWS = 1000
_INSTEAD = "give ray_resources in engine_kwargs, or set HF_* and SGLANG_* here"
_NO_OPTIONS = ("model", "skip_tokenizer_init", "task")  # among engine_kwargs
# SGLang's sampling parameters that a completion calls otherwise.
_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_NAMES |= {"sampling_seed": "seed"}


class PlannedProcessor:
    """A processor that ``ray.data.llm.build_processor`` has made, with one plan for all rows.

    Args:
        processor: its ``engine_kwargs`` may be any options of ``sglang-batch run``.
        job: a directory that keeps the job. If it stops, the same call resumes it.

    Raises ConfigError if the processor is of another kind, or its config cannot be used.
    """

    def __init__(self, processor: Any, job: str | Path | None = None) -> None:
        if _STAGE not in processor.stages:
            kind = type(processor.config).__name__
            raise ConfigError(f"{kind}: give an SGLangEngineProcessorConfig instead.")
        for name in ("accelerator_type", "runtime_env"):
            if value := getattr(processor.config, name):
                raise ConfigError(f"{name}={value!r} reaches no engine: {_INSTEAD}.")
        self._processor, self._job = processor, job

    def __call__(self, dataset: Any) -> Any:
        """Run the job. Only ``postprocess`` is left for when the rows are read.

        Raises InputError for a refused row, EngineError for one that fails, or the engine.
        """
        before, after = copy.copy(self._processor), copy.copy(self._processor)
        stages = takewhile(lambda each: each[0] != _STAGE, before.stages.items())
        before.stages, before.postprocess = OrderedDict(stages), None
        after.stages, after.preprocess = OrderedDict(), None
        rows, data = before(dataset), before.DATA_COLUMN
        # A job resumes with the same rows, and answers find theirs by the order.
        rows.context.execution_options.preserve_order = True
        if not (rows := rows.materialize()).count():
            return after(rows)
        with TemporaryDirectory(prefix="sglang-batch-") as scratch:
            job = Path(self._job or scratch)
            found: Any = [ray.put(block) for block in self._answers(rows, job)]
        rows = rows.zip(ray.data.from_arrow_refs(found))
        return after(rows.map(lambda row: {data: row.pop(data) | row}))

    def _answers(self, rows: Any, job: Path) -> Iterator[pyarrow.Table]:
        """Answer the rows. Yields their new columns, block by block."""
        config, lines = self._processor.config, RowLines("/v1/completions")
        job.mkdir(parents=True, exist_ok=True)
        source, results = job / "rows.jsonl", job / "results.jsonl"
        with source.open("wb") as file:
            for number, row in enumerate(rows.iter_rows()):
                made = lines.line(_body(row[self._processor.DATA_COLUMN]), number)
                if made.refused:
                    raise InputError(made.refused)
                file.write(made.line + b"\n")
        continues: bool = config.should_continue_on_error
        options: dict[str, Any] = {"skip_invalid": continues}
        if "workers" not in config.engine_kwargs:
            engines = config.get_concurrency()
            options["engines"] = "{min_size}:{max_size}".format(**engines)
            options["ray"] = ray.get_runtime_context().gcs_address
            options["model_path"] = config.model_source
        options |= config.engine_kwargs | dict.fromkeys(_NO_OPTIONS)
        run_job(["-i", str(source), "-o", str(results), *flags_of(options)])
        with results.open("rb") as file:
            while part := list(islice(file, _BLOCK_ROWS)):
                yield pyarrow.Table.from_pylist([_columns(x, continues) for x in part])


def _body(data: Mapping[str, Any]) -> dict[str, Any]:
    """The request of a row. Arrow gives each row the keys of all, with nulls."""
    params = (data.get("sampling_params") or {}).items()
    body = {"prompt": data.get("tokenized_prompt", data.get("prompt"))}
    body["max_tokens"] = 128  # SGLang's default, which is not that of completions
    return body | {_NAMES.get(name, name): v for name, v in params if v is not None}


def _columns(line: bytes, continues: bool) -> dict[str, Any]:
    """The new columns of a row, from its line of results. Raises EngineError if it failed."""
    entry = json.loads(line)
    error = error_of(entry)
    if error and not continues:
        raise EngineError(
            f"row {entry['custom_id']} failed: {error} Keep the others with "
            "should_continue_on_error=True."
        )
    body = {} if error else entry["response"]["body"]
    usage = body.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    columns = {
        "generated_text": text_in(body) or "",
        "num_input_tokens": usage.get("prompt_tokens", 0),
        "num_cached_tokens": details.get("cached_tokens", 0),
        "num_generated_tokens": usage.get("completion_tokens", 0),
    }
    return columns | ({"__inference_error__": error or ""} if continues else {})
