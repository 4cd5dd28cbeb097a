"""The files, uploads and batches of OpenAI's published API spec."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

Json = dict[str, Any]
NULL = "null where the spec has no null"


class Spec:
    """The schemas and examples of the spec, by method and path."""

    def __init__(self, path: Path) -> None:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        self._document = yaml.load(path.read_text(), Loader=loader)
        self.version = self._document["info"]["version"]

    def operations(self) -> set[tuple[str, str]]:
        """All calls of files, uploads and batches."""
        return {
            (method, path)
            for path, methods in self._document["paths"].items()
            if re.match("/(files|uploads|batches)(/|$)", path)
            for method in methods
        }

    def purposes(self) -> list[str]:
        """The purposes that a file may be uploaded for."""
        schemas = self._document["components"]["schemas"]
        return list(schemas["CreateFileRequest"]["properties"]["purpose"]["enum"])

    def example(self, method: str, path: str) -> str:
        """The call of ``curl`` that the spec shows."""
        meta = self._document["paths"][path][method]["x-oaiMeta"]
        return str(meta["examples"]["request"]["curl"])

    def differences(self, method: str, path: str, body: Any) -> Iterator[str]:
        """How an answer differs from the spec."""
        answers = self._document["paths"][path][method]["responses"]
        return self._compare(answers["200"]["content"]["application/json"], body)

    def error_differences(self, body: Any) -> Iterator[str]:
        """How the body of an error differs from the spec."""
        reference = {"$ref": "#/components/schemas/ErrorResponse"}
        return self._compare({"schema": reference}, body)

    def _compare(self, content: Json, body: Any) -> Iterator[str]:
        schema = content["schema"]
        # References point to the document's components, so these are put below the schema.
        whole = {**schema, "components": self._document["components"]}
        for error in Draft202012Validator(whole).iter_errors(body):
            where = ".".join(str(p) for p in error.path if not isinstance(p, int))
            is_null = error.instance is None and error.validator in ("type", "enum")
            what = NULL if is_null else error.message
            yield f"{where}: {what}"
        for where in self._unknown_keys(schema, body):
            yield f"{where}: not in the spec"

    def _unknown_keys(self, schema: Json, value: Any, at: str = "") -> Iterator[str]:
        schemas = list(self._alternatives(schema))
        if isinstance(value, list):
            items = [each["items"] for each in schemas if "items" in each]
            for item in value if items else []:
                yield from self._unknown_keys(items[0], item, at)
        elif isinstance(value, dict):
            if any("additionalProperties" in each for each in schemas):
                return
            known: Json = {}
            for each in schemas:
                known |= each.get("properties", {})
            for key, inner in value.items():
                if key not in known:
                    yield f"{at}{key}"
                else:
                    yield from self._unknown_keys(known[key], inner, f"{at}{key}.")

    def _alternatives(self, schema: Json) -> Iterator[Json]:
        """A schema, and all that it refers to or is combined of."""
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            schema = self._document["components"]["schemas"][name]
        yield schema
        for key in ("allOf", "anyOf", "oneOf"):
            for each in schema.get(key, ()):
                yield from self._alternatives(each)
