"""The input of a job as the user names it: sources, and how rows become requests."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, InputError
from .input_sources import STDIN, InputSource
from .template import Template
from .template_parts import BEGIN, END

DEFAULT_ENDPOINT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class JobInput:
    """The sources of a job, and the options that apply to all of them.

    sources: read one after the other, as one job.
    template: turns a row of a table into a request body. None: sources hold batch
        lines.
    endpoint: endpoint of requests made from rows.
    id_column: column with the custom_id of a row. None: the number of the row.
    max_requests: read only the first requests, up to this number. None: all.
    optimize_fields: the order of the fields in the template's block is chosen for each row.
    """

    sources: tuple[InputSource, ...]
    template: Template | None = None
    endpoint: str = DEFAULT_ENDPOINT
    id_column: str | None = None
    max_requests: int | None = None
    optimize_fields: bool = False

    @property
    def title(self) -> str:
        """The job's input in one phrase, for reports and messages."""
        first = self.sources[0].short_title
        more = len(self.sources) - 1
        return f"{first} and {more} more" if more else first

    @property
    def locations(self) -> set[str]:
        """Where the sources are: absolute paths and URLs."""
        return {source.location for source in self.sources}

    @property
    def plain_file(self) -> Path | None:
        """The input itself where it is one local file of batch lines, used as it is."""
        if len(self.sources) > 1 or self.template or self.max_requests is not None:
            return None
        return self.sources[0].plain_file

    @property
    def repeatable(self) -> bool:
        """Whether every source can be read again with the same result."""
        return all(source.repeatable for source in self.sources)

    def check(self) -> None:
        """Look for errors that show before anything is read.

        Raises:
            InputError: a file is missing, cannot be read, or is named twice.
            ConfigError: a name or an option cannot be used.
        """
        names = [source.name for source in self.sources]
        if names.count(STDIN) > 1:
            raise ConfigError("standard input (-) can be read only once.")
        twice = [source for source in self.sources if names.count(source.name) > 1]
        if twice and self.template is None:
            raise InputError(
                f"input {twice[0].title} is named twice; custom ids must be unique."
            )
        if self.id_column is not None and self.template is None:
            raise ConfigError("--id-column can be used only with --template.")
        if self.optimize_fields and self.template is None:
            raise ConfigError("--optimize-fields can be used only with --template.")
        if self.optimize_fields and self.template and self.template.block is None:
            raise ConfigError(
                "--optimize-fields has nothing to reorder: mark the lines of the template "
                f"that may change places with {BEGIN} and {END}."
            )
        for source in self.sources:
            source.check(has_template=self.template is not None)

    def fingerprint(self) -> dict[str, Any]:
        """Everything that decides which lines are staged, as JSON values."""
        fingerprint: dict[str, Any] = {
            "inputs": [source.identity() for source in self.sources],
            "template": self.template.body if self.template else None,
            "url": self.endpoint,
            "id_column": self.id_column,
            "max_requests": self.max_requests,
        }
        if self.optimize_fields:
            fingerprint["optimize_fields"] = True
        found: dict[str, Any] = json.loads(json.dumps(fingerprint))
        return found
