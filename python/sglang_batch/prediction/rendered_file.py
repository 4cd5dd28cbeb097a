"""The prompts of a batch file, rendered by SGLang for a plan, and kept for the next one.

SGLang's import takes longer than most plans. The prompts and the facts of its arguments are
therefore kept in the user's data directory, and a plan of the same lines for the same model
with the same arguments needs no SGLang. Another device, policy or price changes none of them.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import os
import platform
import zipfile
from array import array
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import platformdirs

from ..batch_api.equal_requests import find_equal
from ..batch_api.jsonl import BatchFile
from ..errors import StoreWriteError
from ..inputs.local_input import LocalInput, late_bar
from ..job.rendering import in_order
from ..planner.requests import UNKNOWN, PlanRequests
from ..request import BatchRequestInput
from ..run.model_place import cached_snapshot
from ..run.prepare import checked_requests
from ..store.files import atomic_write
from ..store.token_spool import TokenSpool
from .report import LeftOut

if TYPE_CHECKING:
    from ..srt.engine.in_process import RenderedRequest, Renderer

# Requests rendered at the same time, in SGLang's threads.
LOOKAHEAD = 32
# Files that are kept, the latest used, and most tokens of one: 256 MB.
KEPT_FILES, KEPT_TOKENS = 8, 1 << 26
# Environment variables that change what SGLang makes of prompts, models or this machine.
_VARIABLES = ("SGLANG_", "HF_", "TRANSFORMERS_", "OMP_", "CUDA_", "HIP_", "ROCR_")
_PACKAGES = ("sglang", "torch", "transformers", "tokenizers")


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What SGLang makes of its arguments, and torch of this machine, for a plan.

    model_config: the model's config.json with all defaults.
    shares: whether the arguments name the backend that reads shared prefixes once.
    device: the driver's name of this machine's GPU, or None.
    steps_of: the device under whose name timed steps are kept.
    """

    model_config: dict[str, Any]
    kv_dtype: str
    quantization: str | None
    max_total_tokens: int | None
    max_running_requests: int | None
    ep_size: int
    shares: bool
    device: str | None
    steps_of: str


@dataclass(frozen=True, slots=True)
class RenderedFile:
    """The prompts of a file, of which a line can have several, with the line of each; lines
    that are bad or that SGLang cannot render; lines in all, and those that get the answer
    of an equal one."""

    requests: PlanRequests
    custom_ids: list[str]
    refused: list[LeftOut]
    num_merged: int
    num_lines: int
    engine: EngineFacts


@dataclass(eq=False)
class FileRenderer:
    """Renders files for a plan, with SGLang for those that no earlier plan has rendered.

    Args:
        server_argv: SGLang's arguments.
        given: the same, as far as they are known without SGLang.
        skip_invalid: leave bad lines out. Otherwise they reject a file.
        directory: for the tokens, which are gone when the context ends.
    """

    server_argv: list[str]
    given: argparse.Namespace
    skip_invalid: bool
    directory: Path
    _open: ExitStack = field(default_factory=ExitStack, init=False)

    def __enter__(self) -> FileRenderer:
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def render(self, local: LocalInput, dedupe: str) -> RenderedFile:
        """The prompts of every line that would be computed.

        Raises:
            InputError: a line is bad, or all are.
            ConfigError: SGLang refuses the model or an argument.
        """
        place = self._place(local, dedupe)
        found = None if place is None else _kept(place)
        if found is None:
            # The lines are checked first: the import of SGLang takes seconds.
            skip = self.skip_invalid
            file = checked_requests(local, self.given, skip_invalid=skip)
            spool = TokenSpool(self.directory / f"{local.path.stem}.i32")
            with file.closing():
                renderer, engine = self._sglang
                self._open.enter_context(spool)
                found = asyncio.run(
                    render_file(file, local, renderer, engine, spool, dedupe)
                )
            if place is not None:
                _keep(place, found)
        return found

    @cached_property
    def _sglang(self) -> tuple[Renderer, EngineFacts]:
        from ..srt.compat.command_line import import_no_kernels

        import_no_kernels()
        from ..srt.engine import in_process, machine

        args = in_process.parse_server_args(self.server_argv)
        renderer = self._open.enter_context(in_process.renderer(args))
        kept = args.kv_cache_dtype
        device = machine.device_name()
        return renderer, EngineFacts(
            model_config=renderer.model_config,
            # By default KV is as the model's activations.
            kv_dtype=args.dtype if kept == "auto" else kept,
            quantization=args.quantization,
            max_total_tokens=args.max_total_tokens,
            max_running_requests=args.max_running_requests,
            ep_size=args.ep_size,
            shares=machine.decodes_share(args),
            device=device,
            steps_of=machine.timed_device(device),
        )

    def _place(self, local: LocalInput, dedupe: str) -> Path | None:
        """Where the prompts of a file are kept. None if not all is known that they depend on."""
        files = _files_of(self.server_argv, self.given)
        if files is None:
            return None
        own = list(Path(__file__).parents[1].rglob("*.py"))
        cards = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
        variables = sorted(os.environ.items())
        known = (
            [version(name) for name in _PACKAGES],
            max(path.stat().st_mtime_ns for path in own),
            local.sha256(), local.title, local.parts, dedupe, self.skip_invalid,
            self.server_argv, files, platform.node(), len(os.sched_getaffinity(0)),
            [card.read_text(errors="replace") for card in cards],
            [each for each in variables if each[0].startswith(_VARIABLES)],
        )  # fmt: skip
        digest = hashlib.sha256(msgspec.json.encode(known)).hexdigest()
        return platformdirs.user_data_path("sglang-batch") / "prompts" / f"{digest}.npz"


def _files_of(argv: list[str], given: argparse.Namespace) -> list[Any] | None:
    """The states of all files and directories that arguments name.

    None if a model is in none of them, or arguments are in a file.
    """
    words = {part for word in argv for part in word.split("=")}
    if "--config" in words:
        return None
    for name in ("model_path", "tokenizer_path"):
        model = getattr(given, name, None)
        if model and not Path(model).expanduser().exists():
            snapshot = cached_snapshot(model, getattr(given, "revision", None))
            if snapshot is None:
                return None
            words.add(snapshot)
    found: list[Any] = []
    for path in (Path(word).expanduser() for word in sorted(words)):
        with suppress(OSError, ValueError):  # a value that cannot be a name
            if path.exists():
                inside = sorted(path.glob("*")) if path.is_dir() else [path]
                for each in inside:
                    state = each.stat()
                    found.append(
                        (str(each.resolve()), state.st_size, state.st_mtime_ns)
                    )
    return found


# All of a :class:`RenderedFile` but its arrays.
_Rest = tuple[list[str], list[LeftOut], int, int, EngineFacts]
_ARRAYS = ("tokens", "offsets", "max_new_tokens", "known_output_len", "adapter")


def _kept(path: Path) -> RenderedFile | None:
    try:
        # numpy leaves a damaged file open.
        with open(path, "rb") as file, np.load(file) as arrays:
            rest = msgspec.json.decode(arrays["rest"].tobytes(), type=_Rest)
            requests = PlanRequests(
                **{name: arrays[name] for name in _ARRAYS if name in arrays}
            )
        os.utime(path)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None  # msgspec's errors are ValueErrors
    return RenderedFile(requests, *rest)


def _keep(path: Path, file: RenderedFile) -> None:
    """Keep the prompts, which only this user may read, if the disk allows it."""
    if len(file.requests.tokens) > KEPT_TOKENS:
        return
    _, *rest = (getattr(file, each.name) for each in fields(file))
    arrays = {name: getattr(file.requests, name) for name in _ARRAYS}
    try:
        encoded = msgspec.json.encode(rest)
    except (TypeError, ValueError):
        return  # a model's own configuration, half a surrogate pair
    content = io.BytesIO()
    np.savez(
        content,
        rest=np.frombuffer(encoded, np.uint8),
        **{name: array for name, array in arrays.items() if array is not None},
    )
    with suppress(OSError, StoreWriteError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with atomic_write(path) as out:
            out.write(content.getbuffer())
        kept = sorted(path.parent.glob("*.npz"), key=lambda each: each.stat().st_mtime)
        for old in kept[:-KEPT_FILES]:
            old.unlink()


async def render_file(
    file: BatchFile,
    local: LocalInput,
    renderer: Renderer,
    engine: EngineFacts,
    spool: TokenSpool,
    dedupe: str,
) -> RenderedFile:
    """Render every line that would be computed, and keep its tokens, in ``spool``, and its
    lengths."""
    valid = np.setdiff1d(np.arange(len(file)), np.array(list(file.invalid), np.int64))
    equal = find_equal(file, valid, dedupe)
    custom_ids: list[str] = []
    refused = [
        LeftOut(
            file.custom_id(index) or local.line_name(error.line or 0), error.message
        )
        for index, error in file.invalid.items()
    ]
    max_new_tokens, known = array("q"), array("q")
    adapters, adapter = {"": 0}, array("i")

    async def render(
        number: np.int64,
    ) -> tuple[BatchRequestInput, RenderedRequest | str]:
        request = file[int(number)]
        return request, await renderer.render(request)

    with late_bar(total=len(equal.todo), desc="Rendering", unit="req") as bar:
        async for request, found in in_order(map(render, equal.todo), LOOKAHEAD):
            bar.update()
            if isinstance(found, str):
                refused.append(LeftOut(request.custom_id, found))
                continue
            for prompt, limit in zip(found.prompts, found.max_new_tokens, strict=True):
                spool.append(prompt, found.shareable_len, found.namespace)
                adapter.append(adapters.setdefault(found.adapter, len(adapters)))
                custom_ids.append(request.custom_id)
                max_new_tokens.append(limit)
                known.append(limit if found.fixed_length else UNKNOWN)
    tokens, offsets = spool.arrays()
    return RenderedFile(
        PlanRequests(
            tokens,
            offsets,
            np.array(max_new_tokens, dtype=np.int32),
            np.array(known, dtype=np.int32),
            np.array(adapter, dtype=np.int32) if len(adapters) > 1 else None,
        ),
        custom_ids,
        refused,
        equal.num_merged,
        len(file),
        engine,
    )
