"""The front process: the place that builds and wires everything around one engine process.

Knows every torch-free part; imports no torch. The engine process is composed in launch_engine.py.
"""

import asyncio
import contextlib
import errno
import json
import logging
import math
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from detour import __version__
from detour.api.app import build_app
from detour.api.settings import ApiSettings
from detour.config.environment import Environment, child_environment
from detour.config.options import EMBEDDED_MODEL, Config
from detour.config.start import EngineStart, pack_start
from detour.engine.channel import Ready
from detour.engine.recovery import Recovery
from detour.engine.remote import EngineClient
from detour.engine.supervisor import Supervisor
from detour.errors import ConfigError
from detour.loading import tiny_tokenizer
from detour.loading.hub import resolve_model
from detour.loading.model_config import read_generation_defaults, read_model_config
from detour.text.chat_template import ChatTemplate
from detour.text.reply_parser import reply_syntax
from detour.text.tokenizer import Tokenizer, open_tokenizer

log = logging.getLogger(__name__)

ENGINE_COMMAND = (sys.executable, "-m", "detour.launch_engine")
EMBEDDED_VOCABULARY = 49152  # tokens of EMBEDDED_MODEL
NO_LIMIT = 2**31
_ENGINE_GRACE_SECONDS = 5.0
_LAST_REPLIES_SECONDS = 2.0  # for what is said to clients when their time is up
_STOPPED = "The server stops and has no time left for this request: send it again."

Say = Callable[[str], None]


@dataclass(frozen=True)
class Model:
    """What the front needs of the model: its place, words and defaults, but no weights."""

    path: Path
    tokenizer: Tokenizer
    template: ChatTemplate
    settings: ApiSettings


def serve(config: Config, environment: Environment, say: Say) -> int:
    """Serve until told to stop; returns the exit status. `say` shows a line to who started it.

    Raises ConfigError or CheckpointError, one sentence, where the server cannot start.
    """
    with listen(config.host, config.port) as listener:
        model = open_model(config, environment)
        return run_loop(lambda: _Server(config, model, listener, say).run())


def listen(host: str, port: int) -> socket.socket:
    """A bound socket that nobody accepts from yet; an occupied port shows before a model loads."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host} is no address here: {error.strerror}.") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Cannot listen on {host}:{port}: {error.strerror}. "
            + (
                "--host takes an address of this machine."
                if error.errno == errno.EADDRNOTAVAIL
                else "Another server may run there; --port chooses another port."
            )
        ) from error
    return listener


def open_model(config: Config, environment: Environment) -> Model:
    """Finds the model (fetching it where it must) and reads what the front needs of it."""
    path = model_path(config, environment)
    model_config = read_model_config(path, config.model_overrides)
    tokenizer = tokenizer_of(config, environment, path, int(model_config["vocab_size"]))
    template = chat_template(config.chat_template, tokenizer)
    from_model = config.sampling_defaults == "model"
    settings = ApiSettings(
        model_path=config.model,
        served_model_names=tuple(name for name in config.served_model_name.split(",") if name),
        tokenizer_path=config.tokenizer_path,
        api_key=config.api_key or environment.api_key,
        admin_api_key=config.admin_api_key,
        cors_origins=origins(config.allowed_origins),
        generation_defaults=read_generation_defaults(path) if from_model else {},
        default_deadline=config.request_timeout,
        incremental_stream=config.incremental_stream,
        syntax=reply_syntax(config.reasoning_parser, config.tool_call_parser, template.source),
        model_config=model_config,
        server_config=config.public_values(),
    )
    return Model(path, tokenizer, template, settings)


def tokenizer_of(
    config: Config, environment: Environment, model: Path, vocab_size: int
) -> Tokenizer:
    """The model's own or the one asked for.

    Dummy weights that have none get the embedded model's, or if that is too large a tiny one.
    """
    if config.tokenizer_path:
        return open_tokenizer(model_path(config, environment, config.tokenizer_path))
    bare = model.is_dir() and not any(model.glob("tokenizer*"))
    if config.load_format != "dummy" or not bare:
        return open_tokenizer(model)
    if vocab_size >= EMBEDDED_VOCABULARY:
        log.warning("%s has no tokenizer: that of %s is used", model, EMBEDDED_MODEL)
        return open_tokenizer(model_path(config, environment, EMBEDDED_MODEL))
    if vocab_size < tiny_tokenizer.SIZE:
        raise ConfigError(
            f"{model} has no tokenizer, and the smallest here has {tiny_tokenizer.SIZE} tokens where "
            f"this model has {vocab_size}: name one with --tokenizer-path."
        )
    log.warning("%s has no tokenizer: one of %d tokens is used", model, tiny_tokenizer.SIZE)
    with tempfile.TemporaryDirectory() as folder:
        tiny_tokenizer.write_tokenizer(Path(folder))
        return open_tokenizer(Path(folder))


def model_path(
    config: Config, environment: Environment, name: str = "", weights: bool = True
) -> Path:
    """Where the model (or another that `name` gives) lies on this disk, fetched if it must be;
    without `weights` only the small files of a hub id."""
    cache = Path(config.cache_dir).expanduser() if config.cache_dir else environment.cache_dir
    return resolve_model(
        name or config.model,
        cache,
        revision=config.revision,
        token=environment.hub_token,
        offline=environment.hub_offline,
        weights=weights,
    )


def origins(text: str) -> tuple[str, ...]:
    """From a JSON list or names between commas. Raises ConfigError."""
    try:
        names = json.loads(text) if text.startswith("[") else text.split(",")
    except ValueError as error:
        raise ConfigError(f"--allowed-origins takes a JSON list or names, not {text!r}.") from error
    return tuple(str(name).strip() for name in names if str(name).strip())


def chat_template(path: str, tokenizer: Tokenizer) -> ChatTemplate:
    source = tokenizer.chat_template
    if path:
        try:
            source = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--chat-template {path} cannot be read: {error}.") from error
    bos = tokenizer.token_text(tokenizer.bos_id) if tokenizer.bos_id >= 0 else ""
    eos = tokenizer.token_text(tokenizer.eos_ids[0]) if tokenizer.eos_ids else ""
    return ChatTemplate(source, bos, eos)


def run_loop(main: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Runs `main` on the fastest event loop there is."""
    factory = uvicorn.Config("", loop="auto", log_config=None).get_loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main())


class _HttpServer(uvicorn.Server):
    """Leaves signals to us: a second one must end the engine too."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    """One run of the server: its tasks and the ways it ends."""

    def __init__(self, config: Config, model: Model, listener: socket.socket, say: Say) -> None:
        self._config = config
        self._model = model
        self._listener = listener
        self._say = say
        seed = config.random_seed  # of dummy weights: the same for every engine of this run
        self._seed = seed if seed >= 0 else secrets.randbits(31)
        self._stops = 0  # how often we were told to stop
        self._stop = asyncio.Event()

    async def run(self) -> int:
        supervisor = Supervisor(ENGINE_COMMAND, child_environment())
        most = self._config.max_queued_requests or NO_LIMIT
        recovery = Recovery(
            supervisor,
            self._first_words,
            lambda channel: EngineClient(channel, most),
            self._config.watchdog_timeout,
        )
        try:
            await recovery.start()
            return await self._serve(recovery, supervisor)
        finally:
            recovery.close()

    def _first_words(self, to_engine: str, to_front: str) -> bytes:
        path = str(self._model.path)
        return pack_start(
            EngineStart(
                config=self._config,
                model_path=path,
                seed=self._seed,
                to_engine=to_engine,
                to_front=to_front,
            )
        )

    async def _serve(self, recovery: Recovery, supervisor: Supervisor) -> int:
        client = recovery.client
        http = self._http_server(client)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._told_to_stop, http, client)
        keeping = asyncio.gather(recovery.keep(), recovery.look())
        serving = asyncio.create_task(http.serve([self._listener]))
        try:
            await _first(client.wait_until_up(), self._stop.wait(), serving)
            if client.state == "failed":
                http.should_exit = True
                await serving
                raise ConfigError(client.failure)
            if client.state == "ready":
                recovery.connected()
                self._say(welcome(self._config, self._model.settings, client.ready, self._url()))
            await _first(self._stop.wait(), serving)
            await self._drain(client, supervisor, http, serving)
        finally:
            for task in (keeping, serving):
                task.cancel()
            await asyncio.gather(keeping, serving, return_exceptions=True)
        return 0 if self._stops < 2 else 1

    def _http_server(self, client: EngineClient) -> _HttpServer:
        config = self._config
        app = build_app(client, self._model.tokenizer, self._model.template, self._model.settings)
        return _HttpServer(
            uvicorn.Config(
                app,
                log_config=None,
                log_level=config.log_level_http,
                access_log=config.log_level_http in ("debug", "info"),
                root_path=config.root_path,
                ssl_keyfile=config.ssl_keyfile or None,
                ssl_certfile=config.ssl_certfile or None,
                timeout_graceful_shutdown=math.ceil(config.drain_timeout + _LAST_REPLIES_SECONDS),
                timeout_keep_alive=75,
                ws="none",
            )
        )

    def _told_to_stop(self, http: _HttpServer, client: EngineClient) -> None:
        self._stops += 1
        self._stop.set()
        if self._stops == 1:
            log.info(
                "stopping: open requests have %g s to finish; once more to stop now",
                self._config.drain_timeout,
            )
        else:
            client.end_open(_STOPPED)
            asyncio.get_running_loop().call_later(_LAST_REPLIES_SECONDS / 4, _force, http)

    async def _drain(
        self,
        client: EngineClient,
        supervisor: Supervisor,
        http: _HttpServer,
        serving: "asyncio.Task[None]",
    ) -> None:
        """Take nothing new, let what is open finish for a while, then end the engine."""
        draining = asyncio.create_task(client.drain())
        http.should_exit = True
        await asyncio.wait((serving,), timeout=self._config.drain_timeout)
        client.end_open(_STOPPED)  # what had no time left
        await serving
        if client.state != "failed":
            client.shut_down()
        await supervisor.end(_ENGINE_GRACE_SECONDS if self._stops < 2 else 0.0)
        draining.cancel()

    def _url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(
            host, f"[{host}]" if ":" in host else host
        )
        return f"{'https' if self._config.ssl_keyfile else 'http'}://{shown}:{port}"


def _force(http: _HttpServer) -> None:
    http.force_exit = True


async def _first(*waits: Awaitable[object]) -> None:
    """Returns when the first is done; cancels the coroutines among the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, wait in zip(tasks, waits, strict=True):
        if task is not wait:
            task.cancel()


def welcome(config: Config, settings: ApiSettings, ready: Ready, url: str) -> str:
    """What a person sees when the server is up: what runs, and a line to try."""
    tokens = (ready.num_pages - 1) * ready.page_size
    megabytes = tokens * ready.kv_bytes_per_token / 1e6
    backends = ", ".join(f"{op} {backend}" for op, backend in sorted(ready.backends.items()))
    secret = " -H 'Authorization: Bearer YOUR_KEY'" if settings.api_key else ""
    question = '{"role": "user", "content": "What is the capital of France?"}'
    body = f'{{"messages": [{question}], "temperature": 0}}'
    lines = [
        f"Detour {__version__} serves {settings.names[0]} at {url}",
        f"  model     {ready.dtype} on {ready.device}, weights {ready.weight_bytes / 1e6:,.0f} MB",
        f"  context   {ready.context_length:,} tokens",
        f"  KV cache  {tokens:,} tokens ({megabytes:,.0f} MB), {ready.max_slots} sequences at once",
        f"  backends  {backends or 'references'}",
        "Try it:",
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{secret} -d '{body}'",
    ]
    return "\n".join(lines)
