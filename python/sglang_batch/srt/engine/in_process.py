"""SGLang in this process: its arguments, an engine without HTTP, and prompts without an engine.

SGLang's serving classes render a request with the model configuration, tokenizer, chat
template and server arguments of its tokenizer manager. No channel to a scheduler is needed,
and no weights are loaded.
"""

from __future__ import annotations

import asyncio
import io
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from typing import Any, cast

import psutil  # type: ignore[import-untyped]
from sglang.srt import runtime_context as context
from sglang.srt.managers.io_struct import EmbeddingReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.parser.template_manager import TemplateManager

from ...errors import ConfigError, SGLangBatchError
from ...request import BatchRequestInput, RequestOutput
from ..compat.offline_hooks import enter
from ..compat.server_types import EngineRequest, JsonObject, OfflineArgs
from .sglang_engine import SGLangEngine, text_token_ids


def parse_server_args(argv: list[str]) -> OfflineArgs:
    """Parse ``argv`` with SGLang's own argument parser, in offline mode.

    Raises:
        ConfigError: SGLang refuses an argument. Its usage message is on standard error.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    if not any(arg.split("=")[0] == "--log-level" for arg in argv):
        argv = [*argv, "--log-level", "warning"]
    said = io.StringIO()
    try:
        with redirect_stderr(said), _refusing("an option"):
            parsed: OfflineArgs = prepare_server_args([*argv, "--offline-batch"])
    except SystemExit as end:
        if not end.code:  # --help
            raise
        lines = said.getvalue().strip().splitlines() or [str(end.code)]
        raise ConfigError(lines[-1].rpartition("error: ")[2]) from None
    finally:
        sys.stderr.write(said.getvalue())
    return parsed


def resolve(server_args: OfflineArgs, on_death: Callable[..., None]) -> None:
    """Have SGLang read the model's configuration, and set the arguments that are not given.

    Args:
        on_death: SGLang's children signal this process when they fail, and it calls
            this. A function of a module, since SGLang pickles its arguments.

    Raises:
        ConfigError: SGLang refuses the model or an argument. Its traceback is on
            standard error.
    """
    server_args.custom_sigquit_handler = on_death
    server_args._offline_from_cli = False  # raise our errors
    with _refusing("the model or an option"):
        server_args.resolve_once()


@contextmanager
def _refusing(subject: str) -> Iterator[None]:
    """Raise SGLang's exceptions, such as those of the file of --config, as ConfigError."""
    try:
        yield
    except SGLangBatchError:
        raise
    except Exception as error:
        traceback.print_exc()
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"SGLang refuses {subject}: {reason}") from None


def memory_note(server_args: OfflineArgs) -> str:
    """The size of the KV cache, if it is our default for a CPU, else empty."""
    from .cpu_defaults import NOTE

    return str(getattr(server_args, NOTE, ""))


def model_name(server_args: OfflineArgs) -> str:
    """The model's name in requests."""
    return str(server_args.served_model_name or server_args.model_path)


@contextmanager
def engine(
    server_args: OfflineArgs,
) -> Iterator[tuple[SGLangEngine, asyncio.AbstractEventLoop]]:
    """Load the model, and yield the engine and the event loop for calls to it."""
    import sglang

    try:
        stock = sglang.Engine(server_args=server_args)
    except BaseException:
        kill_children()
        raise
    try:
        yield SGLangEngine(stock.tokenizer_manager, stock.template_manager), stock.loop
    finally:
        # SGLang's processor for LLaVA and Mistral 3 wraps another and cannot be shut down.
        manager: Any = stock.tokenizer_manager
        processor = getattr(manager, "mm_processor", None)
        manager.mm_processor = getattr(processor, "inner", processor)
        try:
            stock.shutdown()
        except KeyboardInterrupt:
            kill_children()
            raise


def kill_children() -> None:
    """End the processes of an engine that failed or does not finish starting."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=10)


@dataclass(frozen=True, slots=True)
class RenderedRequest:
    """The sequences of one request.

    prompts: token ids of each sequence: one for each prompt, or ``n`` if it has ``n``.
    shareable_len: most tokens of a prompt that may come from the cache, or None for all.
    max_new_tokens: most tokens to generate for each prompt, 1 for embeddings.
    fixed_length: whether exactly ``max_new_tokens`` will be generated.
    adapter, namespace: see ``engine.PreparedRequest``.
    """

    prompts: list[list[int]]
    shareable_len: int | None
    max_new_tokens: list[int]
    fixed_length: bool
    adapter: str = ""
    namespace: str = ""


class Renderer:
    """Renders requests with SGLang's serving classes. Made by :func:`renderer`.

    context_len: tokens of a prompt and its answer together, at most.
    """

    def __init__(self, manager: _RenderingManager, templates: TemplateManager) -> None:
        self._manager = manager
        self._engine = SGLangEngine(manager, templates)
        self.context_len = int(manager.context_len)

    @property
    def model_config(self) -> JsonObject:
        """The model's configuration with all defaults filled in."""
        config: JsonObject = self._manager.model_config.hf_config.to_dict()
        return config

    async def render(self, request: BatchRequestInput) -> RenderedRequest | str:
        """The prompts of a request, or the engine's reason to refuse it."""
        prepared = await self._engine.prepare(
            request, str(request.index), tokenize=False
        )
        if isinstance(prepared, RequestOutput):
            return str(json.loads(prepared.body)["error"]["message"])
        adapted = prepared.adapted
        if adapted.contains_mm_input():
            return "images, video and audio are not supported: their tokens are unknown"
        try:
            enter(self._manager, adapted)
            adapted.normalize_batch_and_arguments()
            each = [adapted]
            if not adapted.is_single:
                each = [adapted[i] for i in range(adapted.batch_size)]
            prompts = [self._prompt(one) for one in each]
            for one, prompt in zip(each, prompts, strict=True):
                self._manager._validate_one_request(one, prompt)
        except ValueError as error:
            return str(error)
        sampling: Any = each[0].sampling_params
        if not isinstance(prepared.adapted, EmbeddingReqInput):
            prompts = prompts * (sampling.get("n") or 1)
        asked = prepared.max_new_tokens
        # The scheduler's bound: one token stays free, and one ends the answer.
        free = [self.context_len - 2 - len(prompt) for prompt in prompts]
        return RenderedRequest(
            prompts,
            prepared.shareable_len,
            [max(1, most if asked is None else min(asked, most)) for most in free],
            prepared.ignore_eos,
            prepared.adapter,
            prepared.namespace,
        )

    def _prompt(self, one: EngineRequest) -> list[int]:
        if one.input_ids:
            return list(cast("list[int]", one.input_ids))
        if self._manager.tokenizer is None:
            raise ValueError("text cannot be rendered with --skip-tokenizer-init")
        # A pair for a cross-encoder comes as a list of one.
        text = one.text[0] if isinstance(one.text, list) else cast("str", one.text)
        return text_token_ids(self._manager.tokenizer, text)


class _RenderingManager(TokenizerManager):  # type: ignore[misc]
    """SGLang's tokenizer manager for rendering only: no sockets, no scheduler."""

    def __init__(self, server_args: OfflineArgs) -> None:
        # No super().__init__(), which opens the channels to an engine's processes.
        self.server_args = server_args
        self.allow_auto_truncate = context.get_serving().allow_auto_truncate
        self.init_model_config()
        self.init_tokenizer_and_processor()


def read_templates(templates: TemplateManager, manager: Any, model_path: str) -> None:
    """Read the templates of the published arguments, or those of the model."""
    serving = context.get_serving()
    templates.initialize_templates(
        manager,
        model_path=model_path,
        chat_template=serving.chat_template,
        completion_template=serving.completion_template,
    )


@contextmanager
def renderer(server_args: OfflineArgs) -> Iterator[Renderer]:
    """A renderer for the model named in ``server_args``.

    Raises:
        ConfigError: the model's configuration or tokenizer cannot be loaded.
    """
    before = context.snapshot_context()
    try:
        try:
            context.publish(server_args, role="tokenizer")
            manager = _RenderingManager(server_args)
            templates = TemplateManager()
            read_templates(templates, manager, context.get_model().model_path)
            made = Renderer(manager, templates)
        except (OSError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"--model-path {server_args.model_path} cannot be loaded: {error}"
            ) from error
        yield made
    finally:
        context.restore_context(before)
